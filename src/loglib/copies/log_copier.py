"""Log copier: brings the copy of one log up to its source.

Invariant: the copy is a prefix of the log, byte for byte. If the source turns out to have another history (a power cut
has taken its end, or a backup was put in place), the copy goes back to the last batch that both have. If that batch is
gone, `restart` lets the copy begin again. Records that the source does not have are set aside first.

Threads: one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from ..errors import CorruptLogError, OffsetOutOfRangeError
from ..format.chain import End
from ..format.watermark import NAME as WATERMARK
from ..format.watermark import Mark
from ..log import gaps
from ..log.ages import NAME as CLOCK
from ..log.pending_marks import held as held_together
from ..segment import Identity
from ..system.files import Files
from ..system.lock import Lock
from ..system.not_copyable import NotCopyable
from .follower_log import FollowerLog, make_follower_log
from .local_source import own_mark
from .sources import LogSource, SegmentStart

logger = logging.getLogger("loglib")

SYNC_BYTES = 32 << 20  # of the log: a long copy is synced and published in parts of this size
_COMPARED_AT_ONCE = 1000  # ends of batches in one question to the source


class LogCopier(NotCopyable):
    """One log, and its copy in the directory `to`. It is made if there is none; see `FollowerLog` for the rest."""

    def __init__(
        self, files: Files, source: LogSource, to: str, identity: Identity, permissions: int,
        *, promised: Mark | None = None, held: Lock | None = None, shows: bool = True,
    ) -> None:  # fmt: skip
        self._files = files
        self._permissions = permissions
        self._seen = (-1, -1)  # the writer of the source's mark when the histories were last compared
        self._carried: dict[str, bytes] = {}
        self.set_aside: list[str] = []  # files that keep records which the source does not have
        self.source = source
        try:
            if not files.exists(to):
                begun = source.first()
                make_follower_log(files, to, begun.header, begun.more_producers, identity, permissions)
            self.copied = FollowerLog(
                files, to, identity, permissions, promised=promised, held=held, shows=shows, keeps_held=True
            )  # fmt: skip
        except BaseException:
            self.source.close()
            raise
        self._acknowledged = self.copied.synced.end

    def close(self) -> None:
        self.source.close()
        self.copied.close()

    def detach_lock(self) -> None:
        """Close all files. The caller holds the lock from now on."""
        self.source.close()
        self.copied.release_files()

    def release_files(self) -> None:
        """Close files until their next use."""
        self.source.release_files()
        self.copied.release_files()

    @property
    def lag_bytes(self) -> int:
        """Bytes that readers of the source see and that are not yet published in the copy."""
        return max(0, self.source.published_end - self.copied.mark.flushed_end)

    def is_ahead_of(self, target: Mark) -> bool:
        """True if the copy has more than the mark `target`, and the source has that, too.

        This happens when the transaction store cannot be read: finished transactions are then not counted. Or the
        source's watermark was set back, and its writer will find the rest.
        """
        shown = self.copied.mark.flushed_end
        if target.flushed_end >= shown:
            return False
        return shown <= self.source.published_end or bool(self.source.same([self.copied.end], target))

    def turn_to(self, source: LogSource) -> None:
        """Copy from another directory from now on."""
        before, self.source = self.source, source
        before.close()
        self._seen = (-1, -1)

    def advance(
        self, target: Mark, pace: Callable[[int], object], *, restart: bool = False, acknowledged: int | None = None
    ) -> int:
        """Copy up to the source's mark `target`; returns the bytes that were written. They are synced, not published.

        `pace` is called with the size of each piece that was copied. If retention at the source has overtaken the
        copy, it raises `OffsetOutOfRangeError`; if no batch is left that both have, `CorruptLogError`. With `restart`
        the copy begins again at the source's log start instead. In a long copy, parts are published; with
        `acknowledged` only those below this offset, and the copy does not accept the source's writer yet.
        """
        before, unsynced = self.copied.end.end, 0
        writer = target.writer_epoch, target.writer_nonce
        is_empty = before == self.copied.bases[-1] and before < target.flushed_end
        if writer != self._seen or is_empty or not target.log_start_offset <= before <= target.flushed_end:
            before = self._join(target, restart=restart)
            self._seen = writer
            self.source.acknowledge(min(before, self.copied.synced.end))
        self._acknowledged = before
        written, failed_at = -before, -1
        while self.copied.end.end < target.flushed_end:
            try:
                size = self._step(target)
            except CorruptLogError:
                end, last = self.copied.end.end, self.copied.bases[-1]
                written += end
                self._join(target, restart=restart)
                same = (self.copied.end.end, self.copied.bases[-1]) == (end, last)
                if same or end == failed_at:  # it is the same history, and the source is damaged
                    raise
                failed_at = end
                self._acknowledged = self.copied.end.end
                written -= self._acknowledged
                continue
            pace(size)
            unsynced += size
            if unsynced >= SYNC_BYTES and self.copied.end.crc is not None:
                self.copied.sync_soon()
                self._acknowledge()
                self._publish_part(target, acknowledged)
                unsynced = 0
            if self.copied.end.end - self._acknowledged >= self.source.credit_bytes:  # the source may be waiting
                self.copied.sync()
                self._acknowledge()
        self.copied.sync()
        self._acknowledge()
        self._seal(target)
        return written + self.copied.end.end

    def _seal(self, target: Mark) -> None:
        """Begin the empty segment that the source has after `target`, if it has one, so that both logs end alike."""
        end, _, crc = self.copied.end
        if end == target.flushed_end and end != self.copied.bases[-1] and self.source.begins(end):
            begun = self.source.begun(end)
            if crc in (None, begun.header.previous_crc):  # if not, the next pass finds another history
                self.begin(begun)

    def begin(self, begun: SegmentStart) -> None:
        """Begin the segment that follows the end of the copy, with the source's clock. Synced, also all before it."""
        self._keep(CLOCK, begun.clock)
        self.copied.begin(begun.header, begun.more_producers)

    def _acknowledge(self) -> None:
        """Acknowledge the durable end of the copy."""
        if self._acknowledged != self.copied.synced.end:
            self._acknowledged = self.copied.synced.end
            self.source.acknowledge(self._acknowledged)

    def _step(self, target: Mark) -> int:
        """Copy the next piece; returns its size."""
        copied = self.copied
        piece = self.source.piece(copied.end, copied.bases[-1], target.flushed_end)
        if isinstance(piece, SegmentStart):
            self.begin(piece)
            return 0
        if piece.end.crc is None:
            self.carry(gaps.NAME)
        copied.append(piece.content, piece.end)
        return len(piece.content)

    def carry(self, name: str) -> None:
        """Copy a small file of the log, if it has changed at the source since the last time. Synced."""
        content = self.source.beside(name)
        if name == gaps.NAME and content is not None and self._carried.get(name) != content:
            content = self._with_own_gaps(content)
        self._keep(name, content)

    def _with_own_gaps(self, content: bytes) -> bytes:
        """Add the gaps that only the copy has to those of the source, whose file is given: it may be healed by now."""
        files, copied = self._files, self.copied
        own: Sequence[gaps.Gap] = ()
        with suppress(CorruptLogError):  # its file is damaged: it is replaced by the source's
            own = gaps.read_gaps(files, copied.path, copied.identity)
        theirs = gaps.parse_gaps(content, f"{self.source.place}/{gaps.NAME}", copied.identity)
        still = [gap for gap in own if not copied.is_whole(gap.start, gap.end)]
        together = gaps.joined([*theirs, *still])
        return content if together == list(theirs) else gaps.encode_gaps(copied.identity, together)

    def _keep(self, name: str, content: bytes | None) -> None:
        if content is not None and self._carried.get(name) != content:
            self.copied.place.replace(name, content, self._permissions)
            self._carried[name] = content

    def _publish_part(self, target: Mark, acknowledged: int | None) -> None:
        """Publish the synced part of the copy, on the way to `target`."""
        end, mark = self.copied.synced, self.copied.mark
        if target.applied_txn > mark.applied_txn:  # other partitions may not have the transaction yet
            self.copied.publish(held_together(mark, end.end, end.last_batch))
            return
        if acknowledged is None:
            mark = mark.with_writer(target.writer_epoch, target.writer_nonce)
        elif not mark.flushed_end <= end.end <= acknowledged:
            return
        self.copied.publish(mark.durable_to(end.end, end.last_batch))

    def next_mark(self, target: Mark) -> Mark:
        """The mark of the copy when it has come to `target`; its sequence is that of the next publication."""
        own = self.copied.mark
        return own_mark(target)._replace(sequence=own.sequence + 1, log_start_offset=own.log_start_offset)

    def hold(self, target: Mark) -> None:
        """Record that the copy has all up to `target`. Readers see it when the pending marks are written. Synced."""
        self.copied.publish(held_together(self.copied.mark, target.flushed_end, target.flushed_tail))
        self.copied.sync_mark()

    def publish(self, target: Mark, *, twice: bool = False) -> None:
        """Let readers of the copy see up to the source's mark `target`, to which it was advanced.

        `twice`: in both slots, synced. Then damage of one slot hides nothing that was published.
        """
        if twice:
            self.copied.rest_at(self.next_mark(target))
        else:
            self.copied.publish(self.next_mark(target))

    def retire(self, target: Mark) -> None:
        """Drop the segments that the source has dropped at its mark `target`."""
        start = target.log_start_offset
        if start > self.copied.mark.log_start_offset and target.sequence:
            if start == self.copied.end.end != self.copied.bases[-1]:  # all of them
                self.begin(self.source.begun(start))
            if start not in self.copied.bases:
                found = f"a log that begins at offset {start}"
                raise CorruptLogError(self.source.place, 0, found, "one that begins where a segment does")
            self.copied.drop_before(start)

    # --- another history ---------------------------------------------------------------------------------

    def give_up(self, target: Mark, *, restart: bool) -> None:
        """Set aside records that the source does not have. This was a topic of its own. `restart` as in `advance`."""
        if not self.is_ahead_of(target):
            self._join(target, restart=restart, written_here=True)

    def _join(self, target: Mark, *, restart: bool, written_here: bool = False) -> int:
        """Cut the copy where the logs begin to differ; returns its end."""
        copied = self.copied
        if copied.end.end < target.log_start_offset:
            if not target.sequence:
                raise self._doubtful(copied.end.end)
            if not restart:
                raise OffsetOutOfRangeError(
                    copied.identity.partition, copied.end.end, target.log_start_offset, target.flushed_end
                )
            if written_here:
                return self._set_all_aside(target)
            logger.warning(
                "%s: retention at its source has overtaken it; it begins again at offset %d, without [%d, %d)",
                copied.path, target.log_start_offset, copied.end.end, target.log_start_offset,
            )  # fmt: skip
            return self._begin_again(target)
        is_empty, begins_later = copied.end.end == copied.bases[0], copied.bases[0] > target.log_start_offset
        if is_empty and (begins_later or not self._join_last()):  # no batch could be compared, or lost
            return self._begin_again(target)
        common = self._common_end(target)
        if common == copied.end and self._join_last():
            return common.end
        if common is None or common.end < copied.mark.log_start_offset:
            if not target.sequence or not restart:
                raise CorruptLogError(
                    copied.path, 0, "no batch that the source has",
                    f'a copy of {self.source.place}; a mirror with on_divergence="restart" sets this aside and '
                    "begins again",
                )  # fmt: skip
            return self._set_all_aside(target)
        mark, (end, last, _) = copied.mark, common
        if end < mark.flushed_end:
            if not target.sequence:
                raise self._doubtful(end)
            mark = mark.durable_to(end, last)
        kept = copied.cut(common, mark)
        self._join_last()
        self.set_aside += kept
        if not kept:  # only an empty segment was removed
            return common.end
        logger.warning(
            "%s: its source %s does not have the offsets from %d on; they are set aside in %s",
            copied.path, self.source.place, common.end, ", ".join(kept),
        )  # fmt: skip
        return common.end

    def _doubtful(self, end: int) -> CorruptLogError:
        """The error for a source without a watermark that lacks records of the copy: they were dropped or lost."""
        return CorruptLogError(
            f"{self.source.place}/{WATERMARK}", 0,
            f"no whole watermark, and not what {self.copied.path} has from offset {end} on",
            "both; the copy keeps it. Open the source for writing, or run `loglib repair`, and copy again",
        )  # fmt: skip

    def _common_end(self, target: Mark) -> End | None:
        """The largest end of the copy up to which the source is the same; None if they have nothing in common."""
        copied, same = self.copied, self.source.same
        if same([copied.end], target):
            return copied.end
        for base in reversed(copied.bases):
            header = copied.header(base)
            end = header.chain_end
            if base < target.log_start_offset:  # the source has dropped what would have to be compared
                return None
            if same([end], target):
                ends = map(End.after, copied.headers(base))
                while some := list(islice(ends, _COMPARED_AT_ONCE)):
                    count = same(some, target)
                    end = (end, *some)[count]
                    if count < len(some):
                        break
                return end
        return None

    def _join_last(self) -> bool:
        """If the copy's last segment has no batches, give it the source's header. False if no segment begins there."""
        copied = self.copied
        if copied.end.end == copied.bases[-1]:
            try:
                begun = self.source.begun(copied.end.end)
            except CorruptLogError:
                return False
            copied.replace_last(begun.header, begun.more_producers)
        return True

    def _set_all_aside(self, target: Mark) -> int:
        """Set all records of the copy aside, and let it begin at the present log start of the source."""
        kept = self.copied.cut_all()
        self.set_aside += kept
        logger.warning(
            "%s: no batch is left that its source %s has; it begins again at offset %d, and is set aside in %s",
            self.copied.path, self.source.place, target.log_start_offset, ", ".join(kept),
        )  # fmt: skip
        return self._begin_again(target)

    def _begin_again(self, target: Mark) -> int:
        """Let the copy begin at the present log start of the source."""
        begun = self.source.begun(target.log_start_offset)
        self.copied.restart(begun.header, begun.more_producers)
        return target.log_start_offset
