"""Not copyable: what holds open files, locks or threads is not copied.

Invariant: copying or pickling such an object is refused in words and changes nothing. A copy would share the
original's file descriptors and close them with itself: the original then reads from whatever file gets the
number next.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

__all__ = ["NotCopyable"]


class NotCopyable:
    """A base class: `copy`, `deepcopy` and `pickle` raise `TypeError`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        what = type(self).__name__
        raise TypeError(
            f"a {what} holds open files or locks and cannot be copied or pickled; "
            "pass the path of its topic, and open it there"
        )
