"""Stage: the encoded batches that one task of a sink writes before the commit, in files that belong to no log.

Invariant: no staged record is in a log. Each attempt of a task has its own directory, with a random name, so attempts
never meet. The result of `finish` is durable. Records for one partition keep their order.

    <topic>/staging/<attempt>/frames            pieces, one after the other (transactions/staging.py)
    <topic>/staging/<attempt>/<partition>-1     a large piece with its own file, which may become a segment

The batches of all partitions are written when they are 32 MiB together. If a partition has much then, after its first
piece, it gets its own file. If all are at most 64 KiB at the end, there is no file, and the commit message contains
them.

Threads: a stage belongs to one task.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from ..append.arrow_bodies import Rows, joined
from ..format.codec import codec_id
from ..segment import Identity
from ..system.files import Files
from ..transactions.manifest import Section
from ..transactions.staging import STAGING, Portion, Staged, directory_of, remove_attempt, sync_names
from .sink_target import TargetTopic

__all__ = ["NAME", "TaskStage"]

NAME = "frames"
_IN_MESSAGE_BYTES = 64 << 10  # Spark collects the messages of all tasks on the driver
_SECTIONS_BYTES = 32 << 20
_WAITING_BYTES = 64 << 20  # of all partitions, not encoded
_BORROWED_BYTES = 64 << 20  # of Spark's batches that may be alive for a few records that wait
_OWN_BYTES = 1 << 20  # of a piece for which a file of its own is made
_OWN_FILES = 64  # open at the same time
_BATCHES = 4  # a partition waits for this many batches, so that the part that does not fill a batch is small


@dataclass(slots=True)
class _Partition:
    """One partition, while records are added to it."""

    place: TargetTopic
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

    def __init__(self, files: Files, now: Callable[[], int]) -> None:
        self.attempt = files.random_bytes(16).hex()
        self._files = files
        self._now = now
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._open: dict[str, _File] = {}  # by path of the topic
        self._own_files = 0  # of partitions
        self._waiting_bytes = 0
        self._borrowed_bytes = 0
        self.rows: dict[str, int] = {}  # that were added, by path of the topic

    def add(self, place: TargetTopic, partition: int, records: pa.RecordBatch) -> None:
        """Add records of the columns that `Rows` knows, all of the same types."""
        one = self._partitions.get((place.path, partition))
        if one is None:
            identity = Identity.of(place.log_id, partition)
            staged = Staged(place.path, identity, place.config, self._now, copies=False)  # Arrow's memory stays
            one = self._partitions[place.path, partition] = _Partition(place, staged)
        self.rows[place.path] = self.rows.get(place.path, 0) + records.num_rows
        one.waiting.append(records)
        one.waiting_bytes += records.nbytes
        one.waiting_records += records.num_rows
        self._waiting_bytes += records.nbytes
        config = place.config
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
                    one.waiting = [_copied(one.waiting)]
            self._borrowed_bytes = 0

    def finish(self) -> tuple[tuple[Section, ...], bytes]:
        """The sections, with absolute paths of their topics, and the frames of those that are in no file. Synced."""
        self._encode_all()
        in_message = not self._open and self._buffered_bytes() <= _IN_MESSAGE_BYTES
        if not in_message:
            self._write()
        frames = b""
        sections = []
        for one in self._partitions.values():
            for portion in one.staged.portions:
                if portion.fd >= 0:
                    directory, permissions = self._directory(one.place.path), one.place.config.permissions
                    portion.sync(self._files, directory, permissions, large_bytes=one.staged.large_bytes)
                if portion.batches:
                    sections.append(self._section(one.staged, portion, len(frames) if in_message else portion.at))
                    frames += portion.take()
        for topic_path, file in self._open.items():
            self._files.datasync(file.fd)
            sync_names(self._files, topic_path, self.attempt)
        self._close()
        return tuple(sections), frames

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
            config, rows = one.place.config, Rows(joined(one.waiting))
            rows.check(limit_bytes=config.max_record_bytes)
            for body in rows.bodies(config, codec_id(config.compression)):
                one.staged.add_body(body)
            self._waiting_bytes -= one.waiting_bytes
            one.waiting, one.waiting_bytes, one.waiting_records = [], 0, 0

    def _write(self) -> None:
        """Write the encoded batches to the file that the partitions share, or to the partition's own file."""
        for (path, _), one in self._partitions.items():
            file = self._open.get(path) or self._make_file(one.place)
            for portion in [each for each in one.staged.portions if each.parts]:
                is_large = portion.at and portion.buffered_bytes >= _OWN_BYTES
                if portion.fd >= 0 or (is_large and self._own_files < _OWN_FILES):
                    self._own_files += portion.fd < 0
                    portion.write(self._files, self._directory(path), one.place.config.permissions)
                else:
                    portion.name, portion.at = NAME, file.size_bytes
                    file.size_bytes += portion.size_bytes
                    portion.drain(self._files, file.fd, portion.at)
                    if portion is one.staged.portions[-1]:
                        one.staged.cut()

    def _make_file(self, place: TargetTopic) -> _File:
        directory = self._directory(place.path)
        self._files.make_directories(directory, place.config.permissions)
        made = _File(self._files.create(os.path.join(directory, NAME), place.config.permissions))
        self._open[place.path] = made
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


def _copied(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch with the records of these, in new memory."""
    return joined([*batches, batches[0].slice(0, 0)])  # a single one would not be copied
