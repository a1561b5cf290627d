"""Consumer groups: members that share a topic's partitions. File locks are the only coordination."""

from ..log.lag import Lag
from .administration import GroupInfo, Move
from .assignment import TopicPartition
from .commit_log import Commit
from .group import Group, TopicsGroup
from .members import Member

__all__ = ["Commit", "Group", "GroupInfo", "Lag", "Member", "Move", "TopicPartition", "TopicsGroup"]
