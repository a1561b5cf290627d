"""Quickstart: append to a topic, read it back, seek by time, and follow it.

    python examples/quickstart.py
"""

import tempfile
from datetime import timedelta
from pathlib import Path

from loglib import FlushPolicy, Topic


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "clicks"
        write(path)
        read(path)
        follow(path)


def write(path: Path) -> None:
    """One process at a time may write a partition. Any other process can read the flushed records."""
    with Topic.open(path, create=True, partitions=4, flush=FlushPolicy(records=10_000, interval=0.05)) as topic:
        position = topic.append(b"hello")
        print(f"the first record went to partition {position.partition}, offset {position.offset}")

        # Records with one key share a partition, and order holds within it.
        for page in (b"/", b"/docs", b"/pricing"):
            topic.append(page, key=b"user-42", headers={"source": b"web"})

        # The fast path: one call, thousands of records.
        topic.append_many([b"page %d" % number for number in range(10_000)])

        # This record is on disk when the call returns; all other records within 50 ms.
        topic.append(b"must not vanish", sync=True)


def read(path: Path) -> None:
    """Reading takes no lock and changes nothing, so any number of processes may read."""
    with Topic.open(path, mode="r") as topic:
        print(f"{sum(1 for _ in topic.read())} records in all")

        visits = [record for record in topic.read() if record.key == b"user-42"]
        for record in visits:
            print(f"user-42 saw {record.value!r} at {record.time:%H:%M:%S}, headers {record.headers}")

        # A record's next_offset is the place to continue after it.
        rest = topic.partition(visits[0].partition).read(start=visits[0].next_offset)
        print(f"after {visits[0].value!r} came {next(iter(rest)).value!r}")

        recent = topic.read(start=timedelta(minutes=1))
        print(f"{sum(1 for _ in recent)} records in the last minute")

        # For many records, read whole columns: no object is made per record.
        print(f"{sum(len(value or b'') for batch in topic.batches() for value in batch.values)} bytes of values")


def follow(path: Path) -> None:
    """The endless iterator waits for more records; here it stops after half a second without a record."""
    with Topic.open(path, create=True) as topic, topic.follow(start="end", timeout=0.5) as reader:
        topic.append(b"news", sync=True)
        for record in reader:
            print(f"just in: {record.value!r}")


if __name__ == "__main__":
    main()
