"""The on-disk format: what the bytes of batches and watermarks mean (docs/format.md)."""
