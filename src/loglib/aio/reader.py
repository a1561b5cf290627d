"""AsyncReader: a reader in an event loop.

Invariant: a cancelled task loses no record: records that a thread has read for it stay in the reader, and the next step
returns them. A step returns its record without an `await`, so no record is returned twice.

Blocks of batches are read from disk in the loop's pool of threads. Taking records out of a block, and waiting, need no
thread: the loop's watcher sets an event.

A reader belongs to one task at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Self

from ..config.quantities import Duration, timeout_seconds
from ..format.batch import Batch
from ..format.record import Damage, Record
from ..log.reader import Reader, StartLike
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from .calls import Calls
from .watcher import Watch, watch


class AsyncReader(NotCopyable):
    """Reads records of one partition or of several, up to an end or for ever. `async for` gives the records."""

    def __init__(self, reader: Reader, *, timeout: Duration | None = None) -> None:
        """`AsyncTopic.read` and `AsyncTopic.follow` make it. `timeout` is that of `follow`."""
        self._timeout = timeout_seconds(timeout)
        self._reader = reader
        self._calls = Calls()
        self._watch: Watch | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if (watched := getattr(self, "_watch", None)) is not None:
            watched.close_soon()  # garbage collection may run in any thread

    def __aiter__(self) -> AsyncIterator[Record]:
        return self

    async def __anext__(self) -> Record:
        reader = self._reader
        for record in reader._unread:  # an iterator: the next step takes the next record
            return record
        if await self._wait_for(batches=False):
            for record in reader._unread:
                return record
        self._end()
        raise StopAsyncIteration

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Iterate over batches (whole columns). A partly read batch yields its remaining records."""
        reader = self._reader
        while await self._wait_for(batches=True):
            batch = reader._pieces[0]
            assert isinstance(batch, Batch)  # `_first_batch` has replaced a bundle by its batches
            yield reader._take_batch(batch)
        self._end()

    @property
    def gaps(self) -> list[Damage]:
        """The damage that was skipped, with on_damage="skip"."""
        return self._reader.gaps

    @property
    def closed(self) -> bool:
        """True if the reader is closed, by `close` or with its topic."""
        return self._reader.closed

    def tell(self) -> dict[int, int]:
        """The offset of the next record for each partition."""
        return self._reader.tell()

    async def seek(self, start: StartLike) -> None:
        """Continue at `start`, as in `Reader.seek`."""
        await self._calls(self._reader.seek, start)

    async def lag_bytes(self) -> Mapping[int, int]:
        """The bytes of log between the position and the flushed end, for each partition."""
        return await self._calls(self._reader.lag_bytes)

    def close(self) -> None:
        """End the iteration, also one that waits in another task."""
        self._reader.close()
        self.wake()

    def wake(self) -> None:
        """Let a waiting iteration check again, for example because the topic was closed."""
        if self._watch is not None:
            self._watch.set()

    async def _wait_for(self, *, batches: bool) -> bool:
        """Wait until a record, or with `batches` a batch, can be taken. False at the end or after the timeout."""
        reader = self._reader
        deadline = None if self._timeout is None else monotonic() + self._timeout
        while True:
            if self._watch is not None:
                self._watch.clear()
                if self._watch.replaced:
                    self._watch.replaced = False
                    await self._calls(reader._check_moved)
            if await self._calls(reader._next_batch if batches else reader._has_records, 0.0):
                return True
            if reader.closed or not reader._follow:
                return False
            if self._watch is None or not self._watch.fits(reader):
                if self._watch is not None:
                    self._watch.close()
                self._watch = watch(reader)
                continue  # records from before the watch are not reported
            remaining = None if deadline is None else deadline - monotonic()
            if remaining is not None and remaining <= 0:
                return False
            await self._watch.wait(remaining)

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._reader._check_not_cut_short()
