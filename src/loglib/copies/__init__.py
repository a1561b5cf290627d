"""Copies: the same bytes elsewhere: snapshots, mirrors, replicas, and healing from them."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from .credentials import CopyCredentials as CopyCredentials
    from .credentials import SourceCredentials as SourceCredentials
    from .healing import HealedRange as HealedRange
    from .healing import HealReport as HealReport
    from .healing import UnhealedRange as UnhealedRange
    from .healing import heal as heal
    from .mirror_server import MirrorServer as MirrorServer
    from .mirror_server import serve_mirror as serve_mirror
    from .mirrors import Mirror as Mirror
    from .mirrors import MirrorLag as MirrorLag
    from .mirrors import MirrorReport as MirrorReport
    from .mirrors import mirror as mirror
    from .mirrors import receive_mirror as receive_mirror
    from .promotion import promote as promote
    from .replica import ReplicaState as ReplicaState
    from .scrub import Scrub as Scrub
    from .scrub import ScrubReport as ScrubReport
    from .snapshots import Snapshot as Snapshot
    from .snapshots import snapshot as snapshot

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".credentials": "CopyCredentials SourceCredentials",
        ".healing": "HealReport HealedRange UnhealedRange heal",
        ".mirror_server": "MirrorServer serve_mirror",
        ".mirrors": "Mirror MirrorLag MirrorReport mirror receive_mirror",
        ".promotion": "promote",
        ".replica": "ReplicaState",
        ".scrub": "Scrub ScrubReport",
        ".snapshots": "Snapshot snapshot",
    },
)
