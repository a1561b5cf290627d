"""Log: one partition's segments as one range of offsets: finding, reading, checking, repairing."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from .catalog import TopicInfo as TopicInfo
    from .cursor import BorrowedRange as BorrowedRange
    from .reader import OnDamage as OnDamage
    from .reader import Reader as Reader
    from .reader import StartLike as StartLike
    from .recovery import Recovery as Recovery
    from .repair import Repair as Repair
    from .repair import RepairReport as RepairReport
    from .verify import VerifyReport as VerifyReport

__getattr__, __dir__, __all__ = lazily(
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
