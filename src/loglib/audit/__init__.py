"""Audit: records are counted by time window wherever they pass, and the counts are compared.

from loglib import audit

with Topic.open("data/orders", mode="r") as orders, Topic.open("data/_audit", shared=True) as trail:
    audit.Auditor(orders, trail).run()            # in a process of its own: counts what is in the log
report = audit.balance(["a/"], "b/")              # what a/ had, and what arrived in b/
"""

from .auditor import TRAIL, Balance, BalanceReport, balance
from .counter import Auditor, Counter
from .tally import Tally

__all__ = ["TRAIL", "Auditor", "Balance", "BalanceReport", "Counter", "Tally", "balance"]
