"""Events: what happens to a topic between two openings, and is harmless by the documents.

Each is called with the world, and leaves it checked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import loglib
from loglib import Topic

from . import steps
from .oracle import Wrong
from .ways import rows_of
from .world import World

__all__ = ["EVENTS", "overwrite", "phase", "refusals"]

KILLED_WITHIN = 400  # calls to the system


def phase(world: World, count: int, wanted: tuple[steps.Step, ...] = ()) -> None:
    """Open the topic and do some steps, the wanted ones among them."""
    world.pending = []
    with world.open_for_steps() as topic:
        for step in world.choose.mix([*wanted, *(world.choose.pick(_steps(world)) for _ in range(count))]):
            world.steps.append(step.__name__)
            step(world, topic())
        world.flush(topic())
    world.check()


def _steps(world: World) -> list[steps.Step]:
    found = [*steps.ALWAYS]
    for name, some in steps.BY_FEATURE.items():
        if name in world.on:
            found += some
    return found


def kill(world: World) -> None:
    """A child writes, and dies at any call to the system."""
    allowed: list[steps.Step] = [*steps.IN_CHILDREN]
    for name in ("tx", "arrow", "mirror", "archive", "tier", "retention", "groups", "jobs"):
        if name in world.on:
            allowed += steps.BY_FEATURE[name]
    calls = int(world.choose.random() ** 2 * KILLED_WITHIN)

    def work() -> None:
        with world.open_for_steps() as topic:
            for _ in range(12):
                world.choose.pick(allowed)(world, topic())
            os._exit(9)

    world.in_child(work, calls=calls)
    world.number += 1000
    world.settle()
    with world.open():
        pass
    world.check()


# --- damage ----------------------------------------------------------------------------------------------------


def overwrite(path: str | Path, at: int, count: int = 20) -> bytes:
    """Damage the bytes of a file; returns those that were there."""
    file = os.open(path, os.O_RDWR)
    try:
        old = os.pread(file, count, at)
        os.pwrite(file, bytes(255 - each for each in old), at)
    finally:
        os.close(file)
    return old


def damage(world: World) -> tuple[int, int] | None:
    """Damage a sealed segment of orders; returns its partition and base offset, or None if there is none."""
    number, at = world.choose.random(), world.choose.random()
    with Topic.open(world.path, mode="r") as topic:
        sealed = [(each.id, segment) for each in topic.partitions for segment in each.segments if segment.sealed]
    if not sealed:
        return None
    partition, segment = sealed[int(number * len(sealed))]
    overwrite(segment.path, int(at * (segment.size_bytes + 4096)))
    return partition, segment.base_offset


def sealed_segment(world: World) -> None:
    phase(world, 0, (steps.append_many, steps.roll, steps.append_many))


def repair(world: World) -> None:
    sealed_segment(world)
    if damage(world) is not None:
        excuse_repaired(world)
    world.check()


def excuse_repaired(world: World) -> None:
    """Repair orders. What the report says is lost may be missing."""
    for each in loglib.repair(world.path).repairs:
        if each.partition is not None:
            lost = [
                value
                for value, (partition, offset) in world.ledger.places.items()
                if partition == each.partition and offset in each.offsets
            ]
            world.note("orders", "excuse", tuple(lost))
    world.has_gaps = True


def heal(world: World) -> None:
    sealed_segment(world)
    if world.members:
        donor = world.choose.pick(world.members)
    else:
        steps.mirror(world)
        donor = world.other
    if damage(world) is not None:
        report = loglib.copies.heal(world.path, [donor])
        if report.unhealed and (report.verified.damage or not world.has_gaps):  # a gap of a repair may stay
            raise Wrong(f"not healed: {report.unhealed[0]}")
        if report.healed and world.is_archived:  # what was a gap in the archive comes with its next call
            with world.open() as topic:
                steps.archive(world, topic)
    world.check()


# --- places ----------------------------------------------------------------------------------------------------


def promote(world: World) -> None:
    """The mirror takes the topic's place, and the topic is its mirror from then on."""
    steps.mirror(world)
    loglib.copies.promote(world.other)
    world.path, world.other = world.other, world.path
    world.check()


def add_partitions(world: World) -> None:
    if world.partitions < 6:
        Topic.add_partitions(world.path, world.partitions + 1)
        world.partitions += 1
    world.check()


def members(world: World) -> None:
    """Open with the directories of the topic in another order, one of them lost or older, as the documents allow."""
    choose = world.choose
    what, directories = choose.pick(("order", "lost", "older")), [world.path, *world.members]
    mixed = choose.mix(directories)
    harmed = choose.pick(directories)
    if what == "lost" and world.acks != "leader":
        shutil.rmtree(harmed)
        rest = [each for each in mixed if each != harmed]
        world.path, world.members = rest[0], [*rest[1:], harmed]
        with world.open(forget_replicas=[harmed]):
            pass
    elif what == "older" and world.acks != "leader":
        shutil.copytree(harmed, f"{harmed}.older")
        phase(world, 0, (steps.append_many, steps.roll, steps.append_many))
        shutil.rmtree(harmed)
        os.rename(f"{harmed}.older", harmed)
        world.path, world.members = mixed[0], mixed[1:]
    else:
        world.path, world.members = mixed[0], mixed[1:]
    world.repeats = True  # commits follow asynchronously
    with world.open():
        pass
    world.check()
    for each in world.members:
        world.check_copy(each)


def refusals(world: World) -> None:
    """What a topic with replicas does not do, it refuses before anything is written."""
    with world.open() as topic:
        world.refused("a transaction with replicas", lambda: _transact_once(world, topic))
    world.refused("shared writers with replicas", lambda: Topic.open(
        world.path, create=True, replicas=world.members, shared=True
    ))
    world.refused("durability os with replicas", lambda: world.open(durability="os"))
    world.refused("more partitions with replicas", lambda: Topic.add_partitions(world.path, world.partitions + 1))
    world.refused("repair with replicas", lambda: loglib.repair(world.path))
    world.refused("promotion of a member", lambda: loglib.copies.promote(world.members[0]))
    world.refused("opening without replicas", lambda: Topic.open(world.path))
    world.check()


def _transact_once(world: World, topic: Topic) -> None:
    with world.transaction() as tx:
        tx.append(topic, world.value(given=False), partition=0)


def two_names(world: World) -> None:
    """The topic is opened by another name, and is one topic under both."""
    alias = Path(os.path.dirname(world.fresh("alias")))
    alias.symlink_to(os.path.dirname(world.path))
    other = str(alias / os.path.basename(world.path))
    with world.open() as topic:
        if "shared" not in world.on:
            again = partial(Topic.open, other, replicas=world.members or None)
            world.refused("a second writer by another name", again)
        steps.append_many(world, topic)
        world.flush(topic)
        if "tx" in world.on:
            values = world.value(), world.value()
            with Topic.open(other, mode="r") as same_topic, world.transaction("two") as tx:
                tx.append(topic, values[0], partition=0)
                tx.append(same_topic, values[1], partition=0)
                world.note("orders", "again", values)
                world.note("world", "noted_section", [("orders", values)], "begun")
            world.acknowledge(values)
    if not world.members:
        here = world.path
        world.path = other
        phase(world, 2)
        if "mirror" in world.on:
            steps.mirror(world)
        world.path = here
    world.check()
    with Topic.open(other, mode="r") as by_alias, Topic.open(world.path, mode="r") as by_name:
        if rows_of(by_alias.read()) != rows_of(by_name.read()):
            raise Wrong("two names show two topics")


EVENTS: dict[str, Callable[[World], None]] = {
    "kill": kill,
    "repair": repair,
    "heal": heal,
    "promote": promote,
    "addpart": add_partitions,
    "two_names": two_names,
}
