"""Programs that write a topic and mirror it on a simulated disk, and what must hold after a power cut in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import NamedTuple

from streamed import served

from conftest import QUIET, values_of
from loglib import Topic, testing
from loglib.config.policies import Durability
from loglib.copies import Mirror
from loglib.system.files import Files
from loglib.testing import CrashFS, CrashState, Image, MemoryFiles

__all__ = ["Judged", "MirrorProgram"]

SOURCE, COPY = "/data/topic", "/data/copy"


class Judged(NamedTuple):
    """What was looked at."""

    states: int
    shown: int  # records that copies have shown
    set_aside: int  # files


class MirrorProgram:
    """Appends, rolls, retention and passes of a mirror, at random by the seed; and all of it again after a cut.

    The mirror may be one over a stream. Then the source's side is served by a thread, which only reads.
    """

    def __init__(self, seed: int, steps: int = 12, *, over_a_stream: bool = False) -> None:
        self._chance = random.Random(seed)
        self._over_a_stream = over_a_stream
        self._durability: Durability = "os" if self._chance.random() < 0.3 else "disk"
        self._written: dict[int, list[bytes]] = {0: [], 1: []}
        made = MemoryFiles()
        testing.open_topic(SOURCE, files=made, partitions=2, durability=self._durability, **QUIET).close()
        self.fs = CrashFS(Image.of(made.tree()))
        self.fs.kill()
        with ExitStack() as opened:
            self._topic = opened.enter_context(testing.open_topic(SOURCE, files=self.fs))
            self._open = opened.enter_context(ExitStack())
            self._reopen()
            self._append()
            for _ in range(steps):
                self._chance.choice([self._append, self._append, self._copy, self._copy, self._roll, self._reopen])()
                self._drop()
            self._copy()

    # --- the program -----------------------------------------------------------------------------------

    def _append(self) -> None:
        for partition in self._chance.choice([(0,), (1,), (0, 1)]):
            size = self._chance.choice([1, 30, 600])
            value = b"%d of %d " % (len(self._written[partition]), partition) + b"x" * size
            self._topic.append(value, partition=partition, sync=True)
            self._written[partition].append(value)

    def _copy(self) -> None:
        self._mirror.copy()

    def _roll(self) -> None:
        self._topic.partition(self._chance.randrange(2)).roll()

    def _reopen(self) -> None:
        self._open.close()
        self._mirror = self._open.enter_context(self._opened(self.fs))

    @contextmanager
    def _opened(self, files: Files) -> Iterator[Mirror]:
        if self._over_a_stream:
            with served(SOURCE, files=files) as serving, Mirror.over(serving.stream, COPY, files=files) as mirror:
                yield mirror
        else:
            with Mirror(SOURCE, COPY, files=files) as mirror:
                yield mirror

    def _drop(self) -> None:
        segments = self._topic.partition(0).segments
        if len(segments) > 2 and self._chance.random() < 0.3:
            self._mirror.copy()
            self._topic.partition(0).delete_before(segments[1].base_offset)

    # --- what must hold ----------------------------------------------------------------------------------

    def judge_cuts(self, every: int = 1) -> Judged:
        """Judge each `every`-th state that a power cut may leave."""
        states = shown = aside = 0
        for state in islice(self.fs.crash_states(random=1), 0, None, every):
            found = self._judge(state)
            states, shown, aside = states + 1, shown + found[0], aside + found[1]
        return Judged(states, shown, aside)

    def _judge(self, state: CrashState) -> tuple[int, int]:
        files, shown = state.files, 0
        if files.exists(f"{COPY}/topic.json"):
            with testing.open_topic(COPY, files=files, mode="r") as copy:
                damage = copy.verify().damage
                assert all(each.path.endswith("watermark") for each in damage), state  # a slot that was being written
                shown = sum(self._check_prefix(copy, number, state) for number in self._written)
        with testing.open_topic(SOURCE, files=files) as topic:
            with self._opened(files) as mirror:
                mirror.copy()
                aside = len(mirror.report().set_aside)
            assert self._durability == "os" or not aside, state
            with testing.open_topic(COPY, files=files, mode="r") as copy:
                assert copy.verify().damage == (), state
                for ours, theirs in zip(copy.partitions, topic.partitions, strict=True):
                    assert values_of(ours) == values_of(theirs), state
        for name, content in files.tree().items():
            if name.startswith(COPY) and name.endswith(".log"):
                assert files.tree()[name.replace(COPY, SOURCE)].startswith(content), state
        return shown, aside

    def _check_prefix(self, copy: Topic, number: int, state: CrashState) -> int:
        """The copy shows neighbouring records of the source, at least from its own beginning on."""
        found, written = values_of(copy.partition(number)), self._written[number]
        start = written.index(found[0]) if found else 0
        assert found == written[start : start + len(found)], state
        assert not found or not start or copy.partition(number).log_start_offset, state
        return len(found)
