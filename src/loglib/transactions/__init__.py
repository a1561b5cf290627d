"""Transactions: records for many partitions and topics that become visible together, or never."""
