"""Audit: records are counted by time window in several places, and the counts are compared.

from loglib import audit

with Topic.open("data/orders", mode="r") as orders, Topic.open("data/_audit", shared=True) as trail:
    audit.Auditor(orders, trail).run()            # in a process of its own: counts the records of the log
report = audit.balance(["a/"], "b/")              # compares the records of a/ with those of b/
"""

from .auditor import TRAIL, Balance, BalanceReport, balance
from .counter import Auditor, Counter
from .tally import Tally

__all__ = ["TRAIL", "Auditor", "Balance", "BalanceReport", "Counter", "Tally", "balance"]
