"""Logs with damage of every kind, and what a repair owes to them."""

from random import Random
from typing import Any, NamedTuple

from loglib import CorruptLogError, LogError, Topic, testing
from loglib.log import RepairReport
from loglib.log.repair import repair_topic
from loglib.testing import CrashFS, Image, MemoryFiles

TOPIC = "/data/topic"
PARTITION = f"{TOPIC}/0000"
WATERMARK = f"{PARTITION}/watermark"
NOW = 1_764_000_000_000_000

Tree = dict[str, bytes]
Rows = dict[int, bytes | None]  # value by offset


class WholeLog(NamedTuple):
    """A log as it was before the damage."""

    tree: Tree
    rows: Rows
    end: int


def whole_log(random: Random) -> WholeLog:
    """A partition of a few segments, with batches of many sizes and idempotent producers."""
    files = MemoryFiles()
    with _open(files, segment_bytes=random.choice((4096, 6000, 20_000))) as topic:
        end = append_some(topic, random)
    rows = rows_of(files)
    assert rows is not None
    return WholeLog(files.tree(), rows, end)


def append_some(topic: Topic, random: Random, first: int = 0) -> int:
    """Append and flush up to 40 batches; returns the end of the log. Their numbers begin at `first`."""
    for number in range(first, first + random.randrange(1, 40)):
        producer = (f"app {number % 5}", number) if random.random() < 0.3 else None
        if random.random() < 0.5:
            values = [b"%d.%d" % (number, each) for each in range(random.randrange(1, 30))]
            topic.append_many(values, partition=0, producer=producer)
        else:
            topic.append(b"%d" % number + b"." * random.randrange(500), partition=0, producer=producer)
        if random.random() < 0.5:
            topic.flush()
    topic.flush()
    return topic.partition(0).high_watermark


def damage(tree: Tree, random: Random) -> tuple[Tree, list[str]]:
    """The same files with one to three damages, and their kinds."""
    tree, kinds = dict(tree), []
    for _ in range(random.randrange(1, 4)):
        kind = random.choice(KINDS)
        segments = sorted(path for path in tree if path.endswith(".log"))
        path = {"watermark": WATERMARK, "no watermark": WATERMARK, "description": f"{TOPIC}/topic.json"}.get(kind)
        if path is None and segments:
            path = random.choice(segments)
        if path in tree:
            kinds.append(kind)
            content = _damaged(kind, tree.pop(path), random)
            if content is not None:
                tree[path] = content
    return tree, kinds


KINDS = (
    "flip", "flip", "flip", "header", "missing", "short", "long", "zeros", "watermark", "no watermark", "description",
)  # fmt: skip


def _damaged(kind: str, content: bytes, random: Random) -> bytes | None:
    at = random.randrange(len(content) + 1)
    match kind:
        case "missing" | "no watermark":
            return None
        case "short":
            return content[:at]
        case "long":
            return content + random.randbytes(random.randrange(1, 100))
        case "zeros":
            return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]
        case "header":
            at = random.randrange(160)
    flipped = bytes([each ^ 1 << random.randrange(8) for each in content[at : at + 1]])
    return content[:at] + flipped + content[at + 1 :]


def rows_of(files: MemoryFiles, **options: Any) -> Rows | None:
    """What can be read; None if the topic does not open."""
    try:
        with testing.open_topic(TOPIC, mode="r", files=files) as topic:
            return {record.offset: record.value for record in topic.read(**options)}
    except (LogError, OSError):
        if not options:
            raise
        return None


def repaired(files: MemoryFiles, **options: Any) -> RepairReport | None:
    """Repair the topic; None if nothing is left that says what it was."""
    try:
        return repair_topic(files, TOPIC, clock=lambda: NOW, **options)
    except CorruptLogError as error:
        assert error.found in ("no whole header of a segment", "no watermark and no segment"), error
        return None


def judge(files: MemoryFiles, report: RepairReport, whole: WholeLog, before: Rows | None, kinds: list[str]) -> int:
    """Check the result of a repair; returns how many records are lost. `before`: what was readable before it."""
    assert not report.verified.damage, report
    rows = rows_of(files)
    assert rows is not None
    assert rows.items() <= whole.rows.items(), "a record was invented or changed"
    if before is not None:
        assert before.items() <= rows.items(), "a record that could be read cannot be read any more"
    gaps = [each.offsets for each in report.verified.gaps]
    lost = whole.rows.keys() - rows.keys()
    assert not any(offset in gap for offset in rows for gap in gaps), "a gap hides a record"
    if not {"watermark", "no watermark"} & set(kinds):  # otherwise the end is what the last segment has
        assert all(any(offset in gap for gap in gaps) for offset in lost), "a record is lost, and no gap says so"
    _goes_on(files, whole, rows, kinds)
    again = repaired(files)
    assert again is not None and not again.repairs, again
    return len(lost)


def _goes_on(files: MemoryFiles, whole: WholeLog, rows: Rows, kinds: list[str]) -> None:
    """A writer appends behind everything, and an offset is not used again."""
    with _open(files) as topic:
        place = topic.append(b"after", partition=0, producer=("another app", 1))
        topic.flush()
    assert place.offset > max(rows, default=-1)
    if not {"watermark", "no watermark"} & set(kinds):
        assert place.offset >= whole.end, "offsets of lost records are used again"
    assert rows_of(files) == rows | {place.offset: b"after"}


def files_with(tree: Tree) -> CrashFS:
    """A disk with these files."""
    return CrashFS(Image.of(tree))


def _open(files: MemoryFiles, **policies: Any) -> Topic:
    return testing.open_topic(TOPIC, files=files, **policies)
