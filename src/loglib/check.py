"""Check: reading a whole partition and believing nothing.

Invariant: a check changes nothing, and passes only if every segment's header, every batch header
and body, every column's bounds and every link between them is as it was written.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from .errors import CorruptLogError, OffsetOutOfRangeError
from .log import Cursor, Log
from .recovery import list_segments, load_headers
from .segment import HEADER_BYTES, segment_name
from .watermark import Mark

__all__ = ["CheckReport", "check_log"]


class CheckReport(NamedTuple):
    """What a check has seen, all of it good."""

    segments: int
    batches: int
    records: int
    bytes: int


def check_log(log: Log) -> CheckReport:
    """Verify everything below the flushed end; raises `CorruptLogError` at the first fault."""
    while True:
        mark = log.mark()
        try:
            return _check(log, mark)
        except (FileNotFoundError, OffsetOutOfRangeError, CorruptLogError) as error:
            if log.mark().log_start_offset != mark.log_start_offset:
                continue  # retention came between: what there is now is to be checked
            if isinstance(error, CorruptLogError):
                raise
            found = f"no file ({error})"
            raise CorruptLogError(log.directory, 0, found, "all segments from the log start") from error


def _check(log: Log, mark: Mark) -> CheckReport:
    found = {b: size for b, size in list_segments(log.files, log.directory).items() if b >= mark.log_start_offset}
    headers = load_headers(log.files, log.directory, found, log.identity)
    if not headers or min(headers) != mark.log_start_offset:
        first = min(headers, default=None)
        raise CorruptLogError(log.directory, 0, f"a first segment at {first}", f"one at {mark.log_start_offset}")
    batches = records = 0
    first_header = headers[mark.log_start_offset]
    previous_crc, append_time = first_header.previous_crc, first_header.last_append_time
    running_max = first_header.running_max_timestamp
    cursor = Cursor(log, mark.log_start_offset)
    try:
        while block := cursor.read(mark.flushed_end):
            for batch in block:
                header = batch.header
                running_max = max(running_max, header.max_timestamp)
                facts = (header.previous_crc, header.running_max_timestamp, max(batch.timestamps))
                expected = (previous_crc, running_max, header.max_timestamp)
                if facts != expected or header.append_time < append_time:
                    raise _broken_link(log, header.base_offset, f"{facts}", f"{expected}")
                previous_crc, append_time = header.header_crc, header.append_time
                batches += 1
                records += len(batch.records())
    finally:
        cursor.close()
    return CheckReport(len(headers), batches, records, mark.flushed_end - mark.log_start_offset)


def _broken_link(log: Log, offset: int, found: str, expected: str) -> CorruptLogError:
    base = log.index.find(offset) or 0
    path = os.path.join(log.directory, segment_name(base))
    what = "previous CRC, running maximum and maximum"
    return CorruptLogError(path, HEADER_BYTES + offset - base, f"{what} {found}", expected)
