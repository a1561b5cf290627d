"""Job commits: records of shares that are settled by transactions, in a manifest and in the share's file.

Invariant: an entry that settles a pinned record has an effect once, and none if the record is not pinned in that hand.
So any process writes it, any number of times.

Threads: pure, or one call; the file is opened for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from ..jobs.ack_log import AckLog, Pin
from ..jobs.directory import SHARES
from ..jobs.generation import Place
from ..jobs.known_places import next_history
from ..jobs.members import NOBODY
from ..jobs.transacting import ShareFacts
from ..log import topic_file
from ..log.log import Log
from ..segment import Identity
from ..system.clock import Clock
from ..system.files import Files
from .manifest import JobCommit
from .store import Store

logger = logging.getLogger("loglib")


def commit_of(store: Store, share: ShareFacts, partition: int, pin: Pin) -> JobCommit:
    """The records in the form of a manifest."""
    topic = os.path.relpath(os.path.realpath(share.topic_path), os.path.dirname(store.path))
    return JobCommit(topic, share.log_id.hex(), share.name, partition, *pin)


def settle_in_file(
    files: Files, topic_path: str, share: str, partition: int, pins: Sequence[Pin], clock: Clock
) -> None:  # fmt: skip
    """Settle pinned records of a share that this process has not joined, or has left. Synced."""
    described = topic_file.read(files, topic_path)
    directory = topic_file.partition_directory(os.path.join(topic_path, SHARES, share), partition)
    if described is None or not files.exists(directory):
        logger.error("%s: the share %s was deleted; %d records of it are not settled", topic_path, share, len(pins))
        return
    log_id, config = described
    place, log_directory = Place(log_id, partition, share), topic_file.partition_directory(topic_path, partition)
    with (
        closing(Log(files, log_directory, Identity.of(log_id, partition))) as log,
        closing(AckLog(files, directory, place, NOBODY, clock, config.permissions, partial(next_history, log))) as acks,
    ):
        acks.end_pins(pins)
