"""Offload: sealed segments as files of an archive, or unchanged in an object store or another directory."""
