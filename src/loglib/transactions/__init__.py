"""Transactions: records of many partitions, and commits of groups, become visible together."""

from typing import TYPE_CHECKING

from ..config.lazy import lazily

if TYPE_CHECKING:
    from .transaction import Transaction, expire_apps, last_version, recover_transactions

__all__ = ["Transaction", "expire_apps", "last_version", "recover_transactions"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        ".transaction": "Transaction expire_apps last_version recover_transactions",
    },
)
