"""The operating system: files, locks, clocks, waiting, and taking turns. Nothing else in loglib calls it."""
