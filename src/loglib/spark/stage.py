"""Stage: the rows of one task of a sink, dealt to topics and partitions, and written to files that belong to no log.

Invariant: no staged record is in a log. Each attempt of a task has its own directory, so attempts never meet. The first
half of its name is that of the write, and the other half is random: a commit finds what failed attempts have left. The
result of `finish` is durable. Rows of one partition keep their order. A row's partition comes from the
column `partition`; if this is null, from the key by the topic's partitioner; without a key it is the same one for the
whole task.

    <topic>/staging/<attempt>/frames            pieces, one after the other (transactions/staging.py)
    <topic>/staging/<attempt>/<partition>-1     a large piece with its own file, which may become a segment

The batches of all partitions are written when they are 32 MiB together. If a partition has much then, after its first
piece, it gets its own file. If all are at most 64 KiB at the end, there is no file, and the commit message contains
them.

Processes: executors; a stage belongs to one task.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..append.arrow_bodies import Numbers, Rows
from ..append.hash_columns import can_hash, deal, partitions_of, place_rows
from ..config.arguments import check_names
from ..format.arrow import HEADERS_TYPE, join
from ..format.codec import codec_id
from ..segment import Identity
from ..system.files import Files
from ..transactions.manifest import Section
from ..transactions.staging import STAGING, Portion, Staged, directory_of, remove_attempt, sync_names
from .sink_target import Target, TargetTopic, find_topic, no_function

NAME = "frames"
_OF_WRITE = 16  # letters of an attempt's name that say which write it is of
_IN_MESSAGE_BYTES = 64 << 10  # Spark collects the messages of all tasks on the driver
_SECTIONS_BYTES = 32 << 20
_WAITING_BYTES = 64 << 20  # of all partitions, not encoded
_BORROWED_BYTES = 64 << 20  # of Spark's batches that may be alive for a few records that wait
_OWN_BYTES = 1 << 20  # of a piece for which a file of its own is made
_OWN_FILES = 64  # open at the same time
_BATCHES = 4  # a partition waits for this many batches, so that the part that does not fill a batch is small


def new_attempt(files: Files, like: str) -> str:
    """A name for one more attempt of the write that the attempt `like` is of."""
    return like[:_OF_WRITE] + files.random_bytes(8).hex()


def attempts_of(files: Files, topic_path: str, staged: Iterable[Staging]) -> set[str]:
    """All attempts in the topic's directory of the write that has staged these, also those that have failed."""
    writes = {each.attempt[:_OF_WRITE] for each in staged}
    with suppress(FileNotFoundError):
        return {each for each in files.names_in(os.path.join(topic_path, STAGING)) if each[:_OF_WRITE] in writes}
    return set()


class Staging(NamedTuple):
    """The staged records of one task."""

    attempt: str
    sections: tuple[Section, ...]  # with absolute paths of their topics
    frames: bytes  # of the sections that are in no file
    rows: Mapping[str, int]  # by path of the topic


@dataclass(slots=True)
class _Partition:
    """One partition, while records are added to it."""

    topic: TargetTopic
    staged: Staged
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    waiting_records: int = 0


@dataclass(slots=True)
class _File:
    fd: int
    size_bytes: int = 0


class TaskStage:
    """The staged records of one attempt of a task. Call `finish`, or `discard`."""

    def __init__(self, files: Files, now: Callable[[], int], write: str) -> None:
        """`write` is a text that all attempts of all tasks of one write have, and no other write."""
        self.attempt = new_attempt(files, sha256(write.encode()).hexdigest())
        self._files = files
        self._now = now
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._open: dict[str, _File] = {}  # by path of the topic
        self._own_files = 0  # of partitions
        self._waiting_bytes = 0
        self._borrowed_bytes = 0
        self._rows: dict[str, int] = {}  # that were added, by path of the topic

    def add(self, topic: TargetTopic, partition: int, records: pa.RecordBatch) -> None:
        """Add records of the columns that `Rows` knows, all of the same types."""
        one = self._partitions.get((topic.path, partition))
        if one is None:
            identity = Identity.of(topic.log_id, partition)
            staged = Staged(topic.path, identity, topic.config, self._now, copies=False)  # Arrow's memory stays
            one = self._partitions[topic.path, partition] = _Partition(topic, staged)
        self._rows[topic.path] = self._rows.get(topic.path, 0) + records.num_rows
        one.waiting.append(records)
        one.waiting_bytes += records.nbytes
        one.waiting_records += records.num_rows
        self._waiting_bytes += records.nbytes
        config = topic.config
        if one.waiting_bytes >= _BATCHES * config.batch_bytes or one.waiting_records >= _BATCHES * config.batch_records:
            self._encode(one)
        if self._waiting_bytes >= _WAITING_BYTES:
            self._encode_all()
        if self._buffered_bytes() >= _SECTIONS_BYTES:
            self._write()

    def borrow(self, size_bytes: int) -> None:
        """Count the size of Spark's batch whose records were added.

        One record that waits keeps its whole batch in memory, so the waiting records are copied now and then.
        """
        self._borrowed_bytes += size_bytes
        if self._borrowed_bytes >= _BORROWED_BYTES:
            for one in self._partitions.values():
                if one.waiting:
                    nothing = one.waiting[0].slice(0, 0)  # with it a single batch is copied, too
                    one.waiting = [join([*one.waiting, nothing])]
            self._borrowed_bytes = 0

    def finish(self) -> Staging:
        """All records that were added. Synced."""
        self._encode_all()
        in_message = not self._open and self._buffered_bytes() <= _IN_MESSAGE_BYTES
        if not in_message:
            self._write()
        frames = b""
        sections = []
        for one in self._partitions.values():
            for portion in one.staged.portions:
                if portion.fd >= 0:
                    directory, permissions = self._directory(one.topic.path), one.topic.config.permissions
                    portion.sync(self._files, directory, permissions, large_bytes=one.staged.large_bytes)
                if portion.batches:
                    sections.append(self._section(one.staged, portion, len(frames) if in_message else portion.at))
                    frames += portion.take()
        for topic_path, file in self._open.items():
            self._files.datasync(file.fd)
            sync_names(self._files, topic_path, self.attempt)
        self._close()
        return Staging(self.attempt, tuple(sections), frames, self._rows)

    def discard(self) -> None:
        """Remove the files."""
        topics = list(self._open)
        self._close()
        for path in topics:
            remove_attempt(self._files, path, self.attempt)

    def _buffered_bytes(self) -> int:
        return sum(each.staged.buffered_bytes for each in self._partitions.values())

    def _encode_all(self) -> None:
        for each in self._partitions.values():
            self._encode(each)

    def _encode(self, one: _Partition) -> None:
        if one.waiting:
            config, rows = one.topic.config, Rows(join(one.waiting))
            rows.check(limit_bytes=config.max_record_bytes)
            for body in rows.bodies(config, codec_id(config.compression)):
                one.staged.add_body(body)
            self._waiting_bytes -= one.waiting_bytes
            one.waiting, one.waiting_bytes, one.waiting_records = [], 0, 0

    def _write(self) -> None:
        """Write the encoded batches to the file that the partitions share, or to the partition's own file."""
        for (path, _), one in self._partitions.items():
            file = self._open.get(path) or self._make_file(one.topic)
            for portion in [each for each in one.staged.portions if each.parts]:
                is_large = portion.at and portion.buffered_bytes >= _OWN_BYTES
                if portion.fd >= 0 or (is_large and self._own_files < _OWN_FILES):
                    self._own_files += portion.fd < 0
                    portion.write(self._files, self._directory(path), one.topic.config.permissions)
                else:
                    portion.name, portion.at = NAME, file.size_bytes
                    file.size_bytes += portion.size_bytes
                    portion.drain(self._files, file.fd, portion.at)
                    if portion is one.staged.portions[-1]:
                        one.staged.cut()

    def _make_file(self, topic: TargetTopic) -> _File:
        directory = self._directory(topic.path)
        self._files.make_directories(directory, topic.config.permissions)
        made = _File(self._files.create(os.path.join(directory, NAME), topic.config.permissions))
        self._open[topic.path] = made
        return made

    def _directory(self, topic_path: str) -> str:
        return directory_of(topic_path, self.attempt)

    def _close(self) -> None:
        for one in self._partitions.values():
            for portion in one.staged.portions:
                portion.close(self._files)
        while self._open:
            self._files.close(self._open.popitem()[1].fd)

    def _section(self, staged: Staged, portion: Portion, at: int) -> Section:
        """The section for a piece, which begins at byte `at` of its file, or of the message if it is in memory."""
        identity, file = staged.identity, "" if portion.parts else os.path.join(STAGING, self.attempt, portion.name)
        return Section(
            staged.topic_path, identity.log_id, identity.partition, file, at, portion.size_bytes, portion.batches,
            portion.is_segment,
        )  # fmt: skip


class RowPartitioner:
    """Deals the rows of one task to its stage."""

    def __init__(self, target: Target, stage: TaskStage, *, keyless: int, now: Callable[[], int]) -> None:
        """`keyless` chooses the partition of all rows without a key: this number, modulo the topic's partitions."""
        self._target = target
        self._stage = stage
        self._keyless = keyless
        self._now = now
        self._topics: dict[str, TargetTopic] = {}

    def deal(self, rows: pa.RecordBatch) -> None:
        """Stage the rows of one Arrow batch."""
        if not rows.num_rows:
            return
        for topic, of_topic in self._by_topic(rows):
            records = self._records(of_topic)
            for share in deal(records, self._partitions(topic, of_topic, records)):
                self._stage.add(topic, share.partition, share.records)
        self._stage.borrow(rows.nbytes)

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[TargetTopic, pa.RecordBatch]]:
        if self._target.topic is not None:
            yield self._topic(self._target.topic), rows
            return
        topics = pc.dictionary_encode(rows.column(self._target.columns["topic"]))
        if topics.null_count:
            raise ValueError("a row whose topic is null; give each row a topic, or give the option topic")
        numbers = topics.indices.to_numpy()
        for number, name in enumerate(topics.dictionary.to_pylist()):
            check_names(name)
            topic = self._topic(os.path.join(self._target.path, name))
            yield topic, rows if len(topics.dictionary) == 1 else rows.take(pa.array(np.flatnonzero(numbers == number)))

    def _topic(self, path: str) -> TargetTopic:
        if path not in self._topics:
            try:
                self._topics[path] = find_topic(path, make=self._target.make)
            except FileNotFoundError as error:
                error.add_note(
                    f"(on {socket.gethostname()}; topics must be on storage that the driver and all executors mount at "
                    "the same path)"
                )
                raise
        return self._topics[path]

    def _records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that are written, in the types that `Rows` knows."""
        columns = {}
        for name in ("value", "key"):
            if name in self._target.columns:
                columns[name] = rows.column(self._target.columns[name]).cast(pa.binary())
        if "timestamp" in self._target.columns:
            times = rows.column(self._target.columns["timestamp"])
            times = times.cast(pa.timestamp("us", tz=times.type.tz)).view(pa.int64())
            columns["timestamp"] = pc.fill_null(times, self._now())
        if "headers" in self._target.columns:
            columns["headers"] = rows.column(self._target.columns["headers"]).cast(HEADERS_TYPE)
        return pa.RecordBatch.from_pydict(columns)

    def _partitions(self, topic: TargetTopic, rows: pa.RecordBatch, records: pa.RecordBatch) -> Numbers:
        count, partitioner = topic.config.partitions, topic.config.partitioner
        keyless = self._keyless % count

        def of_keys(keys: pa.Array) -> Numbers:
            if not can_hash(partitioner):
                raise no_function(topic)
            return partitions_of(keys, partitioner, count, keyless=keyless)

        columns = self._target.columns
        chosen = rows.column(columns["partition"]) if "partition" in columns else None
        keys = records.column("key") if "key" in columns else None
        return place_rows(len(records), keys, chosen, of_keys, count, keyless=keyless, topic=topic.path)
