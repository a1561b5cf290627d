"""Work ahead: a thread that makes the next results while its owner uses those before, as a call that writes does.

Invariant: results are taken in the order in which pieces were given. An error of the work is raised where its result
would be taken. The thread ends with `stop`, which waits for it.

Threads: the methods belong to one thread. The work runs in the other thread, so it must call nothing of the
application.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

from ..system.not_copyable import NotCopyable

Given = TypeVar("Given")
Made = TypeVar("Made")


class WorkAhead(NotCopyable, Generic[Given, Made]):
    """A thread that makes several results from each piece that it is given."""

    def __init__(self, work: Callable[[Given], Iterator[Made]]) -> None:
        self._work = work
        self._given: SimpleQueue[tuple[Given] | None] = SimpleQueue()
        self._made: SimpleQueue[tuple[Made] | BaseException | None] = SimpleQueue()  # None: the end of a piece
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="loglib-encode", daemon=True)
        self._thread.start()

    def give(self, piece: Given) -> None:
        """Let the thread work on this piece, after the pieces before it."""
        self._given.put((piece,))

    def take(self) -> Iterator[Made]:
        """The results of the oldest piece whose results were not taken yet."""
        while (made := self._made.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            yield made[0]

    def stop(self) -> None:
        """End the thread after its present result."""
        self._stopped = True
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            try:
                for made in self._work(*given):
                    if self._stopped:
                        return
                    self._made.put((made,))
                self._made.put(None)
            except BaseException as error:  # noqa: BLE001  `take` raises it.
                self._made.put(error)
