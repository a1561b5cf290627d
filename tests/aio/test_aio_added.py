"""Partitions that are added are read in an event loop, too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from loops import eventually, first, run

from loglib import Topic, aio
from loglib.log import reader as reader_module
from loglib.system import notify

COUNT = 40
EXPECTED = sorted(b"%d" % number for number in range(COUNT))


def grow(path: Path) -> None:
    Topic.add_partitions(path, 4)
    with Topic.open(path, create=True) as topic:
        for number in range(COUNT):
            topic.append(b"%d" % number, partition=number % 4)


@pytest.mark.parametrize("reports", [True, False], ids=["reported", "unreported"])
def test_followers_read_added_partitions(path: Path, reports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once if the system reports that the description was replaced, else at the next look."""
    if not reports:
        monkeypatch.setattr(notify, "_inotify", lambda _: None)
    monkeypatch.setattr(reader_module, "_ADDED_S", 3600.0 if reports else 0.0)
    for name in ("", "other"):
        Topic.open(path.with_name(path.name + name), create=True).close()

    async def main() -> None:
        async with aio.open(path, mode="r") as topic, aio.open(f"{path}other", mode="r") as other:
            readers = [topic.follow(), topic.follow(), other.follow()]
            tasks = [asyncio.create_task(first(each, COUNT)) for each in readers]
            await eventually(lambda: all(each._watch is not None for each in readers))
            await asyncio.to_thread(grow, path)
            await asyncio.to_thread(grow, path.with_name(path.name + "other"))
            for task in tasks:
                assert sorted(each.value or b"" for each in await task) == EXPECTED
            assert sorted(readers[0].tell()) == [0, 1, 2, 3]

    run(main())


def test_members_read_added_partitions_of_one_topic_and_of_several(path: Path) -> None:
    Topic.open(path.with_name("first"), create=True).close()
    Topic.open(path, create=True).close()

    async def main() -> None:
        async with aio.open(path.with_name("first"), mode="r") as keeper, aio.open(path, mode="r") as topic:
            async with aio.group([keeper, topic], "g") as group:
                found: list[Any] = await group.poll()
                await asyncio.to_thread(grow, path)
                while len(found) < COUNT:
                    found += await group.poll(timeout=30.0)
                assert sorted(each.value or b"" for _, each in found) == EXPECTED
            async with topic.group("alone") as alone:
                taken = [each async for each in alone.follow(timeout=0.2)]
                assert sorted(each.value or b"" for each in taken) == EXPECTED

    run(main())
