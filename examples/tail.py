"""Tail: follow a topic from another process and print each record as it comes, like `tail -f`.

    python examples/tail.py pageviews-out/hits                    # new records, until Ctrl-C
    python examples/tail.py pageviews-out/hits --start begin      # all records, and then new ones
    python examples/tail.py pageviews-out/hits --start -15m --timeout 5
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from loglib import LogError, Record, Topic


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("topic", type=Path, help="directory of the topic")
    parser.add_argument("--start", default="end", help='"begin", "end" or a time ago like -15m (default end)')
    parser.add_argument("--timeout", type=float, help="stop after so many seconds without a record (default never)")
    args = parser.parse_args()

    with suppress(KeyboardInterrupt), Topic.open(args.topic, mode="r") as topic:
        for record in topic.follow(start=args.start, timeout=args.timeout):
            print(as_line(record), flush=True)


def as_line(record: Record) -> str:
    return f"{record.time:%Y-%m-%d %H:%M:%S} {record.partition}:{record.offset} {text(record.key)} {text(record.value)}"


def text(data: bytes | None) -> str:
    return "-" if data is None else data.decode(errors="backslashreplace")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # for example of `| head`; the interpreter would report it once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (LogError, OSError) as error:
        sys.exit(f"tail: {error}")
