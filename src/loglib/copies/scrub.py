"""Scrub: a topic is read and checked at a limited rate, so that damage is found while other copies can heal it.

Invariant: a scrub without donors changes nothing. With donors it heals like `heal`, and only the partitions in which it
has found damage.

Threads: `close` from any thread. `run` from one at a time; `start` makes a thread for it, which ends with `close`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

from ..config.arguments import donor_paths, topic_path
from ..errors import CorruptLogError, LogClosedError, LogError
from ..log import topic_file
from ..log.care import verify_partition
from ..log.recovery import list_segments
from ..log.verify import VerifyReport, verify_description
from ..segment import HEADER_BYTES, Identity
from ..system.files import REAL, Files
from ..system.not_copyable import NotCopyable
from .healing import HealReport, heal_topic
from .rate_limit import RateLimit

logger = logging.getLogger("loglib")


class ScrubReport(NamedTuple):
    """The result of one pass of a scrub."""

    path: str  # of the topic
    found: VerifyReport  # before the healing
    healing: HealReport | None  # None if there was no damage, or no donors

    @property
    def is_whole(self) -> bool:
        """True if nothing is damaged now, and nothing is declared as lost except what was accepted."""
        return (self.found if self.healing is None else self.healing.verified).is_whole


class Scrub(NotCopyable):
    """Reads and checks all of a topic at a limited rate: every header, batch and link.

    `run` makes one pass. `start` makes a thread that makes a pass every `every`, until `close`. Each pass logs its
    findings, and calls `on_report` with its `ScrubReport`.

    With `donors`, the directories of other copies of the topic, damage is healed from them, as by `heal`.
    Without them the scrub only reads, and may run in any process. `bytes_per_second` limits how fast it reads, in bytes
    of log; None means no limit.

    Raises `FileNotFoundError` if there is no topic, and `ValueError` for a rate that is not above 0.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, bytes_per_second: float | None = None,
        donors: Iterable[str | os.PathLike[str]] = (), on_report: Callable[[ScrubReport], object] | None = None,
        files: Files = REAL,
    ) -> None:  # fmt: skip
        self.path = topic_path(path)
        self._files = files
        self._donors = donor_paths(donors, self.path)
        self._on_report = on_report
        self._closing = threading.Event()
        self._limit = RateLimit(bytes_per_second, self._closing)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Scrub:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Scrub of {self.path!r}>"

    # --- a pass ------------------------------------------------------------------------------------------

    def run(self, *, progress: Callable[[int, int], object] | None = None) -> ScrubReport:
        """Make one pass in this thread.

        `progress` is called after each block with two numbers of bytes: those that are checked, and all of them; and in
        the same way while the topic is healed.

        Raises `LogClosedError` if `close` is called meanwhile, `FileNotFoundError` if there is no topic,
        `CorruptLogError` if `topic.json` is damaged and no donor has it, and `StorageIOError` if the disk fails.
        """
        self._check_open()
        damaged: list[int] | None = None  # all partitions
        try:
            found, damaged = self._verify(progress)
        except CorruptLogError as error:
            if not self._donors:
                raise
            found = VerifyReport.of_error(error, None)
        healing = None
        if self._donors and not found.is_whole:
            healing = heal_topic(self._files, self.path, self._donors, only=damaged, progress=self._paced(progress))
        report = ScrubReport(self.path, found, healing)
        _log(report)
        if self._on_report is not None:
            self._on_report(report)
        return report

    def _verify(self, progress: Callable[[int, int], object] | None) -> tuple[VerifyReport, list[int]]:
        """Verify the topic, and list the partitions with damage or gaps. `CorruptLogError` for `topic.json`."""
        if not self._files.exists(self.path):
            raise FileNotFoundError(errno.ENOENT, "no topic here", self.path)
        log_id, config = topic_file.read_existing(self._files, self.path)
        reports, damaged = [verify_description(self._files, self.path, log_id)], []
        sizes = [0 if progress is None else self._size_of(number) for number in range(config.partitions)]
        for number in range(config.partitions):
            paced = self._paced(progress, before=sum(sizes[:number]), total=sum(sizes))
            report = verify_partition(self._files, self.path, Identity.of(log_id, number), paced)
            reports.append(report)
            if not report.is_whole:
                damaged.append(number)
        return VerifyReport.of_all(reports), damaged

    def _size_of(self, number: int) -> int:
        """About the bytes of a partition's batches; 0 if damage hides them."""
        try:
            sizes = list_segments(self._files, topic_file.partition_directory(self.path, number))
        except LogError:
            return 0
        return sum(size - HEADER_BYTES for size in sizes.values())

    def _paced(
        self, progress: Callable[[int, int], object] | None, *, before: int = 0, total: int | None = None
    ) -> Callable[..., None]:
        """Return a function that waits as the limit says, given the bytes read so far. It raises after `close`.

        It reports to `progress` the bytes read, with those `before`, and the `total`; without one, that of its caller.
        """
        last = 0

        def advance(done: int, whole: int = 0) -> None:
            nonlocal last
            self._limit.wait(max(0, done - last))
            last = done
            self._check_open()
            if progress is not None:
                progress(before + done, max(before + done, whole if total is None else total))

        return advance

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise LogClosedError(f"the scrub of {self.path} is closed; make another one")

    # --- in the background ---------------------------------------------------------------------------------

    def start(self, every: timedelta = timedelta(days=1)) -> None:
        """Make a pass now and then a pass each time `every` has gone by after the last one, in a thread.

        If a pass fails, the error is logged, and the next pass is made in its time. `close` ends the thread.
        """
        self._check_open()
        if self._thread is not None:
            raise LogError(f"a scrub of {self.path} is running already")
        pause_s = every.total_seconds()
        thread = threading.Thread(target=self._run_each, args=(pause_s,), name="loglib-scrub", daemon=True)
        self._thread = thread
        thread.start()

    def _run_each(self, pause_s: float) -> None:
        while not self._closing.is_set():
            try:
                self.run()
            except LogClosedError:
                return
            except Exception:  # of the callback, too
                logger.exception("%s: a pass of the scrub has failed", self.path)
            self._closing.wait(pause_s)

    def close(self) -> None:
        """End a running pass, and the thread, if there is one. A healing that has begun is finished first."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _log(report: ScrubReport) -> None:
    found, healing = report.found, report.healing
    if not found.damage and not found.gaps:
        logger.info("%s: scrubbed %d batches, %d bytes: no damage", report.path, found.batches, found.bytes)
        return
    for damage in (*found.damage, *found.gaps):
        logger.log(logging.INFO if damage in found.accepted else logging.WARNING, "%s", damage)
    if healing is not None:
        for each in (*healing.healed, *healing.unhealed):
            logger.warning("%s", each)
