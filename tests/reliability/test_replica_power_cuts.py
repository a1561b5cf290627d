"""G24: one of two real disks loses its power, or both do, while a topic is written on both.

The lives and the oracle are those of test_power_cuts.py. The topic has acks="all", so what was acknowledged before the
cut is on both disks. The next life begins on either of them. Sometimes the disk that was cut is lost instead, and an
empty one takes its place.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from account import Broken
from counts import count, scale
from disks import DROP_JOURNAL, Disk, disk
from replicated import assert_same
from test_power_cuts import NeverSynced, PowerCuts, Scribe, Work, need_power_cuts

from conftest import sound, values_of
from loglib import Topic
from loglib.system.files import REAL, Files

pytestmark = pytest.mark.reliability

CUTS = 60
WORK = Work(
    (
        Scribe.append_synced, Scribe.append_many, Scribe.append_many, Scribe.append_batch, Scribe.flush, Scribe.roll,
        Scribe.drop,
    ),
    {"segment_bytes": 16384, "partitions": 2},
)  # fmt: skip


class Switch:
    """Some disks that lose their power together."""

    def __init__(self, disks: Sequence[Disk]) -> None:
        self.disks = disks
        self.point = disks[0].point

    def cut_power(self, flag: int = DROP_JOURNAL) -> None:
        for each in self.disks:
            each.cut_power(flag)

    def remount(self) -> None:
        for each in self.disks:
            each.remount()


class CutsOfOne(PowerCuts):
    """Writers on two disks, one after another; each ends when one of the disks, or both, lose their power."""

    def __init__(self, disks: Sequence[Disk], *, seed: str, files: Files = REAL) -> None:
        self.disks = list(disks)
        self.lost = 0
        super().__init__(disks[0], WORK, seed=seed, files=files)

    def arrange(self) -> list[Path]:
        """The topic's directories for the next opening: one that has the topic comes first, if there is one."""
        places = [each.point / self.path.name for each in self.disks]
        self.chance.shuffle(places)
        places.sort(key=lambda each: not (each / "topic.json").exists())
        self.path = places[0]
        return places

    def options(self, places: Sequence[Path], forget_replicas: Sequence[Path] = ()) -> dict[str, Any]:
        return {"replicas": places[1:], "acks": "all", "replica_timeout": 60.0, "forget_replicas": forget_replicas}

    def one_life(self) -> None:
        places = self.arrange()
        self.work = replace(WORK, config=WORK.config | self.options(places))
        self.disk = Switch(self.chance.choice([self.disks, self.disks[:1], self.disks[1:]]))  # type: ignore[assignment]
        super().one_life()
        if len(self.disk.disks) == 1 and self.chance.random() < 0.2:  # type: ignore[attr-defined]
            self.forget_replicas(self.disk.point / self.path.name)

    def forget_replicas(self, lost: Path) -> None:
        """The disk that was cut does not come back, and an empty one takes its place.

        Only if both logs begin at the same offsets: what retention has dropped in the lost one alone would come back.
        """
        other = next(each.point / lost.name for each in self.disks if each.point != lost.parent)
        if all((each / "copy.json").exists() for each in (lost, other)) and starts(lost) == starts(other):
            shutil.rmtree(lost)
            Topic.open(other, create=True, **self.options([other, lost], forget_replicas=[lost])).close()
            self.lost += 1

    def topic_written(self) -> tuple[list[list[bytes | None]], list[list[bytes | None]]]:
        places = self.arrange()
        nothing: list[list[bytes | None]] = [[] for _ in self.accounts]
        if not (places[0] / "topic.json").exists():
            return nothing, nothing
        shown = []
        for place in places:
            if (place / "topic.json").exists():
                with Topic.open(place, mode="r") as topic:
                    shown.append([values_of(partition) for partition in topic.partitions])
        with Topic.open(places[0], create=True, **self.options(places)) as topic:
            found = [values_of(partition) for partition in topic.partitions]
            for partition in topic.partitions:
                sound(partition)
                self.mended += not (partition.recovery is None or partition.recovery.clean)
        assert_same(places, REAL)
        for seen in shown[1:]:
            for before, after in zip(seen, found, strict=True):
                if (kept := still_there(before, after)) != after[: len(kept)]:
                    raise Broken("phantoms", f"a reader of {places[1]} saw what is not there any more")
        return [still_there(*each) for each in zip(shown[0], found, strict=True)], found


def starts(place: Path) -> list[int]:
    with Topic.open(place, mode="r") as topic:
        return [each.log_start_offset for each in topic.partitions]


def still_there(seen: list[bytes | None], found: list[bytes | None]) -> list[bytes | None]:
    """What a reader saw, without what retention has dropped since then, in this directory or in the other."""
    first = serial_of(found[0]) if found else 0
    return [each for each in seen if serial_of(each) >= first]


def serial_of(value: bytes | None) -> int:
    return int((value or b"").split()[1])


def run(tmp_path: Path, *, cuts: int, seed: str, files: Files = REAL) -> CutsOfOne:
    with ExitStack() as mounted:
        disks = []
        for kind in ("ext4", "xfs"):
            (tmp_path / kind).mkdir()
            disks.append(mounted.enter_context(disk(tmp_path / kind, kind)))
        need_power_cuts(disks[0])
        lives = CutsOfOne(disks, seed=seed, files=files)
        lives.run(cuts)
    return lives


def test_nothing_acknowledged_is_lost_when_one_of_two_disks_is_cut(tmp_path: Path) -> None:
    lives = run(tmp_path, cuts=scale(CUTS), seed="two disks")
    assert lives.acknowledged > lives.cuts, "too little was acknowledged for the test to mean anything"
    count(
        "G24", lost=0, phantoms=0, refused=0, cuts_of_disks=lives.cuts, disks_lost=lives.lost,
        records_acknowledged=lives.acknowledged,
    )  # fmt: skip


@pytest.mark.slow  # it finds the mistake by chance
def test_replicas_that_do_not_sync_are_found_out(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="lost|refused"):
        run(tmp_path, cuts=300, seed="mistake", files=NeverSynced())
    count("G24", mistakes_found_out=1)
