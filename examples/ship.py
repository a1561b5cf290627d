"""Ship: deliver the records of a topic to an HTTP endpoint, or to files, as a consumer group does.

    python examples/ship.py data/app http://collector:8080/lines      # POST of JSON lines, until SIGTERM or Ctrl-C
    python examples/ship.py data/app out/                             # a file for each partition
    python examples/ship.py data/app http://... --timeout 5           # end after 5 seconds without a record

Start as many as there are partitions, on this host; they share the work. Each line is JSON with the record's
`partition` and `offset`, which name it for ever.

- HTTP: at least once. A batch is committed when the endpoint has answered with 2xx. After a death it is sent again, so
  the receiver drops places that it has. No answer, 408, 429 and 5xx are tried again, with longer and longer pauses. A
  batch that is refused otherwise (400, 413, ...) is halved, until the single record is known that the endpoint does
  not take. It goes to the dead-letter topic `<topic>.dead`, with the reason in a header.
- Files: exactly once. A partition's file says by its last whole line how far it is, so records that are sent again
  are left out, and half a line of a killed process is cut off.
"""

import argparse
import http.client
import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from loglib import Record, Topic

GROUP = "ship"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
AGAIN = {408, 425, 429}


class Target(Protocol):
    """Where records go."""

    def deliver(self, partition: int, records: list[Record]) -> None:
        """Deliver records of a partition, in order. They are delivered when this returns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topic", type=Path, help="directory of the topic")
    parser.add_argument("target", help="a URL, or a directory for files")
    parser.add_argument("--group", default=GROUP, help="name of the consumer group")
    parser.add_argument("--records", type=int, default=500, help="most records in a request (default 500)")
    parser.add_argument("--timeout", type=float, help="end after so many seconds without a record (default never)")
    args = parser.parse_args()
    dead = args.topic.with_name(f"{args.topic.name}.dead")
    target: Target = Endpoint(args.target, dead) if "://" in args.target else Files(Path(args.target))
    count = ship(args.topic, target, group=args.group, at_once=args.records, timeout=args.timeout)
    print(f"delivered {count:,} records", file=sys.stderr)


def ship(path: Path, target: Target, *, group: str, at_once: int, timeout: float | None) -> int:
    """Deliver what the group gets, until SIGTERM; returns the number of records."""
    count = 0
    with Topic.open(path, mode="r") as topic, topic.group(group) as member:
        signal.signal(signal.SIGTERM, lambda *_: member.close())
        with suppress(KeyboardInterrupt):
            for batch in member.batches(timeout):
                records = list(batch.records())
                for start in range(0, len(records), at_once):
                    target.deliver(batch.partition, records[start : start + at_once])
                count += len(records)  # the batch is committed when the loop asks for the next one
    return count


def line_of(record: Record) -> bytes:
    """A record as a line of JSON. A value that is JSON stands there as it is."""
    facts: dict[str, Any] = {"partition": record.partition, "offset": record.offset, "timestamp_us": record.timestamp}
    if record.key is not None:
        facts["key"] = record.key.decode(errors="backslashreplace")
    try:
        facts["value"] = json.loads(record.value or b"null")
    except ValueError:
        facts["value"] = (record.value or b"").decode(errors="backslashreplace")
    return json.dumps(facts).encode() + b"\n"


# HTTP


class Refused(Exception):
    """The endpoint does not take this, however often it is sent."""


class Endpoint:
    """A URL that takes lines of JSON by POST."""

    def __init__(self, url: str, dead: Path, *, sleep: Callable[[float], object] = time.sleep) -> None:
        self._url = url
        self._dead = dead
        self._sleep = sleep

    def deliver(self, partition: int, records: list[Record]) -> None:
        try:
            self._post(b"".join(map(line_of, records)))
        except Refused as reason:
            if len(records) == 1:
                self._bury(records[0], str(reason))
                return
            half = len(records) // 2
            self.deliver(partition, records[:half])
            self.deliver(partition, records[half:])

    def _post(self, body: bytes) -> None:
        pause = FIRST_PAUSE_S
        while True:
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/x-ndjson"})
            try:
                with urllib.request.urlopen(request, timeout=30):
                    return
            except urllib.error.HTTPError as error:
                with error:
                    if error.code < 500 and error.code not in AGAIN:
                        raise Refused(f"{error.code} {error.reason}") from error
                problem: object = f"{error.code} {error.reason}"
            except (OSError, http.client.HTTPException) as error:  # no connection, no answer, or half of one
                problem = error
            print(f"ship: {problem}; again in {pause:.1f} s", file=sys.stderr)
            self._sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _bury(self, record: Record, reason: str) -> None:
        """Put the record into the dead-letter topic. Its key and headers stay; headers say where it was, and why."""
        place = f"{record.partition}:{record.offset}"
        headers = [*record.headers, ("dead-letter-reason", reason.encode()), ("dead-letter-place", place.encode())]
        with Topic.open(self._dead, create=True, shared=True) as dead:
            dead.append(record.value, key=record.key, timestamp=record.timestamp, headers=headers, sync=True)


# Files


class Files:
    """A directory with a file of JSON lines for each partition."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def deliver(self, partition: int, records: list[Record]) -> None:
        with (self._directory / f"{partition:04d}.jsonl").open("a+b") as file:
            last = last_offset(file)  # each time: another process may have had the partition meanwhile
            file.writelines(line_of(each) for each in records if each.offset > last)
            file.flush()
            os.fsync(file.fileno())


def last_offset(file: IO[bytes], block: int = 1 << 16) -> int:
    """The offset in the last whole line; -1 if there is none. What stands behind that line is cut off."""
    start, data = file.seek(0, os.SEEK_END), b""
    while start > 0 and data.count(b"\n") < 2:
        size = min(block, start)
        start -= size
        file.seek(start)
        data = file.read(size) + data
    whole, newline, _ = data.rpartition(b"\n")
    file.truncate(start + len(whole) + len(newline))
    return int(json.loads(whole.rpartition(b"\n")[2])["offset"]) if newline else -1


if __name__ == "__main__":
    main()
