"""World: one topic with everything around it, and what must be true of it.

Invariant: a world is decided by its seed. No choice depends on the time, on a process id or on what a thread does.

    orders      the topic, in <root>/a/orders at first; where it is after a promotion, `path` says
    bills       a second topic, of some of its transactions
    other       a mirror of orders
    members     the other directories of orders, if it has replicas

Everything that an oracle hears goes through `note`, also in a child that dies.

Threads: one. Children are forked, do a few steps, and die at a call to the system that was chosen before.
"""

from __future__ import annotations

import ast
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, Literal

import loglib
from loglib import FlushPolicy, LogError, OffsetOutOfRangeError, Retention, Topic
from loglib.system.files import Files

from .draw import Choice
from .oracle import Ledger, Row, Section, Wrong, judge_sections
from .ways import compare, in_order, rows_of, same, union_of

__all__ = ["World"]

DEADLY = ("pwritev", "ftruncate", "datasync", "fsync", "rename", "link", "unlink", "mkdir", "copy_file_range")
SIZES = (0, 0, 10, 100, 700)
MANY_BYTES = 1 << 40


class World:
    """The topic, its surroundings and its oracle."""

    _pipe: int | None = None  # to the parent; of a child

    def __init__(self, seed: int, on: frozenset[str], root: Path) -> None:
        self.seed, self.on, self.root = seed, on, root
        self.choose = Choice(f"world {seed}")
        self.steps: list[str] = []  # what was done, for a person
        self.met: set[str] = set()
        self.number = 0  # of the last value
        self.life = 0  # of the process: a child is another one, and so another owner of transactions
        self._lives = self._made = 0
        self.partitions = self.choose.pick((1, 2, 3))
        self.path, self.other = str(root / "a" / "orders"), str(root / "b" / "orders")
        self.bills = str(root / "a" / "bills")
        self.names_store = self.choose.random() < 0.5  # or it is beside the topic
        self.store = str(root / ("" if self.names_store else "a") / ".transactions")
        self.place, self.archive = str(root / "place" / "orders"), str(root / "arch")
        self.members = self._members()
        for path in (self.path, self.other, self.bills, *self.members):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self.ledgers = {name: Ledger(name) for name in ("orders", "bills")}
        self.pending: list[bytes] = []  # appended to orders by this process, and not flushed
        self.opened: list[Topic] = []  # orders, open for a phase; twice if it takes turns
        self.sections: list[tuple[tuple[Section, ...], str]] = []  # and their state
        self.numbers: dict[tuple[int, str], int] = {}  # of producers, acknowledged
        self.handled: dict[str, set[bytes]] = {}  # committed by each group
        self.begun: dict[str, set[bytes]] = {}  # committed, or about to be
        self.is_placed = self.is_archived = self.has_gaps = False
        self.committed = 0  # transactions, of the last process that was asked for some
        self.is_cut = False  # by hand, at a place that no group holds
        self.repeats = False  # groups may get again what they have committed
        self.is_rewound = False  # what copies, archives and groups know may be ahead of the topic
        self.policies = self._policies()
        self.order: Literal["none", "key"] = self.choose.pick(("none", "key"))  # of the share

        self._chance = Random(f"chance {seed}")

    def random_bytes(self, count: int) -> bytes:
        """What the library takes for chance in this world."""
        return self._chance.randbytes(count)

    def _members(self) -> list[str]:
        if "replicas" not in self.on:
            return []
        count, self.acks = self.choose.pick(((1, "all"), (2, "quorum"), (2, "all"), (1, "leader")))
        return [str(self.root / f"r{number}" / "orders") for number in range(count)]

    def _policies(self) -> dict[str, Any]:
        choose, interval = self.choose, 0.01 if "background" in self.on else None
        policies: dict[str, Any] = {
            "segment_bytes": choose.pick((4096, 6000, 16384)),
            "batch_records": choose.pick((1, 5, 1000)),
            "flush": FlushPolicy(interval=interval),
        }
        codec = choose.pick(("zlib", "lz4", "zstd"))
        if "compression" in self.on:
            policies["compression"] = codec
        if "os" in self.on:
            policies["durability"] = "os"
        limits: dict[str, Any] = {"age": None}
        most = choose.pick((0, 8192, 65536))
        if "retention" in self.on:
            limits["bytes"] = most
            if self.floor is not None:
                limits |= {"archive": self.floor, "archive_grace": timedelta(0)}
            else:
                self.note("orders", "may_drop")
            if "hold" in self.on:
                limits |= {"hold_for": ["holder", *self.on.intersection(["jobs"])], "hold_bytes": MANY_BYTES}
        return policies | {"retention": Retention(**limits)}

    @property
    def floor(self) -> str | None:
        """What retention waits for."""
        if "tier" in self.on:
            return self.place
        return self.archive if "archive" in self.on else None

    @property
    def share(self) -> str:
        """The share of the topic in this place: a copy has none."""
        return f"jobs of {self.path}"

    def begun_jobs(self) -> set[bytes]:
        """The values that were settled in any place, or were about to be."""
        return set().union(*(values for name, values in self.begun.items() if name.startswith("jobs of ")))

    @property
    def ledger(self) -> Ledger:
        return self.ledgers["orders"]

    # --- notes --------------------------------------------------------------------------------------------

    def note(self, name: str, what: str, *about: Any) -> None:
        """Change a ledger or this world, here and in the parent."""
        if self._pipe is not None:
            os.write(self._pipe, repr((name, what, *about)).encode() + b"\n")
        getattr(self.ledgers.get(name, self), what)(*about)

    def noted_section(self, sections: Sequence[tuple[str, tuple[bytes, ...]]], state: str) -> None:
        kept = tuple(Section(*each) for each in sections)
        self.sections = [(old, how) for old, how in self.sections if old != kept]
        self.sections.append((kept, state))

    def noted_producer(self, partition: int, producer: str, number: int) -> None:
        self.numbers[partition, producer] = number

    def noted_group(self, group: str, values: tuple[bytes, ...]) -> None:
        self.handled.setdefault(group, set()).update(values)

    def noted_begun(self, group: str, values: tuple[bytes, ...]) -> None:
        """A kill may come between the commit and `noted_group`."""
        self.begun.setdefault(group, set()).update(values)

    def noted_reset(self, group: str) -> None:
        """All of its records come again."""
        self.handled.pop(group, None)

    def noted_cut(self) -> None:
        """Somebody drops the beginning of a partition by hand."""
        self.ledger.may_drop()
        self.is_cut = True

    def noted_committed(self, count: int) -> None:
        self.committed = count

    def noted_values(self, number: int) -> None:
        self.number = max(self.number, number)

    def noted_placed(self) -> None:
        self.is_placed = True

    def noted_archived(self) -> None:
        self.is_archived = True

    def noted_place_given_up(self) -> None:
        self.is_placed = False

    def noted_archive_given_up(self) -> None:
        self.is_archived = False

    def value(self, topic: str = "orders", *, given: bool = True, size: int | None = None) -> bytes:
        """A new value, which is noted as given unless it is a repetition."""
        self.number += 1
        self.note("world", "noted_values", self.number)
        value = f"{topic[0]}{self.number:08d}".encode() + b"." * (self.choose.pick(SIZES) if size is None else size)
        if given:
            self.note(topic, "given", (value,))
        return value

    def key(self) -> bytes | None:
        number = self.choose.below(6)
        return b"k%d" % number if number else None

    def acknowledge(self, values: Iterable[bytes] | None = None) -> None:
        """These values, or all that are pending, are acknowledged."""
        if values is None:
            values, self.pending = self.pending, []
        self.note("orders", "acknowledged", tuple(values))

    # --- opening ------------------------------------------------------------------------------------------

    def open(self, **given: Any) -> Topic:
        arguments = dict(self.policies)
        if self.members:
            arguments |= {"replicas": self.members, "acks": self.acks, "replica_timeout": 5.0}
        elif "shared" in self.on:
            arguments["shared"] = True
        return Topic.open(self.path, create=True, partitions=self.partitions, **(arguments | given))

    def open_bills(self, **given: Any) -> Topic:
        if given.get("mode") == "r":
            return Topic.open(self.bills, create=True, **given)
        return Topic.open(
            self.bills, create=True, flush=FlushPolicy(interval=None), retention=Retention(age=None), **given
        )

    @contextmanager
    def open_for_steps(self) -> Iterator[Callable[[], Topic]]:
        """Open the topic for a phase, twice if it takes turns. The function that is yielded chooses one for a step."""
        with ExitStack() as stack:
            self.opened = [stack.enter_context(self.open()) for _ in range(2 if "turns" in self.on else 1)]
            stack.callback(self.opened.clear)
            yield lambda: self.choose.pick(self.opened) if len(self.opened) > 1 else self.opened[0]

    def follow_policies(self, altered: Topic) -> None:
        """Wait until the threads of the other topics have the new policies, and have run retention by them."""
        for each in self.opened:
            flusher = each._policies.background._flusher
            if each is not altered and flusher is not None:
                while each.config != altered.config or flusher._housekeeping_at == 0.0:
                    time.sleep(0.001)
                each.retain()  # after that of the thread, or instead of it

    def flush(self, topic: Topic) -> None:
        for each in {topic, *self.opened}:
            each.flush()
        self.acknowledge()

    def transaction(self, app: str = "app", **given: Any) -> loglib.Transaction:
        """Begin one. A process that has died is the owner of applications of its own."""
        store = self.store if self.names_store else None
        return loglib.transaction(f"{app}{self.life}", store=store, **given)

    def fresh(self, what: str) -> str:
        """A path of the topic's name in a new directory, for a copy."""
        self._made += 1
        return str(self.root / f"{what}{self.life}-{self._made}" / os.path.basename(self.path))

    def refused(self, what: str, call: Callable[[], object], *, says: Iterable[str] = ()) -> None:
        """The call must be refused in words, and change nothing."""
        try:
            call()
        except (LogError, ValueError) as error:
            if says and not any(word in str(error) for word in says):
                raise Wrong(f"{what} is refused in other words than {says}: {error}") from error
            return
        raise Wrong(f"{what} was not refused")

    # --- children -----------------------------------------------------------------------------------------

    def in_child(self, work: Callable[[], object], *, calls: int | None) -> None:
        """Fork; the child works until it has made so many calls that change files, and dies without a farewell."""
        self._lives += 1
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            self.life = self._lives
            self._chance.seed(f"chance {self.seed}, {self.life}")
            os.close(reading)
            self._die_in_child(work, writing, calls)
        os.close(writing)
        with open(reading, "rb") as notes:
            told = notes.read().split(b"\n")[:-1]
        os.waitpid(child, 0)
        for each in told:
            name, what, *about = ast.literal_eval(each.decode())
            if name == "error":
                raise Wrong(f"in a child that was to be killed: {what}")
            self.note(name, what, *about)
        self.pending = []

    def _die_in_child(self, work: Callable[[], object], pipe: int, calls: int | None) -> None:
        try:
            self._pipe, self.pending = pipe, []
            if calls is not None:
                _die_after(calls)
            work()
        except BaseException:
            os.write(pipe, repr(("error", traceback.format_exc()[-3000:])).encode() + b"\n")
        finally:
            os._exit(9)

    # --- what must be true --------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that was acknowledged is read in every way, and nothing else."""
        while True:
            starts = self._starts()
            try:
                return self._check()
            except (Wrong, OffsetOutOfRangeError):
                # The thread of a topic that is open may drop segments between two ways.
                if self._starts() == starts:
                    raise

    def _starts(self) -> list[int]:
        """The log starts of the partitions, while the topic is open."""
        if not self.opened:
            return []
        with Topic.open(self.path, mode="r") as reader:
            return [each.log_start_offset for each in reader.partitions]

    def _check(self) -> None:
        tier = self.place if self.is_placed else None
        try:
            reader = Topic.open(self.path, mode="r", tier=tier)
        except LogError:
            if not (self.is_placed and (self.is_rewound or self.ledger.free)):
                raise
            self.give_up_place()
            tier, reader = None, Topic.open(self.path, mode="r")
        with reader:
            rows = rows_of(reader.read())
            starts = {each.id: each.log_start_offset for each in reader.partitions}
            union = {row.value for row in rows}
            if self.is_archived:
                union |= self._check_union(reader, rows, starts)
            self.ledger.judge(in_order(rows), starts, elsewhere=union)
            plain = not (self.has_gaps or self.is_placed or "compression" in self.on)
            compare(
                reader, in_order(rows), self.choose, groups=not self.members, plain=plain, gaps=self.has_gaps, tier=tier
            )
            self._check_damage(reader)
        self._check_holder(union)
        seen = {"orders": union, "bills": self._check_bills()}
        for sections, state in self.sections[-50:]:
            judge_sections(sections, self.ledgers, seen, state)
        if self.is_placed:
            self._check_place(rows)

    def _check_union(self, reader: Topic, rows: list[Row], starts: dict[int, int]) -> set[bytes]:
        try:
            union = union_of(reader, self.archive, self.choose)
        except LogError as error:
            past = isinstance(error, OffsetOutOfRangeError) and (self.ledger.free or self.is_placed)
            if not (past or self.is_rewound):
                raise
            self.give_up_archive()
            return set()
        if not (self.ledger.free or self.is_placed):
            gaps = {each.partition: each.gaps for each in loglib.offload.archived(self.archive).partitions}
            missing = {  # what a gap hid in the archive, and a promoted copy has, comes with the next pass
                row for row in set(rows) - set(union)
                if not any(start <= row.offset < end for start, end in gaps.get(row.partition, ()))
            }  # fmt: skip
            if missing:
                raise Wrong(f"the union of archive and log lacks {sorted(missing)[:2]}")
        self.ledger.judge(union, starts, elsewhere={row.value for row in rows})
        return {row.value for row in union}

    def _check_damage(self, reader: Topic) -> None:
        damage = reader.verify().damage
        if damage and not self.has_gaps:
            raise Wrong(f"damage in {self.path}: {damage[0]}")

    def _check_holder(self, seen: set[bytes]) -> None:
        """Retention has waited for the group."""
        for name, begun in (("holder", self.begun.get("holder", set())), (self.share, self.begun_jobs())):
            if "hold" in self.on and name in self.handled and not self.is_cut:
                dropped = self.ledger.acked - seen - begun - self.ledger.excused
                if dropped:
                    raise Wrong(f"dropped before {name} had handled it: {sorted(dropped)[:2]}")

    def _check_bills(self) -> set[bytes]:
        if not os.path.exists(self.bills):
            return set()
        with self.open_bills(mode="r") as reader:
            rows = in_order(rows_of(reader.read()))
            self.ledgers["bills"].judge(rows, {})
            compare(reader, rows, self.choose, groups=True, plain=True, gaps=False)
        return {row.value for row in rows}

    def _check_place(self, rows: list[Row]) -> None:
        with Topic.open(self.place, mode="r") as place:
            past = set(rows_of(place.read()))
        more = [row for row in past - set(rows) if row.value not in self.ledger.excused]
        if more:
            raise Wrong(f"the place has records that past and tail lack: {sorted(more)[:2]}")

    def check_copy(self, path: str) -> None:
        """The copy has the records of the topic, from its log start on. Either may have what the other has lost."""
        with Topic.open(path, mode="r") as copy, Topic.open(self.path, mode="r") as source:
            starts = {each.id: each.log_start_offset for each in source.partitions}
            if self.ledger.free or self.floor is not None:  # the copy was a topic, and has dropped more
                starts = {each.id: max(each.log_start_offset, starts[each.id]) for each in copy.partitions}
            found = [row for row in rows_of(copy.read()) if row.offset >= starts[row.partition]]
            wanted = [row for row in rows_of(source.read()) if row.offset >= starts[row.partition]]
            kept, gone = f"copy in {os.path.relpath(path, self.root)}", self.ledger.excused
            same(
                kept, (row for row in found if row.value not in gone), (row for row in wanted if row.value not in gone)
            )
            damage = copy.verify().damage
            if damage and not self.has_gaps:
                raise Wrong(f"damage in the copy: {damage[0]}")

    # --- ways out that the documents name -----------------------------------------------------------------

    def give_up_place(self) -> None:
        """The place is of another history: begin another one. What it had alone is gone."""
        self.note("world", "noted_place_given_up")
        shutil.rmtree(self.place, ignore_errors=True)
        self._excuse_what_is_not_in_the_log()

    def give_up_archive(self) -> None:
        self.note("world", "noted_archive_given_up")
        shutil.rmtree(self.archive, ignore_errors=True)
        self._excuse_what_is_not_in_the_log()

    def _excuse_what_is_not_in_the_log(self) -> None:
        with Topic.open(self.path, mode="r") as reader:
            there = {row.value for row in rows_of(reader.read())}
        self.note("orders", "excuse", tuple(self.ledger.acked - there))

    def rewind(self, kept: Iterable[bytes]) -> None:
        """The topic was set back to a state with these values by somebody who knew it. The others may be missing."""
        self.note("orders", "excuse", tuple(self.ledger.order.keys() - set(kept)))
        self.is_rewound = self.repeats = True
        self.numbers.clear()

    def settle(self) -> None:
        """After a kill: what is committed is finished, and it is known whether the place and the archive exist."""
        if os.path.exists(self.store):
            loglib.transactions.recover_transactions(os.path.dirname(self.store))
        with suppress(FileNotFoundError):
            loglib.offload.tiered(self.place)
            self.is_placed = True
        with suppress(FileNotFoundError):
            loglib.offload.archived(self.archive)
            self.is_archived = True


def _die_after(calls: int) -> None:
    """The main thread of this process dies at the call to the system of this number."""
    main, left = threading.main_thread(), [calls]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            if threading.current_thread() is main:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
            return call(*given, **named)

        return counted

    for name in DEADLY:
        setattr(Files, name, staticmethod(deadly(getattr(Files, name))))
