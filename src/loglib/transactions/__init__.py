"""Transactions: records of many partitions, and commits of groups, become visible together."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:  # "as" makes a name public for type checkers
    from .redriving import RedriveReport as RedriveReport
    from .redriving import redrive as redrive
    from .transaction import Transaction as Transaction
    from .transaction import expire_apps as expire_apps
    from .transaction import last_version as last_version
    from .transaction import recover_transactions as recover_transactions

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        ".redriving": "RedriveReport redrive",
        ".transaction": "Transaction expire_apps last_version recover_transactions",
    },
)
