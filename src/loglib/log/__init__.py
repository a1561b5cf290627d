"""Log: one partition's segments as one range of offsets: finding, reading, checking, repairing."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:
    from .catalog import TopicInfo
    from .cursor import BorrowedRange
    from .reader import OnDamage, Reader, StartLike
    from .recovery import Recovery
    from .repair import Repair, RepairReport
    from .verify import VerifyReport

__all__ = [
    "BorrowedRange",
    "OnDamage",
    "Reader",
    "Recovery",
    "Repair",
    "RepairReport",
    "StartLike",
    "TopicInfo",
    "VerifyReport",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        ".catalog": "TopicInfo",
        ".cursor": "BorrowedRange",
        ".reader": "OnDamage Reader StartLike",
        ".recovery": "Recovery",
        ".repair": "Repair RepairReport",
        ".verify": "VerifyReport",
    },
)
