"""Run: one world from its seed, and the command line to repeat one.

python -m worlds.run 17                      the world of seed 17
python -m worlds.run 0 200                   the worlds from 0 on and below 200
python -m worlds.run 0 200 tx,mirror,kill    with these features in each
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from roomy import room_by_chance

from loglib.system.files import Files

from . import steps
from .draw import FEATURES, Choice, draw, pairs, possible
from .events import EVENTS, members, phase, refusals
from .setbacks import SETBACKS
from .world import World

__all__ = ["Done", "run_world"]

HAPPENS = EVENTS | SETBACKS | {"replicas": members}
EXTRA_PHASES, EXTRA_EVENTS = 3, 2


class Done(NamedTuple):
    """What a world was."""

    steps: int
    values: int
    pairs: Counter[str]


def run_world(seed: int, root: Path, on: frozenset[str] | None = None) -> Done:
    """Raises `AssertionError`, which names the seed, if anything is wrong."""
    features = draw(seed) if on is None else on
    world = World(seed, features, root / f"world{seed}")
    try:
        with (
            mock.patch.object(Files, "random_bytes", lambda files, count: world.random_bytes(count)),
            room_by_chance(seed),
        ):
            _live(world)
    except BaseException as error:
        raise AssertionError(
            f"world {seed} with {', '.join(sorted(features))}: {type(error).__name__}: {error}\n"
            f"after {' '.join(world.steps)}\nin {world.root}"
        ) from error
    shutil.rmtree(world.root)
    return Done(len(world.steps), world.number, pairs(features))


def _live(world: World) -> None:
    choose = world.choose
    with world.open():
        pass
    happens = [name for name in FEATURES if name in world.on and name in HAPPENS]
    more = [choose.pick(happens) for _ in range(choose.below(EXTRA_EVENTS + 1))] if happens else []
    scheduled = choose.mix([*happens, *more, *["phase"] * (1 + choose.below(EXTRA_PHASES))])
    wanted = tuple(some[0] for name, some in sorted(steps.BY_FEATURE.items()) if name in world.on)
    for number, name in enumerate(["phase", *scheduled]):
        world.choose = Choice(f"world {world.seed}, {number}")
        world.steps.append(f"[{name}]")
        if name == "phase":
            phase(world, 2 + world.choose.below(9), () if number else wanted)
        else:
            HAPPENS[name](world)
    if world.members:
        refusals(world)


def main() -> None:
    logging.getLogger("loglib").setLevel(logging.CRITICAL)
    first = int(sys.argv[1])
    end = int(sys.argv[2]) if len(sys.argv) > 2 else first + 1
    wanted = frozenset(sys.argv[3].split(",")) if len(sys.argv) > 3 else None
    root, began, wrong, met = Path(tempfile.mkdtemp(prefix="worlds-")), time.monotonic(), 0, Counter[str]()
    for seed in range(first, end):
        try:
            done = run_world(seed, root, wanted and wanted | (draw(seed) if "+" in wanted else frozenset()))
        except AssertionError as error:
            wrong += 1
            print(f"### {error}", flush=True)
            cause = error.__cause__
            if cause is not None:
                print("".join(traceback.format_exception(cause)[-6:]), flush=True)
        else:
            met += done.pairs
    least = min(((met[" + ".join(sorted(pair))], pair) for pair in possible(FEATURES)), default=None)
    print(f"{end - first} worlds, {wrong} wrong, {time.monotonic() - began:.1f} s; rarest pair {least}")


if __name__ == "__main__":
    main()
