"""Worker: one measurement in a process of its own, `python worker.py JOB DIRECTORY`.

Invariant: it prints the measurement as one line of JSON, and nothing else on standard output.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from job import Job, Options

if TYPE_CHECKING:
    from measure import Measurement

# Modules are named and not imported, so that a process loads only what it measures.
_KINDS = {
    "write": ("writing", "write"),
    "threads": ("writing", "write_from_threads"),
    "list_append": ("writing", "list_append"),
    "fill": ("writing", "fill"),
    "compress": ("writing", "compress"),
    "write_table": ("tables", "write"),
    "read_columns": ("reading", "read_columns"),
    "read_records": ("reading", "read_records"),
    "read_arrow": ("reading", "read_arrow"),
    "follow": ("following", "follow"),
    "follow_idle": ("following", "follow_idle"),
    "fill_large": ("large_logs", "fill_large"),
    "fill_for_seek": ("large_logs", "fill_for_seek"),
    "seek": ("large_logs", "seek"),
    "memory_append_many": ("large_logs", "memory_append_many"),
    "memory_append": ("large_logs", "memory_append"),
    "memory_values": ("large_logs", "memory_values"),
    "memory_records": ("large_logs", "memory_records"),
    "memory_append_arrow": ("large_logs", "memory_append_arrow"),
    "memory_arrow": ("large_logs", "memory_arrow"),
    "fill_for_archive": ("archives", "fill"),
    "archive": ("archives", "archive"),
    "filter_by_time": ("archives", "filter_by_time"),
    "group_fill": ("groups", "fill"),
    "group_read": ("groups", "read"),
    "group_commit": ("groups", "commit"),
    "group_takeover": ("groups", "takeover"),
    "turns": ("turns", "append"),
    "turn_of_busy": ("turns", "wait_for_busy"),
    "turn_of_idle": ("turns", "wait_for_idle"),
    "jobs": ("job_queues", "work"),
    "log": ("logging_calls", "log"),
    "mirror_cold": ("copying", "mirror_cold"),
    "mirror_behind": ("copying", "mirror_behind"),
    "append_replicated": ("replicas", "append_replicated"),
    "fill_segments": ("opening", "fill_segments"),
    "open": ("opening", "open_log"),
    "open_after_kill": ("opening", "open_after_kill"),
    "import": ("opening", "import_time"),
}


def main(job: Job, directory: Path) -> None:
    """Do the job and print what it measured (`null` if it only prepared files)."""
    module, function = _KINDS[job.kind]
    work = getattr(importlib.import_module(module), function)
    measurement: Measurement | None = work(directory, Options(job.options))
    print(json.dumps(None if measurement is None else asdict(measurement)))


if __name__ == "__main__":
    main(Job.from_json(sys.argv[1]), Path(sys.argv[2]))
