"""Account: of each record that a partition was given, whether it may be read, must be read, or must not be read.

    begun       the log was asked to append the record: it may be read
    owed        its append has returned: it must be read once all has been flushed, unless an error names it
    promised    a flush has returned, or a reader has seen it: it must be read, from that instant on
    in doubt    an error has said so: it may be read or not
    lost        an error has said so: it must not be read
    given up    it was missing after a recovery or a flush: it must not be read any more
    dropped     retention may have taken it, or has

Invariant: a partition holds a run of its records in the order in which they were begun. Records are missing before the
run (dropped), behind it (never written), and inside it only if an error has called them in doubt.

The place of a record in this order is its serial number, from 0. Writers that die one after the other may each have
begun a record of the same serial number; at most one of these is there. An instant is whatever number the test counts
in, and promises hold from theirs on.

Threads: one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from loglib import LogError, OffsetRange, Record, Topic

__all__ = ["Account", "Broken", "Entry", "by_value", "failed", "named", "returned", "settle", "telling"]

LATEST = 1 << 62


class Broken(AssertionError):
    """A promise was broken. `kind`: lost, phantoms, refused, or untold (by no error, or by two)."""

    def __init__(self, kind: str, what: str) -> None:
        self.kind = kind
        self.what = what
        super().__init__(f"{kind}: {what}")


@dataclass(slots=True, eq=False)
class Entry:
    """One record that the log was asked to append."""

    content: Any  # what it is known by
    life: int = 0  # of the writer that appended it
    begun: int = 0  # the instant
    offset: int | None = None  # once its append has returned, or it has been read
    owed: bool = False
    errors: list[str] = field(default_factory=list)  # that have named it
    found: Any = None  # as it was read last
    other: Entry | None = None  # of the same serial number, begun by an earlier life


class Account:
    """One partition's records and promises."""

    def __init__(
        self, contents: Iterable[Any] = (), *, log_start: int = 0, known_by: Callable[[Any], Any] | None = None
    ) -> None:
        self.known_by = known_by  # of what is read; None: all of it
        self.first = 0  # serial number of the first entry; retention has taken what was before
        self.entries = [Entry(content) for content in contents]
        self.log_starts = [(0, log_start)]  # (instant, offset at which the log may begin from then on)
        self.drops: list[tuple[int, int]] = []  # (instant, offset before which it may not begin any more)
        self.may_begin = 0  # serial number with which the log may begin at the latest,
        self.must_begin = 0  # and at the soonest
        self.accounted = 0  # records of which it is settled what became of them
        self.named = 0  # and how many of these an error has named
        self._promises: dict[bool, list[tuple[int, int]]] = {True: [(0, 0)], False: [(0, 0)]}
        self._offsets: dict[int, Entry] = {}  # of the entries whose append has returned since the last settling
        self._lost: dict[int, Entry] = {}  # since then, by offset
        self._contents: list[Any] | None = None
        self._plain = self.known_by is None  # what is read is what was begun, and there is one way to read it

    @property
    def end(self) -> int:
        """Serial number of the next record."""
        return self.first + len(self.entries)

    @property
    def contents(self) -> list[Any]:
        """What may be there, in order."""
        if self._contents is None:
            self._contents = [entry.content for entry in self.entries]
        return self._contents

    # --- what the log is asked, and says --------------------------------------------------------------

    def begin(self, contents: Iterable[Any], *, serial: int | None = None, life: int = 0, at: int = 0) -> None:
        """The log is asked to append these records, by another life perhaps to places where some were begun."""
        self._contents = None
        for index, content in enumerate(contents, len(self.entries) if serial is None else serial - self.first):
            if index < len(self.entries):
                self.entries[index] = Entry(content, life, at, other=self.entries[index])
                self._plain = False
            else:
                self.entries.append(Entry(content, life, at))

    def returned(self, offsets: Iterable[int], contents: Sequence[Any]) -> None:
        """An append has returned these offsets: the records are owed."""
        begun = [*takewhile(lambda entry: entry.offset is None, reversed(self.entries))][::-1]
        for offset, content in zip(offsets, contents, strict=True):
            if offset in self._offsets:
                other = self._offsets[offset].content
                raise Broken("untold", f"offset {offset} was given out twice, for {other!r} and {content!r}")
            entry = next((each for each in begun if each.content == content and each.offset is None), None)
            if entry is None:
                self.begin([content])
                entry = self.entries[-1]
            entry.offset, entry.owed = offset, True
            self._offsets[offset] = entry
            self._lost.pop(offset, None)  # the offset of a lost record is given out again

    def called_lost(self, offsets: Iterable[int], error: BaseException, *, own: int = 0) -> int:
        """An error calls these lost. `own` of them may be records that were given no offset; returns how many more."""
        for offset in offsets:
            if offset in self._lost:
                own -= 1
                if own < 0:
                    raise Broken("untold", f"offset {offset} was named twice: {error!r}")
            entry = self._offsets.pop(offset, None)
            if entry is not None:
                entry.errors.append(repr(error))
                self.entries.remove(entry)
                self._contents = None
                self._lost[offset] = entry
                self.accounted += 1
                self.named += 1
        return own

    def called_in_doubt(self, offsets: Iterable[int], error: BaseException) -> None:
        for offset in offsets:
            entry = self._offsets.pop(offset, None)
            if entry is not None:
                entry.owed = False
                entry.errors.append(repr(error))
                self._plain = False

    def died(self) -> None:
        """The process was killed: no error will name what is owed, and all that is not promised may be gone."""
        for entry in self.entries:
            entry.owed = False
        self._offsets.clear()

    def go_on_from(self, other: Account) -> None:
        """This is a copy of the other partition, as a process that was killed now would leave it."""
        self.first, self.may_begin, self.must_begin = other.first, other.may_begin, other.must_begin
        self.entries = [replace(entry, errors=[*entry.errors]) for entry in other.entries]
        self._contents, self._plain = None, other._plain
        self._promises = {power: [*promises] for power, promises in other._promises.items()}
        self.died()

    # --- what is promised -----------------------------------------------------------------------------

    def promise(self, end: int | None = None, *, at: int = 0, power: bool = True) -> None:
        """What is below this serial number survives the process, with `power` also a power cut."""
        end = self.end if end is None else end
        for kind in (False, True) if power else (False,):
            promises = self._promises[kind]
            if end > promises[-1][1]:
                promises.append((at, end))

    def promised(self, at: int = LATEST, *, power: bool = False) -> int:
        """The serial number below which every record must be read, unless retention has dropped it."""
        promises = self._promises[power]
        return promises[bisect_right(promises, (at, LATEST)) - 1][1]

    def serial_at(self, offset: int) -> int:
        """The serial number of the first record from this offset on."""
        return self.first + bisect_right(self.entries, offset - 1, key=_offset_of)

    def recovered(self, count: int) -> None:
        """The next life has found records up to this serial number: the others are given up."""
        if not self.promised() <= count <= self.end:
            raise Broken("lost", f"{count} records recovered; {self}")
        for entry in self.entries[count - self.first :]:
            self._offsets.pop(_offset_of(entry), None)
        del self.entries[count - self.first :]
        self._contents = None

    def drop(self, first: int, *, done: bool = True) -> None:
        """Retention drops what is before this serial number."""
        self.may_begin = max(self.may_begin, first)
        if done:
            self.must_begin = max(self.must_begin, first)

    # --- what is read ---------------------------------------------------------------------------------

    def judge(
        self, found: Sequence[Any], *, at: int = LATEST, power: bool = False, log_start: int | None = None
    ) -> tuple[int, list[Entry], int]:
        """Raise `Broken` unless this may be read at that instant; else from where, which entries, and up to where."""
        if log_start is None:
            firsts = range(max(self.first, self.must_begin), max(self.first, self.may_begin) + 1)
        else:
            self._judge_start(at, log_start)
            firsts = range(self.serial_at(log_start), self.serial_at(log_start) + 1)
        names = found if self.known_by is None else [self.known_by(each) for each in found]
        promised, matched = self.promised(at, power=power), None
        for first in firsts:
            matched = self._match(first, found, names) or matched
            if matched is not None and self._skipped(matched[1]) >= promised:
                return first, *matched
        if matched is not None:
            raise Broken("lost", f"{_brief(names)} are left, and {promised} were promised; {self}")
        kind = "lost" if max(self._reach(first, found, names) for first in firsts) < promised else "phantoms"
        raise Broken(kind, f"read {_brief(names)}, not what was appended, and {promised} were promised; {self}")

    def _judge_start(self, at: int, log_start: int) -> None:
        if log_start not in {start for since, start in self.log_starts if since <= at}:
            raise Broken("phantoms", f"log start {log_start}, of {self.log_starts}")
        if self.drops and (kept := [start for since, start in self.drops if since <= at]) and log_start < kept[-1]:
            raise Broken("phantoms", f"log start {log_start} is back before {kept[-1]}")

    def _match(self, first: int, found: Sequence[Any], names: Sequence[Any]) -> tuple[list[Entry], int] | None:
        """The entries that these are, from that serial number on, and the serial number behind; or None."""
        if self._plain:  # millions of times
            index = first - self.first
            same = self.contents[index : index + len(names)] == list(names)
            return (self.entries[index : index + len(names)], first + len(names)) if same else None
        serial, life, entries = first, 0, []
        for each, name in zip(found, names, strict=True):
            while (entry := self._entry(serial, each, name)) is None:
                if self._skipped(serial, 1) == serial:
                    return None
                serial += 1
            if entry.life < life:  # a record that was given up has come back
                return None
            life = entry.life
            entries.append(entry)
            serial += 1
        return entries, serial

    def _reach(self, first: int, found: Sequence[Any], names: Sequence[Any]) -> int:
        """The serial number up to which these are right."""
        right = 0
        while right < len(found) and self._match(first, found[: right + 1], names[: right + 1]) is not None:
            right += 1
        return first + right

    def _skipped(self, serial: int, most: int = LATEST) -> int:
        """The serial number behind the records in doubt that begin here."""
        end = min(self.end, serial + most)
        while serial < end and self.entries[serial - self.first].errors:
            serial += 1
        return serial

    def _entry(self, serial: int, found: Any, name: Any) -> Entry | None:
        """The entry of this serial number that this is, begun by whichever life."""
        entry = self.entries[serial - self.first] if serial < self.end else None
        while entry is not None:
            if entry.content == name and (entry.found is None or entry.found == found) and _at_home(entry, found):
                return entry
            entry = entry.other
        return None

    def see(self, found: Sequence[Any]) -> None:
        """This was read: it stays, and so does what may come behind it."""
        first, entries, behind = self.judge(found)
        for entry, each in zip(entries, found, strict=True):
            entry.owed, entry.other, entry.found = False, None, each
            entry.offset = each.offset if isinstance(each, Record) else entry.offset
            entry.errors.clear()
        self.first, self.entries = first, entries + self.entries[behind - self.first :]
        self._contents = None
        self._promises = {power: [(0, first + len(entries))] for power in (True, False)}

    def settle(self, found: Sequence[Any]) -> None:
        """All was flushed, or opened again, and this was read: it stays, and what was not read is given up."""
        self.accounted += sum(entry.owed or bool(entry.errors) for entry in self.entries)
        owed = [(serial, entry) for serial, entry in enumerate(self.entries, self.first) if entry.owed]
        self.see(found)
        for serial, entry in owed:
            if entry.owed and serial >= self.first:  # still owed, and not dropped
                raise Broken("untold", f"{_brief([entry])} is not there, and no error has named it")
        self.recovered(self.first + len(found))
        self._offsets, self._lost = {}, {}

    def possible(self, at: int, *, power: bool = False) -> list[Any]:
        """The records each of which may be the last at that instant; nothing is ever dropped here."""
        begun = sum(entry.begun <= at for entry in self.entries)
        return self.contents[min(self.promised(at, power=power), begun) - 1 : begun]

    def __str__(self) -> str:
        begun = [(entry.content, entry.life) for entry in self.entries]
        return (
            f"begun are [{self.first}, {self.end}): {_brief(begun)}, promised {self._promises}, "
            f"the log may begin with {self.must_begin} to {self.may_begin}"
        )


def by_value(record: Record) -> bytes | None:
    """Records are known by their values, and have offsets."""
    return record.value


def _offset_of(entry: Entry) -> int:
    return LATEST if entry.offset is None else entry.offset


def _at_home(entry: Entry, found: Any) -> bool:
    return entry.offset is None or not isinstance(found, Record) or found.offset == entry.offset


def _brief(contents: Sequence[Any]) -> str:
    listed = [repr(content)[:90] for content in contents]
    return ", ".join(listed if len(listed) < 50 else [*listed[:20], "...", *listed[-20:]])


# --- the accounts of a topic, one for each partition -----------------------------------------------------


def returned(accounts: Sequence[Account], ranges: Iterable[OffsetRange], values: Sequence[bytes | None]) -> None:
    """An append has returned these offsets for these records."""
    left = iter(values)
    for partition, offsets in ranges:
        accounts[partition].returned(offsets, [value for _, value in zip(offsets, left, strict=False)])
    assert next(left, None) is None, "more records than offsets"


def failed(accounts: Sequence[Account], error: BaseException, values: Sequence[bytes | None]) -> None:
    """An append of these records has raised the error, which says which of them are in."""
    missing = set(getattr(error, "not_appended", ()))
    ranges: tuple[OffsetRange, ...] = getattr(error, "appended", ())
    if not ranges and not missing:  # a single record
        missing = set(range(len(values)))
    returned(accounts, ranges, [value for index, value in enumerate(values) if index not in missing])
    named(accounts, error, own=len(missing))


def named(accounts: Sequence[Account], error: BaseException, *, own: int = 0) -> None:
    """An error has come to the application; `own` records of the call that raised it are not in the log."""
    if isinstance(error, LogError):
        for partition, offsets in error.lost:
            own = accounts[partition].called_lost(offsets, error, own=own)
        for partition, offsets in error.in_doubt:
            accounts[partition].called_in_doubt(offsets, error)


@contextmanager
def telling(accounts: Sequence[Account]) -> Iterator[None]:
    """Enter what is raised by a call that appends nothing itself."""
    try:
        yield
    except LogError as error:
        named(accounts, error)
        raise


def settle(accounts: Sequence[Account], topic: Topic) -> None:
    """Settle with what can be read of the topic. Retention may have dropped anything below the log starts."""
    for account, partition in zip(accounts, topic.partitions, strict=True):
        account.drop(account.serial_at(partition.log_start_offset))
        account.settle(list(partition.read()))
