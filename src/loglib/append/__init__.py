"""Appending: from records to batches in a partition's files, and when the batches are flushed."""
