"""Gaps: the file `gaps.json` of a partition, which declares offsets as lost.

Invariant: a declared gap begins where a batch of the log begins or should begin, and ends where one does. It changes
no byte of the log, so batches that can be read are read. The file is read only after damage was met, so it costs
nothing for a whole log. It is replaced in one step, also while others read the log.

    {"format": 1, "log_id": "<32 digits>", "partition": 0, "gaps": [
        {"start": 1024, "end": 2048, "found": "...", "time": 1764000000000000, "accepted": 1764000060000000}],
     "crc": "<8 digits>"}

(in one line). `found` is a text about the damage; `time` is when it was declared, in microseconds UTC. `accepted` is
when a person has accepted the loss; it is missing until then.

Threads: no state, safe for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..config.policies import MAX_OFFSET
from ..errors import RecordTooLargeError
from ..format import checked_json
from ..format.record import Damage
from ..segment import Identity
from ..system.directory import Directory
from ..system.files import Files

NAME = "gaps.json"
_MOST_BYTES = 16 << 20  # some hundred thousand gaps
_MOST_WORDS = 200  # characters of the text about one gap
_WHAT = "the gaps of this partition"


class Gap(NamedTuple):
    """Offsets [start, end) of a log that are declared as lost. A reader skips them."""

    start: int
    end: int
    found: str  # a text about the damage
    time: int  # when the gap was declared, microseconds UTC
    accepted: int = 0  # when a person has accepted the loss, microseconds UTC; 0: not yet

    def as_damage(self, partition: int, path: str) -> Damage:
        """The gap as readers report it."""
        accepted = ", and whose loss was accepted" if self.accepted else ""
        found = f"a gap that a repair has declared{accepted} ({self.found})"
        return Damage(partition, range(self.start, self.end), os.path.join(path, NAME), 0, found, "whole batches")


def read_gaps(files: Files, directory: str, identity: Identity) -> tuple[Gap, ...]:
    """The declared gaps of a partition, in order; `CorruptLogError` if the file is damaged or of another log."""
    path = os.path.join(directory, NAME)
    return checked_json.read(files, path, _MOST_BYTES, lambda facts: _gaps(facts, identity), _WHAT) or ()


def parse_gaps(content: bytes, path: str, identity: Identity) -> tuple[Gap, ...]:
    """The declared gaps in the content of the file at `path`, in order."""
    return checked_json.decode(content, path, lambda facts: _gaps(facts, identity), _WHAT)


def _gaps(facts: dict[str, Any], identity: Identity) -> tuple[Gap, ...]:
    if (facts["log_id"], facts["partition"]) != (identity.log_id.hex(), identity.partition):
        raise ValueError(f"log {facts['log_id']}, partition {facts['partition']}")
    gaps = tuple(_gap(each) for each in facts["gaps"])
    if any(after.start <= gap.end for gap, after in pairwise(gaps)):
        raise ValueError("gaps that meet")
    return gaps


def _gap(facts: dict[str, object]) -> Gap:
    match facts:
        case {"start": int() as start, "end": int() as end, "found": str() as found, "time": int() as time}:
            accepted = facts.get("accepted", 0)
            if 0 <= start < end <= MAX_OFFSET and isinstance(accepted, int):
                return Gap(start, end, found, time, accepted)
    raise ValueError(f"a gap {facts!r:.100}")


def encode_gaps(identity: Identity, gaps: Sequence[Gap]) -> bytes:
    """The content of the file with these gaps, which are in order and do not meet."""
    return checked_json.seal({
        "log_id": identity.log_id.hex(), "partition": identity.partition,
        "gaps": [_facts(each) for each in gaps],
    })  # fmt: skip


def _facts(gap: Gap) -> dict[str, object]:
    facts: dict[str, object] = gap._asdict()
    if not gap.accepted:
        del facts["accepted"]
    return facts


def write_gaps(directory: Directory, identity: Identity, gaps: Sequence[Gap], permissions: int) -> None:
    """Replace the declared gaps of a partition. Synced."""
    content = encode_gaps(identity, gaps)
    if len(content) > _MOST_BYTES:
        raise RecordTooLargeError(f"the list of gaps in {directory.path}", len(content), _MOST_BYTES)
    directory.replace(NAME, content, permissions)


def between(gaps: Iterable[Gap], start: int, end: int) -> list[Gap]:
    """The parts of the gaps that lie in [start, end)."""
    parts = (each._replace(start=max(each.start, start), end=min(each.end, end)) for each in gaps)
    return [each for each in parts if each.start < each.end]


def joined(gaps: Iterable[Gap]) -> list[Gap]:
    """The gaps in order, and those that meet or overlap as one, which is accepted if all of it was accepted."""
    found: list[Gap] = []
    for gap in sorted(gaps):
        if found and gap.start <= found[-1].end:
            before = found.pop()
            known = gap.found in before.found or len(before.found) > _MOST_WORDS
            words = before.found if known else f"{before.found}; {gap.found}"
            accepted = _accepted(before, gap)
            gap = Gap(before.start, max(before.end, gap.end), words, max(before.time, gap.time), accepted)
        found.append(gap)
    return found


def _accepted(first: Gap, second: Gap) -> int:
    """When both gaps together were accepted; 0 if a part of them was not. The first one begins first."""
    covering = [first] if second.end <= first.end else []
    if first.start == second.start and first.end <= second.end:
        covering.append(second)
    if first.accepted and second.accepted:
        return max(first.accepted, second.accepted)
    return max((each.accepted for each in covering), default=0)
