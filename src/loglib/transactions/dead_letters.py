"""Dead letters: how a share has them written, and how pins whose transaction nobody carries on are resolved.

Invariant: a record is pinned in its share, durably, before the transaction is committed; and the transaction is done
only when the share has it as settled, durably. So the store and the pin together tell how a transaction has ended:

    the store has a pending transaction that names it       it is committed: apply it
    no pending one does, and the pin is gone after that     it is done
    no pending one does, and the pin is still there         it is not committed

The last is for ever after a fence in the store, which refuses the member this token and lower ones: a member that was
only stopped may still be about to commit. So the order is: fence, pending transactions, pin.

Threads: nobody holds the lock of a share here. A `JobTransactions` is used by all threads of its topic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ..append.handles import Handles
from ..config.lazy import called_later
from ..config.policies import TopicConfig
from ..jobs.ack_log import Pin
from ..jobs.transacting import Doubts, Letter, Promise, ShareFacts
from ..log import topic_file
from ..log.store_pointer import read_pointer
from .apply import Applier
from .job_commits import commit_of
from .manifest import Fence, JobCommit
from .store import Store, open_store
from .transaction import Transaction

APP = "loglib-jobs"  # of all transactions of dead letters; no process owns it
_TIMEOUT_S = 2.0
_MOST_FACTS_BYTES = 1 << 16  # of the headers that a dead letter has besides those of its record

_open_topic = called_later("loglib.topic", "open_topic")


class JobTransactions:
    """The `Transactions` of the shares of a topic."""

    def __init__(self, handles: Handles) -> None:
        self._handles = handles
        self._store: Store | None = None  # it stays open

    def bury(self, path: str, letters: Sequence[Letter], promise: Promise) -> None:
        share = promise.keeper.directory
        _make(share, path)
        with (
            _open_topic(path, files=share.files, clock=share.clock, mode="r") as topic,
            Transaction(APP, None, owner=APP, source=None, store=None, timeout=_TIMEOUT_S) as transaction,
        ):
            transaction.settle(promise)
            for each in letters:
                transaction.append(topic, each.value, each.key, timestamp=each.timestamp, headers=each.headers)

    def finish(self, share: ShareFacts) -> None:
        store = self._find_store(share)
        if store is not None:
            self._apply(store, share, lambda job: (job.log, job.share) == (share.log_id.hex(), share.name))

    def resolve(self, share: ShareFacts, doubts: Doubts) -> None:
        pins = doubts.pins()
        store = self._find_store(share) if pins else None
        if store is not None:
            self._apply_named(store, share, doubts.partition, pins)
            pins = doubts.pins()
        if store is not None and pins:
            commits = [commit_of(store, share, doubts.partition, each) for each in pins]
            store.fence_groups([Fence(*each.fence, each.token + 1) for each in commits], now=share.clock())
            self._apply_named(store, share, doubts.partition, pins)
        refused = {each.token for each in pins}
        left = [each for each in doubts.pins() if each.token in refused]  # others have come into doubt only now
        if left:
            doubts.release(left)

    def _apply_named(self, store: Store, share: ShareFacts, partition: int, pins: Sequence[Pin]) -> None:
        hands = {commit_of(store, share, partition, each).hand for each in pins}
        self._apply(store, share, lambda job: job.hand in hands)

    def _find_store(self, share: ShareFacts) -> Store | None:
        pointer = read_pointer(share.files, share.topic_path)
        if pointer is None:  # each pin is later than the pointer: the topic was separated from its store
            return None
        self._store = open_store(share.files, os.path.normpath(pointer.path))
        return self._store

    def _apply(self, store: Store, share: ShareFacts, is_wanted: Callable[[JobCommit], bool]) -> None:
        """Apply the transactions that settle these records. `CommitPendingError` if one of them cannot be."""
        named = [each.number for each in store.pending() if any(map(is_wanted, each.jobs))]
        if named:
            Applier(share.files, store, self._handles.writers, clock=share.clock).run(_TIMEOUT_S, wanted=max(named))


def _make(share: ShareFacts, path: str) -> None:
    """Make the topic for dead letters, if there is none. Synced."""
    if topic_file.read(share.files, path) is None:
        described = topic_file.read(share.files, share.topic_path)
        config = TopicConfig() if described is None else described[1]
        largest = min(config.max_record_bytes + _MOST_FACTS_BYTES, config.segment_bytes // 2)
        made = TopicConfig(
            permissions=share.permissions, segment_bytes=config.segment_bytes, compression=config.compression,
            max_record_bytes=max(largest, config.max_record_bytes),
        )  # fmt: skip
        topic_file.create(share.files, path, made, now=share.clock())
