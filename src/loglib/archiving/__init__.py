"""Archiving: sealed segments as Parquet, and reading them back beside the log."""
