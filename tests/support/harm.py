"""Harm: workers that are killed and stopped at random moments, until they have done their work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Harm:
    """What has happened to the workers."""

    dead: set[int] = field(default_factory=set)  # killed, or have killed themselves
    kills: int = 0
    stops: int = 0


def harmed(
    start: Callable[[], int],
    draw: random.Random,
    *,
    workers: int,
    kills: int,
    deadly: float,
    longest_pause_s: float,
    besides: Callable[[list[int]], object] = lambda _: None,
) -> Harm:
    """Let workers run until all have ended by themselves; returns what was done to them.

    `start` starts a worker. A killed one is replaced, also one that has killed itself. Of the `kills`, the part
    `deadly` kills a worker, and the others stop one for a while. `besides` is called with the workers after each.
    """
    harm, running, stopped, left = Harm(), [start() for _ in range(workers)], list[int](), kills
    while running:
        for pid in running[:]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                stopped = [each for each in stopped if each != pid]
                assert status in (0, signal.SIGKILL), f"a worker ended with {status}"
                if status:
                    harm.dead.add(pid)
                    running.append(start())
        if stopped and (not left or draw.random() < 0.5):
            os.kill(stopped.pop(), signal.SIGCONT)
        if left and running:
            left -= 1
            victim = draw.choice(running)
            if draw.random() < deadly:
                os.kill(victim, signal.SIGKILL)
                harm.dead.add(victim)
                harm.kills += 1
                stopped = [each for each in stopped if each != victim]
            elif victim not in stopped:
                os.kill(victim, signal.SIGSTOP)
                harm.stops += 1
                stopped.append(victim)
            besides(running)
        time.sleep(draw.random() * longest_pause_s)  # between two kills, not for anything to happen
    return harm
