"""Harm: workers that are killed and stopped at random moments, until they have done their work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable


def harmed(
    start: Callable[[], int], draw: random.Random, *, workers: int, kills: int, deadly: float, longest_pause_s: float
) -> set[int]:
    """Let workers run until all have ended by themselves; returns the processes that were killed.

    `start` starts a worker. A killed one is replaced, also one that has killed itself. Of the `kills`, the part
    `deadly` kills a worker, and the others stop one for a while.
    """
    running, dead, stopped, left = [start() for _ in range(workers)], set[int](), list[int](), kills
    while running:
        for pid in running[:]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                stopped = [each for each in stopped if each != pid]
                assert status in (0, signal.SIGKILL), f"a worker ended with {status}"
                if status:
                    dead.add(pid)
                    running.append(start())
        if stopped and (not left or draw.random() < 0.5):
            os.kill(stopped.pop(), signal.SIGCONT)
        if left and running:
            left -= 1
            victim = draw.choice(running)
            if draw.random() < deadly:
                os.kill(victim, signal.SIGKILL)
                dead.add(victim)
                stopped = [each for each in stopped if each != victim]
            elif victim not in stopped:
                os.kill(victim, signal.SIGSTOP)
                stopped.append(victim)
        time.sleep(draw.random() * longest_pause_s)  # between two kills, not for anything to happen
    return dead
