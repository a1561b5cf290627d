"""Replicas: appends to a topic in one directory, and to one in several directories of the same disk.

Invariant: what is timed ends when everything is acknowledged by all directories.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from inputs import in_calls, values_of
from loglib import Topic
from measure import Measurement, timed_rounds

if TYPE_CHECKING:
    from pathlib import Path

    from job import Options


def append_replicated(directory: Path, options: Options) -> Measurement:
    """Append in calls of `per_call`; or one a call with sync=True, from so many `threads`."""
    messages, threads = options.number("messages"), options.number("threads")
    values = values_of("200", messages)
    own, *others = [directory / str(number) / "log" for number in range(options.number("directories"))]
    with Topic.open(own, create=True, replicas=others or None) as topic:
        timing = timed_rounds(lambda: _from_threads(topic, values, threads) if threads else _in_calls(topic, values))
        assert len({each.durable_ends for each in topic.replicas()}) <= 1
    return Measurement(
        messages=messages, payload_bytes=messages * 200, seconds=timing.seconds, best_seconds=timing.best_seconds,
        cpu_seconds=timing.cpu_seconds,
    )  # fmt: skip


def _in_calls(topic: Topic, values: list[bytes]) -> None:
    for call in in_calls(values, 10_000):
        topic.append_many(call)
    topic.flush()


def _from_threads(topic: Topic, values: list[bytes], threads: int) -> None:
    def work(share: list[bytes]) -> None:
        for value in share:
            topic.append(value, sync=True)

    workers = [threading.Thread(target=work, args=(each,)) for each in in_calls(values, -(-len(values) // threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
