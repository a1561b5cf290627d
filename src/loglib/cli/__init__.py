"""The command line: `loglib` and `python -m loglib`."""
