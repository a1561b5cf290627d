"""Tail: the end of a log on disk, and the one place where the log grows: active segment, watermark, index.

Invariant: a write begins at the caller's `Tail` and returns the `Tail` after it. This module does not store
it: a write counts when the caller assigns the new `Tail`. An interrupt at any instruction leaves the old end
or the new one, and a repeated write overwrites the same bytes. After a failed sync, or if the files are no longer
where readers look, `failure` has the reason, and the caller must not write any more.

Threads: `write`, `roll` and `cut_back` under the writer's lock. `sync` and `drop_before` from the thread
that has the writer's turn. `publication` is safe for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, NoReturn

from ..config.policies import MAX_OFFSET, TopicConfig
from ..config.quantities import microseconds
from ..errors import LogMovedError, WriterFailedError
from ..format.chain import added
from ..format.header import NO_PRODUCER, PRODUCERS, Body, Header, Producer, batch_of_one, stamp
from ..format.record import new_tuple
from ..format.watermark import Mark, WatermarkWriter
from ..log.ages import Stamp, open_since
from ..log.index import SegmentIndex
from ..log.producers import Producers
from ..log.recovery import NO_SECTIONS, Recovery, Tail, recover, tail_at
from ..log.search import jumps_at
from ..segment import (
    Identity,
    SegmentHeader,
    SegmentReader,
    attach_segment,
    create_segment,
    keep_start_header,
    producers_name,
    segment_name,
    write_producers,
)
from ..system.clock import Moment
from ..system.directory import Directory
from ..system.files import Buffer
from ..system.not_copyable import NotCopyable
from .active import ActiveSegment
from .publication import Copies, Publication
from .room import Room

_MOST_PARTS = 1000  # of one write: the system takes 1,024


class NewBatch(NamedTuple):
    """A batch to write: the facts for its header, and its bytes."""

    body: Body | Header
    parts: Sequence[Buffer]
    producer: Producer = NO_PRODUCER  # for a transaction's batch: the store of the transaction, and its number
    section: int = 0  # for a transaction's batch: the flags SECTION and SECTION_END


class Txn(NamedTuple):
    """A transaction, as the logs name it."""

    number: int
    id: int
    store: int  # the first 8 bytes of the id of the store that gave the number


class TailWriter(NotCopyable):
    """The files at the end of a partition's log, open for writing.

    Construction recovers the partition (see log/recovery.py), whose lock the caller must hold. It raises
    `CorruptLogError` without having changed anything. The caller closes `files_to_close`. With `copies`, what is
    flushed is also flushed in other directories before readers see it.
    """

    _watermark: WatermarkWriter
    active: ActiveSegment
    publication: Publication

    def __init__(
        self,
        place: Directory,
        identity: Identity,
        config: TopicConfig,
        *,
        index: SegmentIndex,
        moment: Callable[[], Moment],
        copies: Copies | None = None,
    ) -> None:
        self.copies = copies
        self.place = place  # the directory for all files, even if it was moved
        self._files = place.files
        self._identity = identity
        self._index = index
        self._moment = moment
        self.believes: Callable[[Moment], bool] = lambda _: False  # whether the wall clock can be trusted
        self.segment_limit: Callable[[], int] = lambda: MAX_OFFSET  # bytes; for when space is short
        self.failure: BaseException | None = None
        self.rolled = False  # since this flag was last reset
        self._retired: list[int] = []  # files of sealed segments that a flush may still be syncing
        self.openings = 0  # how often the partition was recovered
        self.use(config)
        self._open()

    def _open(self) -> None:
        """Recover the partition, and open its files."""
        place, identity = self.place, self._identity
        self._begun_segment = -1  # base offset of a segment that a roll has begun to make
        recovered = recover(place, identity, self._permissions)
        self.recovery: Recovery = recovered.report
        tail, mark = recovered.tail, recovered.mark
        self.start = tail  # the end of the log after recovery, or where another process had left it
        self._index.replace(recovered.headers)
        self.openings += 1
        self.epoch = max(max(mark.writer_epoch, tail.writer_epoch) + 1, mark.promised_epoch)
        self.nonce = int.from_bytes(self._files.random_bytes(4), "little")
        header = recovered.headers[max(recovered.headers)]
        # Of the segments found and made, oldest first. Retention removes those that it drops.
        self.stamps = deque(Stamp.of(each) for each in recovered.headers.values())
        self.producers = Producers(identity.partition, recovered.producers, self._headers_with_producers)
        self._with_file = {base for base, each in recovered.headers.items() if each.more_producers}
        name = segment_name(header.base_offset)
        began: int | None = None
        if tail.end > header.base_offset:
            with SegmentReader(self._files, place.path_of(name), identity, within=place) as reader:
                began = open_since(reader, self._moment())
        undo, is_open = ExitStack(), False
        try:
            watermark = WatermarkWriter(place, identity.salt, mark)
            undo.callback(watermark.close)
            fd = place.open_write(name)
            undo.callback(self._files.close, fd)
            active = self._active(fd, header.base_offset)
            active.began = began
            if self.openings == 1:
                self.active = active
                self.publication = Publication(watermark, self.epoch, self.nonce, self.copies, self._poison)
            else:
                undo.callback(self.publication.publish_by, self._watermark, self.epoch, self.nonce)
                self.publication.publish_by(watermark, self.epoch, self.nonce)
            with watermark.locked() as newest:  # another process may just be flushing what is recovered here
                watermark.mark = mark._replace(sequence=newest.sequence, written_end=0, written_tail=0)
                self.publication.publish(flushed=tail, durable=tail)
            self.publication.sync()
            # In one step, without a call: from here on an interrupt must close none of these files.
            self.active, self._watermark, is_open = active, watermark, True
        finally:
            if not is_open:
                undo.close()

    def _active(self, fd: int, base_offset: int) -> ActiveSegment:
        path = self.place.path_of(segment_name(base_offset))
        return ActiveSegment(self._files, fd, path, base_offset, self.segment_bytes)

    # --- after other writers -----------------------------------------------------------------------

    def resume(self, tail: Tail) -> Tail | None:
        """The tail after what others have appended since `tail`. None if the log must be recovered.

        The caller has the partition's lock again. One who has given it up has left a log that ends where the watermark
        says. The log must be recovered after one who has died, and if there is another segment, or another file.
        """
        active, mark = self.active, self._watermark.read()
        if mark is None or mark.promised_epoch > self.epoch or not self._watermark.is_named():
            return None
        (end, last_batch), facts = mark.end, self._files.fstat(active.fd)
        if tail.end < active.base_offset:  # an interrupt came after `reopen`, before the caller had its tail
            return None
        if end < tail.end or facts.st_nlink != 1 or facts.st_size != active.file_position(end):
            return None
        if end != active.base_offset and self.place.exists(segment_name(end)):
            return None
        if not self._files.leads_to(active.path, (facts.st_dev, facts.st_ino)):  # a copy of hard links has it
            return None
        self.epoch = max(self.epoch, mark.writer_epoch)
        self.publication.come_back(mark, self.epoch)
        self._index.drop_before(mark.log_start_offset)
        self._begun_segment = -1
        active.reach = active.room_end = 0
        active.room = Room()  # a turn must last for some syncs before room is worth its zeros
        return tail if end == tail.end else self._tail_of_others(tail, end, last_batch)

    def _tail_of_others(self, tail: Tail, end: int, last_batch: int) -> Tail:
        """The tail at the end, after batches of others that follow `tail` in the active segment."""
        active = self.active
        reader = active.reader = active.reader or SegmentReader(self._files, active.path, self._identity, fd=active.fd)
        found = tail_at(reader, end, last_batch)
        if active.began is None:
            active.began = open_since(reader, self._moment())
        if found.producers_in_segment:
            self.start = found  # for `_headers_with_producers`
            self.note_producers(tail)  # the new tail does not have them
            self.producers.learn(reader.headers(tail.end, found.end))
        known = None if tail.end == active.base_offset else tail.jumps
        jumps = jumps_at(reader, found.last_batch, known)
        return found._replace(jumps=jumps, sections=NO_SECTIONS, records=tail.records)

    def reopen(self) -> Tail:
        """Recover the partition again, after others; returns the end of its log. As at construction."""
        before = [self.active.fd, self._watermark.fileno()]
        self._open()
        self._retired += before  # a flush may still be syncing the segment
        return self.start

    def _headers_with_producers(self) -> Iterator[Header]:
        """The headers of the batches that the segment had when it was opened, if any names a producer."""
        if self.start.producers_in_segment:
            yield from self.headers(self.active.base_offset, self.start.end)

    def headers(self, start: int, end: int) -> Iterator[Header]:
        """The headers of the batches from `start` to `end`, two boundaries of batches, across segments."""
        while start < end:
            base = self._index.find(start)
            assert base is not None  # retention drops nothing that a transaction holds
            stop = min(self._index.after(base) or end, end)
            path = self.place.path_of(segment_name(base))
            with SegmentReader(self._files, path, self._identity, within=self.place) as reader:
                yield from reader.headers(start, stop)
            start = stop

    def use(self, config: TopicConfig) -> None:
        """Roll by these policies from now on."""
        self._roll_bytes, self._permissions = config.roll_bytes, config.permissions
        self.syncs = config.durability == "disk"
        if self.openings and not self.syncs:
            self.active.room = Room()  # nothing tells it any more whether syncs are small
        self._segment_age_us = None if config.segment_age is None else microseconds(config.segment_age)
        self._producer_expiry_us = None if config.producer_expiry is None else microseconds(config.producer_expiry)

    def segment_bytes(self) -> int:
        """The largest size of a segment now, in bytes."""
        return min(self._roll_bytes, self.segment_limit())

    @property
    def mark(self) -> Mark:
        """The last publication."""
        return self._watermark.mark

    # --- write -------------------------------------------------------------------------------------

    def write(self, tail: Tail, batches: Sequence[NewBatch], now: Moment) -> tuple[Tail, list[range]]:
        """Write batches together at the tail, after a roll if one is due; returns the new tail, and their offsets.

        Raises `LogMovedError` and `OSError`; the caller then cuts back. The append time never falls. The records'
        default times follow the clock even when it falls: records from a wrong clock must not date later ones.
        """
        before, ranges = tail, []
        produced: list[tuple[Producer, range]] = []
        length = batches[0].body.length if len(batches) == 1 else sum([each.body.length for each in batches])
        if self._must_roll(tail.end, length, now):
            self.roll(tail, now)
        active = self.active
        written, parts = tail, list[Buffer]()
        for batch in batches:
            if parts and len(parts) + len(batch.parts) >= _MOST_PARTS:
                active.write(parts, written)
                written, parts = tail, []
            header, following = self._stamp(tail, active, batch, now)
            parts += [header, *batch.parts]
            ranges.append(range(tail.end, tail.end + batch.body.record_count))
            if batch.producer != NO_PRODUCER and not batch.section:
                produced.append((batch.producer, ranges[-1]))
            tail = following
        active.write(parts, written)
        if before.produced:
            self.note_producers(before)
        if active.began is None:
            active.began = now.boottime_us
        if produced:
            tail = Tail(*tail[:-1], tuple(produced))
        return tail, ranges

    def write_one(self, tail: Tail, value: bytes, key: bytes | None, now: Moment) -> Tail | None:
        """Write one record as a batch, as `write` does, in fewer steps. Returns the tail after it.

        None, and nothing is written, if `write` has more to do: a roll, the first batch of a segment, or producers to
        note.
        """
        end, active = tail.end, self.active
        if end == active.base_offset or tail.produced:
            return None
        wall_us = now.wall_us
        append_time, segment_max = max(wall_us, tail.append_time), max(wall_us, tail.segment_max_timestamp)
        jumps = added(tail.jumps, end)
        batch, header_crc = batch_of_one(
            value,
            key,
            (end, self._watermark.mark.durable_end, self.epoch),
            (  # as the keywords of `stamp` in `_stamp`
                tail.previous_crc, append_time, wall_us, wall_us, segment_max, *NO_PRODUCER,
                end - tail.last_batch, self.nonce, jumps.jump_offset,
            ),
            flags=PRODUCERS if tail.producers_in_segment else 0,
            salt=self._identity.salt,
        )  # fmt: skip
        if self._must_roll(end, len(batch), now):
            return None
        active.write([batch], tail)
        # The fields of Tail in their order: made by position, in half the time.
        return new_tuple(Tail, (
            end + len(batch), end, header_crc, append_time, max(tail.running_max_timestamp, wall_us), segment_max,
            self.epoch, jumps, tail.producers_in_segment, tail.records + 1, NO_SECTIONS, (),
        ))  # fmt: skip

    def _stamp(self, tail: Tail, active: ActiveSegment, batch: NewBatch, now: Moment) -> tuple[bytes, Tail]:
        """The header of the next batch, and the tail after it."""
        body, _, producer, section = batch
        latest = now.wall_us if body.max_timestamp is None else body.max_timestamp
        first = tail.end == active.base_offset  # first of its segment: facts about the segment before end here
        segment_max = latest if first else max(tail.segment_max_timestamp, latest)
        is_produced = producer != NO_PRODUCER and not section
        in_segment = is_produced or (tail.producers_in_segment and not first)
        append_time = max(now.wall_us, tail.append_time)
        jumps = added(None if first else tail.jumps, tail.end)
        header, header_crc = stamp(
            body,
            base_offset=tail.end,
            durable_up_to=self._watermark.mark.durable_end,
            writer_epoch=self.epoch,
            writer_nonce=self.nonce,
            previous_crc=tail.previous_crc,
            previous_bytes=tail.end - tail.last_batch,
            jump_offset=jumps.jump_offset,
            append_time=append_time,
            event_time=now.wall_us,
            running_max_timestamp=segment_max,
            producer=producer,
            producers_in_segment=in_segment,
            salt=self._identity.salt,
            section=section,
        )
        return header, new_tuple(Tail, (  # in the order of its fields, as in `write_one`
            tail.end + body.length, tail.end, header_crc, append_time, max(tail.running_max_timestamp, latest),
            segment_max, self.epoch, jumps, in_segment, tail.records + body.record_count, NO_SECTIONS, (),
        ))  # fmt: skip

    def note_producers(self, tail: Tail) -> None:
        """Remember the producers of the last batches. They are in the tail, so an interrupt cannot separate the two."""
        for producer, offsets in tail.produced:
            self.producers.remember(producer, offsets, tail.append_time)

    def cut_back(self, tail: Tail) -> None:
        """Remove the bytes that a write has left after the log.

        They must also be gone after a power cut, because an error will name their records as lost: a batch that lacks
        only zeros at its end would be whole again when the file grows. So the cut is synced. A failure is final.
        """
        try:
            if self.active.cut_back(tail):
                self._files.datasync(self.active.fd)
        except LogMovedError as moved:
            self.fail(moved)
        except OSError as error:
            self._poison(error)

    # --- roll --------------------------------------------------------------------------------------

    def _must_roll(self, end: int, length: int, now: Moment) -> bool:
        used = end - self.active.base_offset
        if used == 0:
            return False
        # An interrupted roll may have left the file of the next segment: finish it before any write.
        if end == self._begun_segment or used + length > self.segment_bytes():
            return True
        age, began = self._segment_age_us, self.active.began
        return age is not None and began is not None and now.boottime_us - began >= age

    def roll(self, tail: Tail, now: Moment) -> None:
        """Seal the active segment and begin the next. Synced: both files, the watermark, the name."""
        old = self.active
        header = self._seal(tail, now)
        fd = create_segment(self.place, header, self._permissions)
        self._begun(header)
        self.active = self._active(fd, tail.end)
        self.retire(old)

    def attach(self, tail: Tail, path: str, batches: Sequence[NewBatch], now: Moment) -> tuple[Tail, ActiveSegment]:
        """Seal the active segment, and make a file the next one. Synced, as in `roll`.

        The file has room for a segment's header, and after it these batches of a section. Their headers are written
        again here, because they contain the places of the batches in the log. The active segment must have batches.
        The caller must assign both results in one step. Until then a write begins a segment in the file's place.
        """
        header = self._seal(tail, now)
        fd = self._files.open_write(path)
        try:
            active = self._active(fd, tail.end)
            active.began = now.boottime_us
            for batch in batches:
                stamped, following = self._stamp(tail, active, batch, now)
                self._files.write_all(fd, [stamped], active.file_position(tail.end))
                tail = following
            attach_segment(self.place, header, path, fd)
            self._begun(header)
        except BaseException:
            self._files.close(fd)
            raise
        return tail, active

    def _seal(self, tail: Tail, now: Moment) -> SegmentHeader:
        """Make the active segment and the watermark durable; returns the header for the next segment."""
        old = self.active
        old.cut_back(tail)  # an interrupted write may have left bytes
        self.sync(old, tail)
        self.publication.publish(flushed=tail, durable=tail)
        self.publication.sync()
        self.note_producers(tail)
        expiry = self._producer_expiry_us
        since = None if expiry is None else now.wall_us - expiry
        if tail.end == self._begun_segment or not self.believes(now):
            # A repeated roll must write the same again. And a clock that is ahead would forget all producers.
            since = None
        producers = self.producers.snapshot(silent_since_us=since)
        table, more_producers, more_producers_crc = write_producers(self.place, tail.end, producers, self._permissions)
        if more_producers:
            self._with_file.add(tail.end)
        mark = self.mark
        header = SegmentHeader(
            self._identity.log_id, self._identity.partition, self.epoch, tail.end, max(now.wall_us, 0),
            old.base_offset, tail.end - old.base_offset, tail.previous_crc,
            tail.append_time, tail.running_max_timestamp,
            applied_txn=mark.applied_txn, held_txn=mark.held_txn, held_from=mark.held_from,
            applied_id=mark.applied_id, held_id=mark.held_id, txn_store=mark.txn_store,
            writer_nonce=self.nonce, previous_batch_bytes=tail.end - tail.last_batch,
            created_boottime=now.boottime_us, boot_id=now.boot_id,
            more_producers=more_producers, more_producers_crc=more_producers_crc, producers=table,
        )  # fmt: skip
        self._begun_segment = tail.end
        return header

    def _begun(self, header: SegmentHeader) -> None:
        self._index.add(header.base_offset)
        self.stamps.append(Stamp.of(header))
        self.rolled = True

    def retire(self, segment: ActiveSegment) -> None:
        """Close the file of a sealed segment later: a flush may still be syncing it."""
        self._retired.append(segment.fd)

    def close_retired(self) -> None:
        """Close the files of sealed segments. No sync may be running."""
        while self._retired:
            self._files.close(self._retired.pop())

    # --- make durable ------------------------------------------------------------------------------

    def with_others(self, tail: Tail, active: ActiveSegment) -> Tail:
        """The tail, or a later one if other processes have written after it: a sync of the segment reaches that far."""
        mark = self.mark
        if mark.written_end <= tail.end or active.file_position(mark.written_end) > self._files.size(active.fd):
            return tail
        return tail._replace(end=mark.written_end, last_batch=mark.written_tail)

    def sync(self, active: ActiveSegment, tail: Tail) -> None:
        """Make everything before `tail` durable. `WriterFailedError` if the disk refuses; this is final.

        With copies, it is then durable in enough of them, too: `TooFewCopiesError`, which is not final.
        """
        asked = None if self.copies is None else self.copies.ask(active.base_offset, tail)
        try:
            active.sync(durable_end=self._watermark.mark.durable_end, end=tail.end)
        except OSError as error:
            self._poison(error)
        if asked is not None:
            asked.settle()

    # --- failure -----------------------------------------------------------------------------------

    def find_moved(self, *, thorough: bool = False) -> LogMovedError | None:
        """An error if the paths lead to other files, as `ActiveSegment.find_moved` says, else None."""
        return self.active.find_moved(self.place, self._watermark, thorough=thorough)

    def check(self) -> None:
        """Raise the failure that stops writing, if there is one."""
        if isinstance(self.failure, LogMovedError):
            raise self.failure.again()
        if self.failure is not None:
            raise WriterFailedError(self.active.path, self.failure) from self.failure

    def fail(self, moved: LogMovedError) -> NoReturn:
        """Stop writing, because the files are not where readers look. Wakes readers in this process."""
        self.failure = moved.again()
        self.publication.wake()
        raise moved

    def _poison(self, error: OSError) -> NoReturn:
        self.failure = error
        raise WriterFailedError(self.active.path, error) from error

    # --- retention ---------------------------------------------------------------------------------

    def catch_up_start(self, log_start: int) -> None:
        """Drop the segments that another directory of a replicated partition has dropped already."""
        if log_start in self._index.bases():
            self.drop_before(log_start)

    def drop_before(self, base_offset: int) -> list[str]:
        """Drop the sealed segments below `base_offset`, which must be a segment's; returns their paths.

        The new log start is durable before the first file is removed. So a crash leaves files that recovery removes,
        and never a gap.
        """
        dropped, mark = [base for base in self._index.bases() if base < base_offset], self.mark
        last = mark.held_from if mark.held_txn else self.active.base_offset
        if not mark.log_start_offset <= base_offset <= min(last, self.active.base_offset) or not dropped:
            return []  # below the log start: another pass has dropped it already
        self.publication.publish(log_start=base_offset)
        self.publication.sync()
        self.publication.publish()  # into the other slot: if one of them rots, the other has it
        self.publication.sync()  # before a file is removed: a torn write may leave either slot alone
        keep_start_header(self.place, self._identity, base_offset, self._permissions)
        names = [segment_name(base) for base in dropped]
        for name in names + [producers_name(base) for base in dropped if base in self._with_file]:
            with suppress(FileNotFoundError):  # an earlier pass that was interrupted or failed has removed it
                self.place.unlink(name)
        self._with_file.difference_update(dropped)
        self.place.sync()
        self._index.drop_before(base_offset)  # last: after an interrupt, the next pass still finds the remaining files
        return list(map(self.place.path_of, names))

    # --- end ---------------------------------------------------------------------------------------

    def files_to_close(self) -> list[int]:
        """The descriptors of all files, for a caller that closes them with others."""
        retired, self._retired = self._retired, []
        return [*retired, self.active.fd, self._watermark.fileno()]
