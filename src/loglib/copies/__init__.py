"""Copies: the same bytes elsewhere: snapshots, mirrors, replicas, and healing from them."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:
    from .credentials import CopyCredentials, SourceCredentials
    from .heal_log import HealedRange, UnhealedRange
    from .healing import HealReport, heal
    from .mirror_server import MirrorServer, serve_mirror
    from .mirrors import Mirror, MirrorLag, MirrorReport, mirror, receive_mirror
    from .promotion import promote
    from .replica import ReplicaState
    from .scrub import Scrub, ScrubReport
    from .snapshots import Snapshot, snapshot

__all__ = [
    "CopyCredentials",
    "HealReport",
    "HealedRange",
    "Mirror",
    "MirrorLag",
    "MirrorReport",
    "MirrorServer",
    "ReplicaState",
    "Scrub",
    "ScrubReport",
    "Snapshot",
    "SourceCredentials",
    "UnhealedRange",
    "heal",
    "mirror",
    "promote",
    "receive_mirror",
    "serve_mirror",
    "snapshot",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        ".credentials": "CopyCredentials SourceCredentials",
        ".heal_log": "HealedRange UnhealedRange",
        ".healing": "HealReport heal",
        ".mirror_server": "MirrorServer serve_mirror",
        ".mirrors": "Mirror MirrorLag MirrorReport mirror receive_mirror",
        ".promotion": "promote",
        ".replica": "ReplicaState",
        ".scrub": "Scrub ScrubReport",
        ".snapshots": "Snapshot snapshot",
    },
)
