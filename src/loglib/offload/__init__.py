"""Tiering: sealed segments as they are in an object store or another directory, and topics that are read from there."""
