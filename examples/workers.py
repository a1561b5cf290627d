"""Workers: a pool of processes that share a topic's lines, and that survives `kill -9` of any of them.

The parent appends the lines of an access log to a topic, starts the workers, and replaces each worker that dies. The
workers are members of one consumer group: each has some of the partitions, and when one dies, the others soon take
over its partitions. A worker stores its results before it asks for more lines, so no line is lost. If it dies between
storing and committing, another worker handles these lines again. Their offsets show the repetition.

    python examples/workers.py                        # 20,000 made-up lines, 4 workers, 5 of them killed on the way
    python examples/workers.py /var/log/access.log --workers 8
    python examples/workers.py --kills 0              # kill none; you can kill the printed process ids
"""

import argparse
import json
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import sleep

import accesslog
from loglib import Topic
from loglib.groups import reset_group

GROUP = "counters"
PARTITIONS = 16
LINES_AT_ONCE = 500
spawn = get_context("spawn")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log", nargs="?", type=Path, help="an access log (default: made-up lines)")
    parser.add_argument("--lines", type=int, default=20_000, help="how many lines to make up (default 20,000)")
    parser.add_argument("--workers", type=int, default=4, help="how many processes (default 4)")
    parser.add_argument("--kills", type=int, default=5, help="how many of them to kill on the way (default 5)")
    parser.add_argument("--work", type=float, default=1, help="milliseconds that a line takes (default 1)")
    args = parser.parse_args()
    if args.log and not args.log.is_file():
        parser.error(f"{args.log} is not a file")
    with tempfile.TemporaryDirectory() as directory:
        lines, results = Path(directory) / "lines", Path(directory) / "results"
        count = write(args.log.open("rb") if args.log else accesslog.generate(args.lines), lines)
        Topic.open(results, create=True, partitions=2 * args.workers).close()
        print(f"{count:,} lines for {args.workers} workers", flush=True)
        Pool(lines, results, args.workers, args.work / 1000).run(kills=args.kills)
        report(results, count)


def write(source: Iterable[bytes], path: Path) -> int:
    """Append the lines, all lines of one host to one partition; returns their number."""
    source, count = iter(source), 0
    with Topic.open(path, create=True, partitions=PARTITIONS) as topic:
        while lines := [line.rstrip(b"\r\n") for line in islice(source, LINES_AT_ONCE)]:
            topic.append_many(lines, keys=[line.partition(b" ")[0] for line in lines])
            topic.flush()
            count += len(lines)
    return count


# A worker


def work(lines: Path, results: Path, seconds_a_line: float) -> None:
    """Look up the page of each line, until SIGTERM."""
    with Topic.open(lines, mode="r") as topic, Topic.open(
        results, create=True, shared=True
    ) as found, topic.group(GROUP) as group:
        signal.signal(signal.SIGTERM, lambda *_: group.close())
        for batch in group.batches():
            pages = [accesslog.page_of(line or b"") for line in batch.values]
            sleep(seconds_a_line * len(pages))  # the real work
            places = [(batch.partition, offset) for offset in batch.offsets]
            found.append_many([json.dumps(each).encode() for each in zip(places, pages, strict=True)])
            found.flush()  # stored, so the batch may be committed when the loop asks for the next one


# Their parent


class Pool:
    """The workers, and the replacements of dead workers."""

    def __init__(self, lines: Path, results: Path, size: int, seconds_a_line: float) -> None:
        self.lines = lines
        self.task = lines, results, seconds_a_line
        self.workers = [self.started(number) for number in range(size)]

    def started(self, number: int) -> BaseProcess:
        worker = spawn.Process(target=work, args=self.task, name=f"worker {number}", daemon=True)
        worker.start()
        print(f"{worker.name} has process id {worker.pid}", flush=True)
        return worker

    def run(self, *, kills: int) -> None:
        """Run until all lines are handled, and kill some workers at even intervals."""
        killed = 0
        with Topic.open(self.lines, mode="r") as topic:
            while (done := part_handled(topic)) < 1:
                connection.wait([worker.sentinel for worker in self.workers], timeout=0.05)
                for number, worker in enumerate(self.workers):
                    if worker.exitcode is not None:
                        print(f"{worker.name} died of {died_of(worker)}", flush=True)
                        self.workers[number] = self.started(number)
                if killed < int(done * (kills + 1)):
                    random.choice(self.workers).kill()
                    killed += 1
        for worker in self.workers:
            worker.terminate()
            worker.join()


def part_handled(topic: Topic) -> float:
    """The committed part, from 0 to 1: the group's offsets, compared with the offsets after a reset to the end."""
    moves = reset_group(topic, GROUP, "end", dry_run=True).values()
    return sum(move.before or 0 for move in moves) / max(1, sum(move.after for move in moves))


def died_of(worker: BaseProcess) -> str:
    code = worker.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"an error (status {code})"


def report(results: Path, expected: int) -> None:
    pages: dict[tuple[int, int], str | None] = {}
    stored = 0
    with Topic.open(results, mode="r") as topic:
        for record in topic.read():
            place, page = json.loads(record.value or b"")
            pages[tuple(place)] = page
            stored += 1
    print(f"{len(pages):,} of {expected:,} lines handled, {stored - len(pages):,} of them more than once")
    for page, count in Counter(page for page in pages.values() if page).most_common(5):
        print(f"{count:>8,} {page}")


if __name__ == "__main__":
    main()
