"""Replication: copies of a topic, byte for byte: snapshots, mirrors, promotion, and the same over streams."""
