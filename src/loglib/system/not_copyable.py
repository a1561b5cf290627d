"""Not copyable: objects that hold open files, locks or threads are not copied.

Invariant: copying or pickling such an object raises an error and changes nothing. A copy would share the
original's file descriptors and close them with itself. The original would then read from another file, which
the system has given the same number.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class NotCopyable:
    """A base class: `copy`, `deepcopy` and `pickle` raise `TypeError`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        what = type(self).__name__
        raise TypeError(
            f"a {what} holds open files or locks and cannot be copied or pickled; "
            "pass the path of its topic, and open it there"
        )
