"""Jobs: the members of a share take, settle and repeat single records of a topic. One file is the only coordination."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from .administration import InHandInfo as InHandInfo
    from .administration import ShareInfo as ShareInfo
    from .administration import SharePartition as SharePartition
    from .delays import not_before as not_before
    from .job import Job as Job
    from .job import JobBatch as JobBatch
    from .job import Reject as Reject
    from .members import Member as Member
    from .several_topics import TopicsShare as TopicsShare
    from .share import Share as Share
    from .state import Counts as Counts
    from .state import Settings as Settings

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".administration": "InHandInfo ShareInfo SharePartition",
        ".delays": "not_before",
        ".job": "Job JobBatch Reject",
        ".members": "Member",
        ".several_topics": "TopicsShare",
        ".share": "Share",
        ".state": "Counts Settings",
    },
)
