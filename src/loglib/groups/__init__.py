"""Consumer groups: members that share a topic's partitions. File locks are the only coordination."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from ..log.lag import Lag as Lag
    from .administration import GroupInfo as GroupInfo
    from .administration import OffsetMove as OffsetMove
    from .assignment import TopicPartition as TopicPartition
    from .commit_log import Commit as Commit
    from .group import Group as Group
    from .group import TopicsGroup as TopicsGroup
    from .members import Member as Member
    from .several_topics import delete_group as delete_group
    from .several_topics import evict_member as evict_member
    from .several_topics import group_info as group_info
    from .several_topics import reset_group as reset_group

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "..log.lag": "Lag",
        ".administration": "GroupInfo OffsetMove",
        ".assignment": "TopicPartition",
        ".commit_log": "Commit",
        ".group": "Group TopicsGroup",
        ".members": "Member",
        ".several_topics": "delete_group evict_member group_info reset_group",
    },
)
