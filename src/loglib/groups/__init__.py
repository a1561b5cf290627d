"""Consumer groups: members that share a topic's partitions. File locks are the only coordination."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily
from ..log.lag import Lag
from .administration import GroupInfo, OffsetMove
from .assignment import TopicPartition
from .commit_log import Commit
from .group import Group, TopicsGroup
from .members import Member

if TYPE_CHECKING:  # built on the open topic, which is built on groups
    from .several_topics import delete_group, evict_member, group_info, reset_group

__all__ = [
    "Commit",
    "Group",
    "GroupInfo",
    "Lag",
    "Member",
    "OffsetMove",
    "TopicPartition",
    "TopicsGroup",
    "delete_group",
    "evict_member",
    "group_info",
    "reset_group",
]

__getattr__, __dir__ = lazily(__name__, {".several_topics": "delete_group evict_member group_info reset_group"})
