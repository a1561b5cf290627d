"""Setbacks: what people do to stores, topics and copies behind the library's back, or when a disk is lost.

After each of them an acknowledged record is read, or a call has refused to go on in words (a `LogError` that is not
about damage), and nothing was changed by it. Each is called with the world, and leaves it checked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import loglib
from loglib import LogError, NotLeaderError, Topic

from . import steps
from .events import damage, excuse_repaired, overwrite, phase, sealed_segment
from .oracle import Wrong
from .ways import rows_of
from .world import World

__all__ = ["SETBACKS"]

TWO_DAYS_S = 2 * 24 * 3600


# --- stores of transactions ------------------------------------------------------------------------------------


def commits(world: World, count: int) -> int:
    """A process commits transactions until one is refused in words; returns how many were committed."""
    world.committed = 0
    world.in_child(lambda: _commit(world, count), calls=None)
    return world.committed


def _commit(world: World, count: int) -> None:
    with world.open() as topic:
        for done in range(count):
            values = world.value(), world.value()
            section = [("orders", values)]
            try:
                with world.transaction() as tx:
                    for value in values:
                        tx.append(topic, value, partition=world.choose.below(world.partitions))
                    world.note("orders", "again", values)
                    world.note("world", "noted_section", section, "begun")
            except LogError as error:
                in_words(error)
                world.note("orders", "refused", values)
                world.note("world", "noted_section", section, "refused")
                return
            world.acknowledge(values)
            world.note("world", "noted_section", section, "committed")
            world.note("world", "noted_committed", done + 1)


def in_words(error: LogError) -> None:
    if isinstance(error, loglib.CorruptLogError | loglib.CommitPendingError | loglib.StorageIOError):
        raise Wrong(f"not a refusal, but {type(error).__name__}: {error}") from error


def store_older(world: World) -> None:
    """The store is restored from its backup; the topics have more than that.

    A repair finds the topics beside the store, so a store elsewhere is left alone.
    """
    if os.path.dirname(world.path) != os.path.dirname(world.store):
        return
    commits(world, 1 + world.choose.below(3))
    older = Path(world.fresh("store"))
    shutil.copytree(world.store, older)
    commits(world, 1 + world.choose.below(5))
    if "mirror" in world.on and world.choose.random() < 0.5:
        steps.mirror(world)
    shutil.rmtree(world.store)
    shutil.copytree(older, world.store)
    if commits(world, 6) < 6:  # of a partition that is ahead of it
        loglib.repair(world.store)
        if commits(world, 2) < 2:
            raise Wrong("transactions are refused although the store is repaired")
    world.check()


def store_lost(world: World) -> None:
    """The store is lost; a transaction begins another one, or is refused."""
    commits(world, 2 + world.choose.below(4))
    os.makedirs(os.path.dirname(kept := world.fresh("kept")))
    os.rename(world.store, kept)
    if commits(world, 6) == 0:
        shutil.rmtree(world.store, ignore_errors=True)
        os.rename(kept, world.store)
        if commits(world, 1) == 0:
            raise Wrong("transactions are refused although the store is back")
    world.check()


def store_rot(world: World) -> None:
    """A manifest is damaged whose transaction was done long ago. One bit stops nothing; what is worse is repaired."""
    commits(world, 3)
    number, worse = world.choose.random(), world.choose.random() < 0.3
    manifests = sorted(each for each in Path(world.store).iterdir() if each.name.isdigit())[:-1]
    if manifests:
        manifest = manifests[int(number * len(manifests))]
        if worse:
            overwrite(manifest, 40)
            loglib.repair(world.store)
        else:
            flip(manifest, 40)
    if commits(world, 2) != 2:
        raise Wrong("a manifest that is done stops the store")
    loglib.transactions.recover_transactions(os.path.dirname(world.store))
    world.check()


def flip(path: Path, at: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def day(world: World) -> None:
    """A process is stopped for a day in the middle of a transaction, and others go on."""
    values = tuple(world.value(size=30_000) for _ in range(40))
    section = [("orders", values)]
    with world.open() as topic:
        try:
            with world.transaction("slow") as tx:
                tx.append_many(topic, values, partition=0)
                _make_older(Path(world.path) / "staging")
                steps.transact(world, topic, app="other")
                world.note("orders", "again", values)
                world.note("world", "noted_section", section, "begun")
        except LogError as error:
            in_words(error)
            world.note("orders", "refused", values)
        else:
            world.acknowledge(values)
        world.flush(topic)
    world.check()


def _make_older(directory: Path) -> None:
    for each in [directory, *directory.rglob("*")]:
        with suppress(FileNotFoundError):
            facts = each.stat()
            os.utime(each, (facts.st_atime - TWO_DAYS_S, facts.st_mtime - TWO_DAYS_S))


def tx_moved(world: World) -> None:
    """A topic of a transaction is moved, deleted, made anew or replaced by a copy before the commit."""
    choose = world.choose
    what, mode = choose.pick(("moved", "anew", "copy", "partition")), choose.pick(("a", "r"))
    with world.open() as topic:
        steps.transact(world, topic)
    kept = f"{world.bills}.kept"
    mine, theirs = (world.value(),), (world.value("bills"),)
    if not os.path.exists(world.bills):
        world.open_bills().close()
    orders, bills = world.open(), world.open_bills(**({"mode": "r"} if mode == "r" else {}))
    section = [("orders", mine), ("bills", theirs)]
    try:
        with world.transaction("moving") as tx:
            tx.append(orders, mine[0], partition=0)
            tx.append(bills, theirs[0])
            world.note("orders", "again", mine)
            world.note("bills", "again", theirs)
            world.note("world", "noted_section", section, "begun")
            if what == "partition":
                os.rename(f"{world.bills}/0000", f"{world.root}/0000.kept")
            else:
                os.rename(world.bills, kept)
            if what == "anew":
                world.open_bills().close()
            elif what == "copy":
                shutil.copytree(kept, world.bills)
    except LogError as error:
        in_words(error)
        world.note("orders", "refused", mine)
        world.note("bills", "refused", theirs)
    else:
        world.acknowledge(mine)
        world.note("bills", "acknowledged", theirs)
        if what == "copy":  # which is the topic from now on
            shutil.rmtree(kept)
    for each in (orders, bills):
        with suppress(LogError):
            each.close()
    if what == "partition":
        shutil.rmtree(f"{world.bills}/0000", ignore_errors=True)
        os.rename(f"{world.root}/0000.kept", f"{world.bills}/0000")
    elif os.path.exists(kept):
        shutil.rmtree(world.bills, ignore_errors=True)
        os.rename(kept, world.bills)
    world.settle()
    world.check()


# --- topics that are set back, lost, moved ---------------------------------------------------------------------


def topic_older(world: World) -> None:
    """The topic is restored from a snapshot, or from a copy of its directory. What came after that is gone."""
    by_snapshot, links = world.choose.random() < 0.6, world.choose.random() < 0.5
    phase(world, 2)
    older = world.fresh("older")
    if by_snapshot:
        loglib.copies.snapshot(world.path, older, links=links)
    else:
        shutil.copytree(world.path, older)
    kept = values_in(older)
    phase(world, 2, (steps.append_many, steps.roll))
    if "tx" in world.on:
        commits(world, 2)
    if world.floor is not None and world.choose.random() < 0.7:
        phase(world, 0, steps.BY_FEATURE["tier" if "tier" in world.on else "archive"][:1])
    shutil.rmtree(world.path)
    shutil.copytree(older, world.path)
    world.rewind(kept)
    if by_snapshot:
        loglib.copies.promote(world.path)
    write_after(world)


def values_in(path: str) -> set[bytes]:
    with Topic.open(path, mode="r") as topic:
        return {row.value for row in rows_of(topic.read())}


def write_after(world: World) -> None:
    """The topic goes on: what is acknowledged now must be read."""
    phase(world, 2, (steps.append_many, steps.roll, steps.append_many))
    if "tx" in world.on and commits(world, 3) == 0:
        raise Wrong("no transaction is possible any more")
    world.check()


def failover(world: World) -> None:
    """The host of the topic is lost, its mirror takes its place, and later the first one takes it back."""
    phase(world, 1, (steps.append_many,))
    _begin_mirror(world)
    lags, alive, back = (world.choose.random() < 0.5 for _ in range(3))
    if lags:
        phase(world, 1, (steps.append_many, steps.roll))
    kept = values_in(world.other)
    old = world.path
    if alive:
        with world.open():  # a writer that nobody could stop
            loglib.copies.promote(world.other, force=True)
    else:
        os.rename(world.path, f"{world.path}.lost")
        loglib.copies.promote(world.other, force=True)
    new = world.other
    world.path, world.other = new, world.fresh("b")
    world.rewind(kept)
    write_after(world)
    if not alive and back:
        os.rename(f"{old}.lost", old)
    elif not alive:
        shutil.rmtree(f"{old}.lost")
    loglib.copies.mirror(world.path, old, demote=alive or back, on_divergence="restart")
    world.check_copy(old)
    loglib.copies.promote(old)
    world.path, world.other = old, new
    world.check()
    write_after(world)


def _begin_mirror(world: World) -> None:
    """A mirror of the topic as it is now."""
    shutil.rmtree(world.other, ignore_errors=True)
    loglib.copies.mirror(world.path, world.other)


def chain(world: World) -> None:
    """A mirror of a mirror is promoted while the topic has records that it lacks: refused, or nothing is missing."""
    phase(world, 1, (steps.append_many,))
    _begin_mirror(world)
    third = world.fresh("third")
    loglib.copies.mirror(world.other, third)
    written = world.choose.random() < 0.5
    try:
        if written:
            with world.open() as topic:
                steps.append_many(world, topic)
                world.flush(topic)
                loglib.copies.promote(third)
        else:
            phase(world, 1, (steps.append_many,))
            loglib.copies.promote(third)
    except LogError as error:
        in_words(error)
        world.check()
        return
    try:
        Topic.open(world.path, create=True).close()
    except NotLeaderError:
        world.path = third
        shutil.rmtree(world.other)
        world.check()
        return
    raise Wrong("a mirror of a mirror was promoted, and the topic is written as well")


def moved(world: World) -> None:
    """The topic is moved to another name. It is the same topic for its groups, transactions and copies."""
    phase(world, 0, (steps.append_many,) + steps.BY_FEATURE["groups"][:1] * ("groups" in world.on))
    name = f"orders{world.number}"
    to = os.path.join(os.path.dirname(world.path), name)
    os.rename(world.path, to)
    world.path = to
    if world.choose.random() < 0.5 and os.path.exists(world.other):
        os.rename(world.other, other := os.path.join(os.path.dirname(world.other), name))
        world.other = other
    phase(world, 2, (steps.append_many,) + steps.BY_FEATURE["groups"][:1] * ("groups" in world.on))
    world.check()


# --- marks -----------------------------------------------------------------------------------------------------


def mark_lost(world: World) -> None:
    phase(world, 1, (steps.append_many,))
    _spoil_mark(world, lambda mark: mark.unlink())


def mark_rotten(world: World) -> None:
    phase(world, 1, (steps.append_many,))
    both, first = world.choose.random() < 0.5, world.choose.pick((0, 4096))

    def rot(mark: Path) -> None:
        for at in (0, 4096) if both else (first,):
            overwrite(mark, at, 128)

    _spoil_mark(world, rot)


def _spoil_mark(world: World, spoil: Callable[[Path], object]) -> None:
    """The mark of a partition is harmed. Copies made of it are whole or refused, and the topic goes on."""
    number, copies = world.choose.below(world.partitions), world.choose.random() < 0.6
    mark = Path(world.path) / f"{number:04d}" / "watermark"
    if mark.exists() and not (world.members and world.acks == "leader"):  # which needs all of its directories
        spoil(mark)
    if copies and not world.members:
        with suppress_words():
            to = world.fresh("spoilt")
            loglib.copies.snapshot(world.path, to)
            if not values_in(to) >= _must(world):
                _lacks("snapshot")
        if "mirror" in world.on and os.path.exists(world.other):
            before = values_in(world.other)
            with suppress_words():
                loglib.copies.mirror(world.path, world.other)
            if not values_in(world.other) >= before & _must(world):
                _lacks("mirror")
    with world.open() as topic:  # a partition is recovered by its writer
        for partition in topic.partitions:
            value = world.value()
            topic.append(value, partition=partition.id, sync=True)
            world.acknowledge([value])
    world.check()


def _must(world: World) -> set[bytes]:
    """What the log itself must have."""
    if world.ledger.free or world.floor is not None or "retention" in world.on:
        return set()
    return world.ledger.acked - world.ledger.excused


def _lacks(what: str) -> None:
    raise Wrong(f"a {what} of a topic whose mark is spoilt lacks records")


@contextmanager
def suppress_words() -> Iterator[None]:
    """A refusal is right; so is an error that names the damage."""
    with suppress(LogError):
        yield


# --- gaps ------------------------------------------------------------------------------------------------------


def mended(world: World) -> None:
    """Damage, repair, archive or tier, heal, retention: what was healed is not lost."""
    sealed_segment(world)
    whole = world.fresh("whole")
    loglib.copies.snapshot(world.path, whole, links=False)
    had_gaps, excused = world.has_gaps, set(world.ledger.excused)
    if damage(world) is None:
        return
    excuse_repaired(world)
    lost = world.ledger.excused - excused
    if world.floor is not None:
        phase(world, 0, steps.BY_FEATURE["tier" if "tier" in world.on else "archive"][:1])
    if "mirror" in world.on:
        steps.mirror(world)
    report = loglib.copies.heal(world.path, [whole])
    if not report.unhealed:
        world.has_gaps = had_gaps
        healed = lost
    else:
        healed = set()
    if world.floor is not None:
        phase(world, 0, steps.BY_FEATURE["tier" if "tier" in world.on else "archive"][:1])
    if "mirror" in world.on:  # its gap is declared still, as nobody has healed the copy
        steps.pass_of_mirror(world)
        loglib.copies.heal(world.other, [world.path])
        world.check_copy(world.other)
    world.ledger.excused -= healed
    phase(world, 1, (steps.roll, steps.append_many, *steps.BY_FEATURE["retention"][:1]))
    world.check()


def idle(world: World) -> None:
    """All segments of a partition go while others are busy. Copies follow."""
    phase(world, 1, (steps.append_many, steps.roll))
    if not world.members:
        _begin_mirror(world)
    with world.open() as topic:
        partition = topic.partition(world.choose.below(world.partitions))
        partition.roll()
        world.note("world", "noted_cut")
        partition.delete_before(partition.high_watermark)
        if world.choose.random() < 0.5:
            partition.roll()
    if not world.members:
        steps.pass_of_mirror(world)
        world.check_copy(world.other)
        to = world.fresh("idle")
        loglib.copies.snapshot(world.path, to)
        world.check_copy(to)
    phase(world, 2, (steps.append_many,))
    if not world.members:
        steps.pass_of_mirror(world)
        world.check_copy(world.other)


SETBACKS: dict[str, Callable[[World], None]] = {
    "store_older": store_older,
    "store_lost": store_lost,
    "store_rot": store_rot,
    "topic_older": topic_older,
    "failover": failover,
    "chain": chain,
    "mark_lost": mark_lost,
    "mark_rotten": mark_rotten,
    "mended": mended,
    "idle": idle,
    "tx_moved": tx_moved,
    "day": day,
    "moved": moved,
}
