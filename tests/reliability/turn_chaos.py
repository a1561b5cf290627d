"""Turn chaos: processes that take turns at the partitions of a topic, and are killed and stopped at any instruction.

    PYTHONPATH=src:tests:tests/support:tests/reliability python tests/reliability/turn_chaos.py \
        --kills 5000 --stops 1000 --seed 1

A round is a topic with 2 to 16 processes. A killed process is replaced by a new one. At the end of a round the others
end in order, and the whole log is judged by what all of them were told (`takers.judge`). Processes that wait for a
stopped one wait longer than it is stopped, so none is refused; in every fourth round they wait for less, and then a
refused record must not be in the log. The choices follow from the seed; the instants of the kills are real and differ.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from processes import fork, wait
from takers import MIXED, MOST, PATIENCE_S, SYNCED, Action, Taker, Told, judge, stop, take_turns, told, wait_until

from conftest import QUIET
from loglib import FlushPolicy, Topic
from loglib.testing import UnsyncedFiles

LONGEST_LIFE_S = 0.03  # between two events; opening takes a few milliseconds
LONGEST_WORK_S = 0.5
LONGEST_STOP_S = 0.15
SHORT_WAIT_S = 0.02
KILLS_PER_ROUND = 25

WORKS: tuple[tuple[Action, ...], ...] = (MIXED, SYNCED, (*MIXED, Taker.roll), (Taker.append, Taker.append_many))
FLUSHES = (
    QUIET["flush"],
    FlushPolicy(records=None, interval=0.001, bytes=None),
    FlushPolicy(records=5, interval=None, bytes=None),
)


class TurnChaos:
    """A topic, its writers, and the harm that is done to them."""

    def __init__(
        self, path: Path, seed: object, *, processes: int, partitions: int, actions: Sequence[Action] = MIXED,
        files: Any = None, wait: float = PATIENCE_S, **policies: Any,
    ) -> None:  # fmt: skip
        self.path = path
        self.rng = random.Random(f"turns {seed}")
        self.actions = actions
        self.files = files
        self.wait = wait
        self.takers: list[Told] = []
        self.living: dict[int, int] = {}  # the number of the taker, by process
        self.done: Counter[str] = Counter()
        Topic.open(path, create=True, partitions=partitions, segment_bytes=8192, **(QUIET | policies)).close()
        for _ in range(processes):
            self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pid in self.living:
            os.kill(pid, signal.SIGKILL)
            wait(pid)

    @property
    def locked(self) -> int:
        """How often a process was refused."""
        return sum(each.locked for each in self.takers)

    def start(self) -> None:
        """Start a writer."""
        number = len(self.takers)
        self.takers.append(told())
        pid = fork(
            partial(
                take_turns, self.path, self.takers[-1], number, actions=self.actions, files=self.files,
                seed=self.rng.getrandbits(32), wait=self.wait,
            )
        )  # fmt: skip
        self.living[pid] = number

    def kill(self) -> None:
        """Kill a writer at any moment, and start another one."""
        self._let_live()
        pid = self.rng.choice(list(self.living))
        os.kill(pid, signal.SIGKILL)
        self._gone(pid, -signal.SIGKILL)
        self.done["kills"] += 1
        self.start()

    def stop(self) -> None:
        """Stop a writer at any moment for a while. Meanwhile another one may be killed."""
        self._let_live()
        pid = self.rng.choice(list(self.living))
        stop(pid)
        if self.rng.random() < 0.3:
            self.kill()
        else:
            time.sleep(self.rng.uniform(0, LONGEST_STOP_S))
        if pid in self.living:
            os.kill(pid, signal.SIGCONT)
        self.done["stops"] += 1

    def end(self) -> int:
        """Let all see progress once more, let them end in order, and judge the log; returns its records."""
        before = {number: self.takers[number].calls for number in self.living.values()}
        for number, calls in before.items():
            taker = self.takers[number]
            wait_until(
                lambda taker=taker, calls=calls: taker.calls > calls or taker.done or taker.locked,  # type: ignore[misc]
                f"a call of taker {number}",
            )
        for number in self.living.values():
            self.takers[number].over = 1
        for pid in list(self.living):
            self._gone(pid, 0)
        found = judge(self.path, self.takers)
        Topic.open(self.path).close()  # nobody holds anything any more
        # A recovery may show what a taker had written before it was killed, and nobody has flushed.
        assert judge(self.path, self.takers) >= found
        return found

    def _let_live(self) -> None:
        """Give the writers time, or let them make some calls; then replace those that have written enough."""
        if self.rng.random() < 0.5:
            calls = sum(each.calls for each in self.takers) + self.rng.randrange(20 * len(self.living))
            until = time.monotonic() + LONGEST_WORK_S
            while sum(each.calls for each in self.takers) < calls and time.monotonic() < until:
                time.sleep(0.0005)
        time.sleep(self.rng.uniform(0, LONGEST_LIFE_S))
        for pid, number in list(self.living.items()):
            if self.takers[number].done or self.takers[number].begun > MOST - 200:
                self._gone(pid, 0)
                self.start()

    def _gone(self, pid: int, expected: int) -> None:
        number = self.living.pop(pid)
        status = wait(pid)
        if status == 0 and self.takers[number].done:  # it had ended before it could be killed
            return
        assert status == expected, f"taker {number} ended with {status}; its error is above"


def drawn(path: Path, seed: object) -> TurnChaos:
    """A round whose writers, partitions, policies and work follow from the seed."""
    rng = random.Random(f"round {seed}")
    short = rng.random() < 0.25
    return TurnChaos(
        path, seed,
        processes=rng.choice((2, 2, 3, 4, 6, 8, 12, 16)),
        partitions=rng.choice((1, 1, 2, 3, 8)),
        actions=rng.choice(WORKS),
        files=rng.choice((None, UnsyncedFiles())),
        wait=SHORT_WAIT_S if short else PATIENCE_S,
        flush=rng.choice(FLUSHES),
        durability=rng.choice(("disk", "disk", "os")),
        **({"batch_records": 3} if rng.random() < 0.2 else {}),
    )  # fmt: skip


def run(directory: Path, seed: object, *, kills: int, stops: int) -> Counter[str]:
    """One round; returns what was done."""
    path = directory / "topic"
    rng = random.Random(f"events {seed}")
    with drawn(path, seed) as chaos:
        try:
            while chaos.done["kills"] < kills or chaos.done["stops"] < stops:
                left = [chaos.kill] * max(0, kills - chaos.done["kills"])
                left += [chaos.stop] * max(0, stops - chaos.done["stops"])
                rng.choice(left)()
            records = chaos.end()
        except BaseException as error:
            error.add_note(f"round {seed}: {len(chaos.takers)} takers, {dict(chaos.done)}, wait={chaos.wait}")
            raise
        assert chaos.wait == SHORT_WAIT_S or chaos.locked == 0, f"round {seed}: {chaos.locked} appends were refused"
        return chaos.done + Counter(rounds=1, processes=len(chaos.takers), records=records, locked=chaos.locked)


def campaign(directory: Path, seed: int, *, kills: int, stops: int) -> Counter[str]:
    """Rounds until these numbers of processes were killed and stopped."""
    done: Counter[str] = Counter()
    rounds = -(-max(kills, stops) // KILLS_PER_ROUND)
    for number in range(rounds):
        share = [each * (number + 1) // rounds - each * number // rounds for each in (kills, stops)]
        with tempfile.TemporaryDirectory(dir=directory) as fresh:
            done += run(Path(fresh), f"{seed} {number}", kills=share[0], stops=share[1])
        print(number + 1, dict(done), file=sys.stderr, flush=True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and stop processes that take turns, and judge the log.")
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--stops", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="where to put the topics")
    arguments = parser.parse_args()
    began = time.monotonic()
    done = campaign(arguments.dir, arguments.seed, kills=arguments.kills, stops=arguments.stops)
    figures = ", ".join(f"{number:,} {what}" for what, number in done.items())
    print(f"{time.monotonic() - began:.0f} s, 0 wrong, 0 lost: {figures}")


if __name__ == "__main__":
    main()
