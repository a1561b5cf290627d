"""Paper, loglib with durability="disk", its default: a flush returns after fdatasync.

Invariant: everything else is as in paper_loglib.py.
"""

from __future__ import annotations

import paper_loglib
from paper_loglib import consume
from paper_roles import Way, Work

__all__ = ["consume", "producer"]


def producer(work: Work) -> Way:
    """A producer whose acknowledged messages are on the disk."""
    return paper_loglib.producer(work, "disk")
