"""Cases: the table of everything that is measured, and on which systems.

Invariant: a case's name carries its parameters, and all runs of a case do the same work on the
same inputs, so that a ratio between two of its runs means something.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from job import Job, Option

OURS = "loglib"
RAW = "raw, 1 MiB blocks"
MACHINE = "machine: write, fdatasync"
CP = "cp, sync"
TWICE = f'{OURS}, acks="all" on two directories of one disk'
SPINNING = f"{OURS}, spin=timedelta(milliseconds=20)"
GENERAL = f"{OURS}, general ways"  # without the short ways for one record (decision 28)
IMPORTED = f"{OURS}, pyarrow imported"  # by which loglib joins and slices then
INOTIFY = "file and inotify"
OBVIOUS = "obvious log"
SQLITE = "sqlite3"
REDIS = "Redis stream"  # only where there is a redis-server
ALONE = f"{OURS}, one process"
LMDB = "lmdb"
ARROW = "pyarrow IPC"
FILE_HANDLER = "logging.FileHandler"
FLOOR = "floor"  # the steps that cannot be left out, alone: see floors.py


@dataclass(frozen=True, slots=True)
class Run:
    """One system's part of a case. The files that `prepare` writes are kept for all repetitions."""

    label: str
    job: Job
    prepare: Job | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on several systems, which take turns `repeats` times."""

    name: str
    runs: tuple[Run, ...]
    repeats: int
    needs_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work each case does."""

    messages: int
    synced_calls: int
    followed_messages: int
    open_segments: int
    repeats: int
    few_repeats: int
    log_megabytes: tuple[int, ...]

    @classmethod
    def chosen(cls, *, quick: bool, full: bool) -> Sizes:
        if quick:
            return cls(50_000, 200, 500, 500, 2, 1, (1, 10))
        sizes = (10, 100, 1_000, 10_000) if full else (10, 100, 1_000)
        return cls(500_000, 2_000, 5_000, 10_000, 4, 3, sizes)


def all_cases(sizes: Sizes) -> list[Case]:
    """Return every case, in the order they are run and printed."""
    return [
        *_unsynced_write_cases(sizes),
        *_single_append_cases(sizes),
        *_synced_write_cases(sizes),
        *_partitioned_cases(sizes),
        *_table_cases(sizes),
        *_read_cases(sizes),
        *_small_batch_cases(sizes),
        *_compression_cases(sizes),
        *_follow_cases(sizes),
        *_group_cases(sizes),
        *_turn_cases(sizes),
        *_job_cases(sizes),
        *_logging_cases(sizes),
        *_seek_cases(sizes),
        *_memory_cases(sizes),
        *_archive_cases(sizes),
        *_copy_cases(sizes),
        *_replica_cases(sizes),
        *_open_cases(sizes),
        _import_case(sizes),
    ]


def shape_title(shape: str) -> str:
    """Name a shape of messages as in the names of cases: "200B", "16B key + 200B", "50-350B", "text"."""
    key, plus, value = shape.rpartition("+")
    if plus:
        return f"{key}B key + {value}B"
    return shape if shape == "text" else f"{shape}B"


def _write(system: str, sizes: Sizes, shape: str, per_call: int, **options: Option) -> Job:
    settings: dict[str, Option] = {"messages": sizes.messages, "flush": "no fsync", **options}
    return Job("write", {"system": system, "shape": shape, "per_call": per_call, **settings})


def _unsynced_write_cases(sizes: Sizes) -> list[Case]:
    large = [
        Case(
            f"append_many[{shape_title(shape)}, batch=10000, no fsync]",
            tuple(
                Run(label, _write(system, sizes, shape, 10_000))
                for label, system in (
                    (OURS, "loglib"),
                    (IMPORTED, "loglib, with Arrow"),
                    (RAW, "raw"),
                    (f"{FLOOR}: join, CRC, write", "floor"),
                    (OBVIOUS, "obvious"),
                    (SQLITE, "sqlite3"),
                    (LMDB, "lmdb"),
                    (ARROW, "arrow"),
                )
            ),
            repeats,
        )
        for shape, repeats in (("200", sizes.repeats), ("50-350", sizes.few_repeats))
    ]
    fifty = Case(
        "append_many[200B, batch=50, no fsync]",
        (
            Run(OURS, _write("loglib", sizes, "200", 50)),
            Run(f"{OURS}, flush each call", _write("loglib", sizes, "200", 50, flush="each call, no fsync")),
            Run(RAW, _write("raw", sizes, "200", 50)),
            Run(OBVIOUS, _write("obvious", sizes, "200", 50)),
            Run(SQLITE, _write("sqlite3", sizes, "200", 50)),
            Run(f"{SQLITE}, commit each 10,000", _write("sqlite3", sizes, "200", 50, gather=True)),
            Run(LMDB, _write("lmdb", sizes, "200", 50)),
            Run(f"{LMDB}, commit each 10,000", _write("lmdb", sizes, "200", 50, gather=True)),
            Run(f"{ARROW}, batch each 10,000", _write("arrow", sizes, "200", 50, gather=True)),
        ),
        sizes.few_repeats,
    )
    return [*large, fifty]


def _single_append_cases(sizes: Sizes) -> list[Case]:
    gathered = ((OBVIOUS, "obvious"), (SQLITE, "sqlite3"), (LMDB, "lmdb"), (ARROW, "arrow"))
    return [
        Case(
            f"append[200B, one a call, {title}]",
            (
                Run(OURS, _write("loglib", sizes, "200", 1, flush=flush)),
                Run("list.append and join", Job("list_append", {"messages": sizes.messages})),
                *((Run(RAW, _write("raw", sizes, "200", 10_000)),) if flush == "no fsync" else ()),
                *(
                    Run(f"{label}, commit each 10,000", _write(system, sizes, "200", 1, flush=flush, gather=True))
                    for label, system in gathered
                ),
            ),
            repeats,
        )
        for title, flush, repeats in (
            ("no fsync", "no fsync", sizes.few_repeats),
            ("default flush policy", "default", sizes.repeats),
        )
    ]


def _synced_write_cases(sizes: Sizes) -> list[Case]:
    systems = ((OURS, "loglib"), (OBVIOUS, "obvious"), (SQLITE, "sqlite3"), (LMDB, "lmdb"), (ARROW, "arrow"))
    machine = (MACHINE, "raw")
    one_a_call = Case(
        "append[200B, one a call, fsync each call]",
        tuple(
            Run(label, _write(system, sizes, "200", 1, flush="fsync", messages=sizes.synced_calls))
            for label, system in (*systems[:1], machine, *systems[1:4])
        ),
        sizes.few_repeats,
    )
    few_a_call = [
        Case(
            f"append_many[200B, batch={rows}, fsync each call]",
            tuple(
                Run(label, _write(system, sizes, "200", rows, flush=flush, messages=rows * sizes.synced_calls))
                for label, system, flush in (
                    (OURS, "loglib", "fsync"), (MACHINE, "raw", "fsync"), (SQLITE, "sqlite3", "fsync"),
                    (f'{OURS}, durability="os"', "loglib", "each call, no fsync"),
                )
            ),
            sizes.few_repeats,
        )
        for rows in (10, 100)
    ]  # fmt: skip
    many_a_call = Case(
        "append_many[200B, batch=10000, fsync each call]",
        tuple(
            Run(label, _write(system, sizes, "200", 10_000, flush="fsync"))
            for label, system in (*systems[:1], machine, *systems[1:])
        ),
        sizes.few_repeats,
    )
    threads = Case(
        "append[200B, one a call, sync=True, 16 threads]",
        tuple(
            Run(label, Job("threads", {"system": system, "threads": 16, "messages": sizes.synced_calls}))
            for label, system in systems[:4]
        ),
        sizes.repeats,
    )
    return [one_a_call, *few_a_call, many_a_call, threads]


def _partitioned_cases(sizes: Sizes) -> list[Case]:
    spread = _write("loglib", sizes, "16+200", 10_000, partitions=8)
    return [
        Case(
            "append_many[16B key + 200B, batch=10000, 8 partitions, no fsync]",
            (
                Run(OURS, spread),
                Run(f"{OURS}, one partition", _write("loglib", sizes, "16+200", 10_000)),
                Run(f"{OURS}, no keys, one partition", _write("loglib", sizes, "200", 10_000)),
                Run(f"{FLOOR}: spread, join, CRC, write", _write("spread floor", sizes, "16+200", 10_000)),
                Run(f"{FLOOR}, no keys", _write("floor", sizes, "200", 10_000)),
                Run(f"{SQLITE}, one table", _write("sqlite3", sizes, "16+200", 10_000)),
            ),
            sizes.repeats,
        )
    ]


def _table_cases(sizes: Sizes) -> list[Case]:
    def runs(shape: str, partitions: int, systems: tuple[tuple[str, str], ...]) -> tuple[Run, ...]:
        settings: dict[str, Option] = {"shape": shape, "partitions": partitions, "messages": sizes.messages}
        return tuple(Run(label, Job("write_table", {"system": system, **settings})) for label, system in systems)

    one_thread = (f"{OURS}, one thread", "append_arrow, one thread")
    streams = ((f"{ARROW}, CRC-32C", "checked ipc"), (ARROW, "ipc"))
    return [
        *(
            Case(
                f"append_arrow[{shape_title(shape)}, one table, no fsync]",
                runs(shape, 1, ((OURS, "append_arrow"), one_thread, (RAW, "raw"), *streams)),
                sizes.repeats,
            )
            for shape in ("200", "50-350")
        ),
        Case(
            "append_arrow[16B key + 200B, one table, 8 partitions, no fsync]",
            runs("16+200", 8, ((OURS, "append_arrow"), one_thread, (f"{OURS}, append_many", "append_many"))),
            sizes.repeats,
        ),
    ]


def _read_cases(sizes: Sizes) -> list[Case]:
    columns = (
        (OURS, "loglib"),
        (IMPORTED, "loglib, with Arrow"),
        ("slices of one buffer", "slices"),
        (OBVIOUS, "obvious"),
        (SQLITE, "sqlite3"),
        (LMDB, "lmdb"),
        (ARROW, "arrow"),
    )
    records = (
        (OURS, "loglib"),
        (IMPORTED, "loglib, with Arrow"),
        (GENERAL, "loglib, general"),
        (f"{FLOOR}: the objects alone", "floor"),
        (OBVIOUS, "obvious"),
        (SQLITE, "sqlite3"),
        (LMDB, "lmdb"),
    )
    arrow = (
        (OURS, "loglib"),
        (f"{OURS}, value alone", "loglib, value"),
        ("raw pread, 1 MiB blocks", "raw"),
        (f"{FLOOR}: pread and CRC", "floor"),
        (f"{ARROW}, mapped, unchecked", "arrow"),
    )
    return [
        *(
            _read_case(f"read values[{shape_title(shape)}]", "read_columns", shape, columns, sizes, repeats)
            for shape, repeats in (("200", sizes.repeats), ("50-350", sizes.few_repeats))
        ),
        *(
            _read_case(f"read records[{shape_title(shape)}]", "read_records", shape, systems, sizes, repeats)
            for shape, systems, repeats in (
                ("200", records, sizes.repeats),
                ("50-350", records[:4], sizes.repeats),  # against how records were made before
                ("16+200", (records[0], *records[3:]), sizes.few_repeats),
            )
        ),
        *(
            _read_case(f"to_arrow[{shape_title(shape)}]", "read_arrow", shape, arrow, sizes, repeats)
            for shape, repeats in (("200", sizes.repeats), ("50-350", sizes.few_repeats))
        ),
    ]


# Which system's file is read by a system that has no file of its own; None: it reads memory.
_FILES = {
    ("read_columns", "slices"): None,
    ("read_columns", "checked slices"): None,
    ("read_columns", "loglib, with Arrow"): "loglib",
    ("read_records", "floor"): None,
    ("read_records", "loglib, with Arrow"): "loglib",
    ("read_records", "loglib, general"): "loglib",
    ("read_arrow", "floor"): "raw",
    ("read_arrow", "loglib, value"): "loglib",
}


def _small_batch_cases(sizes: Sizes) -> list[Case]:
    """Reading what a program that flushes each call has written."""

    def case(title: str, kind: str, per_call: int, messages: int, other: tuple[str, str]) -> Case:
        options: dict[str, Option] = {"shape": "200", "messages": messages, "per_call": per_call}
        fill = Job("fill", {"system": "loglib", **options, "flush": "each call, no fsync"})
        runs = tuple(
            Run(label, Job(kind, {"system": system, **options}), fill if _FILES.get((kind, system), system) else None)
            for label, system in ((OURS, "loglib"), other)
        )
        return Case(f"{title}[200B, batches of {per_call}]", runs, sizes.few_repeats)

    alone, floor = (f"{OURS}, batch by batch", "loglib, alone"), (f"{FLOOR}: CRC and slices", "checked slices")
    return [
        *(
            case(title, kind, per_call, messages, alone)
            for title, kind in (("read records", "read_records"), ("arrow", "read_arrow"))
            for per_call, messages in ((1, sizes.messages // 10), (50, sizes.messages))
        ),
        case("read values", "read_columns", 10, 3 * sizes.messages // 5, floor),
    ]


def _read_case(
    name: str, kind: str, shape: str, systems: tuple[tuple[str, str], ...], sizes: Sizes, repeats: int
) -> Case:
    options: dict[str, Option] = {"shape": shape, "messages": sizes.messages}
    return Case(
        name,
        tuple(
            Run(
                label,
                Job(kind, {"system": system, **options}),
                Job("fill", {"system": file, "per_call": 10_000, **options}) if file else None,
            )
            for label, system in systems
            for file in [_FILES.get((kind, system), system)]
        ),
        repeats,
    )


def _compression_cases(sizes: Sizes) -> list[Case]:
    messages = sizes.messages // 2
    runs = tuple(
        Run(f"{OURS}, {codec}", Job("compress", {"codec": codec, "messages": messages}))
        for codec in ("none", "lz4", "zstd", "zlib")
    )
    return [Case("compression[access log lines, batch=10000, no fsync]", runs, sizes.few_repeats)]


def _follow_cases(sizes: Sizes) -> list[Case]:
    systems = (
        (OURS, "loglib"),
        (SPINNING, "loglib, spinning"),
        (GENERAL, "loglib, general"),
        (INOTIFY, "inotify"),
        ("file, polled each millisecond", "poll"),
    )
    latency = Case(
        "follow[200B, 1000 messages/s, another process, flush each, no fsync]",
        tuple(
            Run(label, Job("follow", {"system": system, "messages": sizes.followed_messages}))
            for label, system in systems
        ),
        sizes.few_repeats,
    )
    idle = Case("follow[idle]", (Run(OURS, Job("follow_idle", {"seconds": 3})),), 1)
    return [latency, idle]


def _group_cases(sizes: Sizes) -> list[Case]:
    filled = Job("group_fill", {"messages": sizes.messages})
    reading = Case(
        "group[200B records, 4 partitions]",
        tuple(
            Run(label, Job("group_read", {"system": system, "messages": sizes.messages}), filled)
            for label, system in (
                (f"{OURS}, topic.group().follow", "group"),
                (f"{OURS}, topic.follow", "follow"),
                (f"{OURS}, topic.read", "read"),
            )
        ),
        sizes.repeats,
    )
    committing = Case(
        "group[commit, one partition]",
        tuple(
            Run(
                f'{OURS}, durability="{durability}"',
                Job("group_commit", {"commits": commits, "durability": durability}),
            )
            for durability, commits in (("os", 5 * sizes.synced_calls), ("disk", sizes.synced_calls // 10))
        ),
        sizes.few_repeats,
    )
    takeover = Case(
        "group[takeover after SIGKILL, 4 members, 8 partitions]",
        (Run(OURS, Job("group_takeover", {"kills": sizes.synced_calls // 20})),),
        1,
    )
    return [reading, committing, takeover]


def _turn_cases(sizes: Sizes) -> list[Case]:
    """Several processes that append to one topic."""
    time: dict[str, Option] = {"milliseconds": 2_000 if sizes.few_repeats > 1 else 500}

    def runs(kind: str, *systems: tuple[str, str, int], **options: Option) -> tuple[Run, ...]:
        there = [each for each in systems if shutil.which("redis-server") or not each[1].startswith("redis")]
        return tuple(
            Run(label, Job(kind, {"system": system, "processes": processes, **time, **options}))
            for label, system, processes in there
        )

    own_and_others = ((OURS, "loglib", 4), (ALONE, "loglib", 1), (f"{ALONE}, not shared", "alone", 1))
    synced = ((OURS, "loglib", 16), (ALONE, "alone", 1), (SQLITE, "sqlite3", 16), (REDIS, "redis", 16))
    two = ((OURS, "loglib", 2), (SQLITE, "sqlite3", 2))
    return [
        Case(
            "turns[16B key + 200B, one a call, 4 processes, 4 partitions, default flush policy]",
            runs(
                "turns", *own_and_others, (SQLITE, "sqlite3", 4), (f"{SQLITE}, one process", "sqlite3", 1),
                (REDIS, "redis", 4), (f"{REDIS}, 50 a round trip", "redis, 50", 4), partitions=4,
            ),
            sizes.few_repeats,
        ),
        Case(
            "turns[16B key + 200B, sync=True, 16 processes, one partition]",
            runs("turns", *synced, partitions=1, sync=True),
            sizes.few_repeats,
        ),
        Case(
            "turns[a call while another process appends without a pause]",
            runs("turn_of_busy", *two, partitions=1),
            sizes.few_repeats,
        ),
        Case(
            "turns[a call after one of another process, which is idle since]",
            runs("turn_of_idle", *two, partitions=1, turns=200),
            sizes.few_repeats,
        ),
    ]  # fmt: skip


def _job_cases(sizes: Sizes) -> list[Case]:
    """Workers that take single jobs, beside queues that are there: a server, and packages that are installed."""
    jobs = sizes.messages // 10
    few = jobs // 10  # for the systems that take a millisecond for each

    def runs(*systems: tuple[str, str, int]) -> tuple[Run, ...]:
        needed = {"persist-queue": "persistqueue", "litequeue": "litequeue", "huey": "huey"}
        there = [
            each for each in systems
            if (shutil.which("redis-server") or not each[1].startswith("redis"))
            and (each[1] not in needed or find_spec(needed[each[1]]))
        ]
        return tuple(
            Run(label, Job("jobs", {"system": system, "jobs": count, "workers": 4})) for label, system, count in there
        )

    return [
        Case(
            "jobs[200B, one at a time, 4 workers]",
            runs(
                (OURS, "loglib", jobs), (f"{SQLITE}, UPDATE RETURNING, DELETE", "sqlite3", jobs),
                (f"{REDIS} group, XACK each", "redis", jobs), ("persist-queue, 4 threads", "persist-queue", few),
                ("litequeue", "litequeue", few), ("huey, without settling", "huey", few),
            ),
            sizes.few_repeats,
        ),
        Case(
            "jobs[200B, 32 together, 4 workers]",
            runs((OURS, "loglib, 32", 4 * jobs), (f"{REDIS} group, one XACK", "redis, 32", jobs)),
            sizes.few_repeats,
        ),
    ]  # fmt: skip


def _logging_cases(sizes: Sizes) -> list[Case]:
    def runs(*, json: bool) -> tuple[Run, ...]:
        options: dict[str, Option] = {"messages": sizes.messages // 10, "json": json}
        return (
            Run(f"{OURS}, LogHandler", Job("log", {**options, "handler": OURS})),
            Run(FILE_HANDLER, Job("log", {**options, "handler": "file"})),
        )

    return [Case(f"logging[{name}]", runs(json=name == "JSON"), sizes.repeats) for name in ("text", "JSON")]


def _seek_cases(sizes: Sizes) -> list[Case]:
    raw = Run("raw: open, pread, close", Job("seek", {"system": "raw"}), Job("fill_for_seek", {"megabytes": 10}))
    return [
        Case(
            f"seek[random offset, fresh Topic, log={megabytes} MB]",
            (
                Run(OURS, Job("seek", {"system": "loglib"}), Job("fill_for_seek", {"megabytes": megabytes})),
                *((raw,) if megabytes == sizes.log_megabytes[0] else ()),
            ),
            sizes.few_repeats,
            needs_bytes=megabytes * 1_200_000,
        )
        for megabytes in sizes.log_megabytes
    ]


def _memory_cases(sizes: Sizes) -> list[Case]:
    return [
        Case(
            f"memory[200B, log={megabytes} MB]",
            (
                Run(f"{OURS}, append_many of 10,000", Job("memory_append_many", {"megabytes": megabytes})),
                Run(f"{OURS}, append", Job("memory_append", {"megabytes": megabytes})),
                Run(f"{OURS}, append_arrow of a stream", Job("memory_append_arrow", {"megabytes": megabytes})),
                Run(f"{OURS}, read values", Job("memory_values"), Job("fill_large", {"megabytes": megabytes})),
                Run(f"{OURS}, read records", Job("memory_records"), Job("fill_large", {"megabytes": megabytes})),
                Run(f"{OURS}, arrow", Job("memory_arrow"), Job("fill_large", {"megabytes": megabytes})),
            ),
            1,
            needs_bytes=megabytes * 1_200_000,
        )
        for megabytes in sizes.log_megabytes[1:]
    ]


def _archive_cases(sizes: Sizes) -> list[Case]:
    """Access-log lines, which shrink. The values of the other cases are noise."""
    filled = Job("fill_for_archive", {"shape": "text", "messages": sizes.messages})
    ranges = ((f"{OURS}, archive and tail", "archive"), (f"{OURS}, the log alone", "log"))
    return [
        Case(
            "archive[access log lines]",
            (Run(OURS, Job("archive", {"messages": sizes.messages}), filled),),
            sizes.few_repeats,
        ),
        Case(
            "DuckDB[a filter by time over archive and tail, 95 % archived]",
            tuple(Run(label, Job("filter_by_time", {"system": system}), filled) for label, system in ranges),
            sizes.few_repeats,
        ),
    ]


def _copy_cases(sizes: Sizes) -> list[Case]:
    megabytes = sizes.messages // 250  # 2 GB, or a tenth of it
    fill = Job("fill_large", {"megabytes": megabytes})
    systems = (
        (OURS, "loglib"), (f"{OURS}, over a socket", "stream"), (f"{OURS}, over TLS", "tls"), (CP, "cp"),
        (f"{FLOOR}: read, CRC, write, sync", "floor"),
    )  # fmt: skip
    copies = [Run(label, Job("mirror_cold", {"system": system}), fill) for label, system in systems]
    behind = Run(OURS, Job("mirror_behind", {"messages": sizes.messages // 5}))
    return [
        Case(f"mirror[{megabytes / 1000:g} GB, cold, synced]", tuple(copies), sizes.few_repeats, megabytes * 3_000_000),
        Case("mirror[how far behind, 100,000 messages/s in batches of 100]", (behind,), sizes.few_repeats),
    ]


def _replica_cases(sizes: Sizes) -> list[Case]:
    """The same work in one directory and in two, which take turns."""
    kinds = (
        ("append_many[200B, batch=10000, default flush policy, replicas]", sizes.messages, 0),
        ("append[200B, one a call, sync=True, replicas]", sizes.synced_calls, 1),
        ("append[200B, one a call, sync=True, 16 threads, replicas]", 8 * sizes.synced_calls, 16),
    )
    return [
        Case(
            name,
            tuple(
                Run(label, Job("append_replicated", {"directories": count, "messages": messages, "threads": threads}))
                for count, label in ((1, OURS), (2, TWICE))
            ),
            sizes.repeats,
        )
        for name, messages, threads in kinds
    ]


def _open_cases(sizes: Sizes) -> list[Case]:
    segments = Job("fill_segments", {"segments": sizes.open_segments})
    return [
        Case(
            f"open[{sizes.open_segments:,} segments]",
            (
                Run(f"{OURS}, to write", Job("open", {"mode": "a"}), segments),
                Run(f"{OURS}, to read", Job("open", {"mode": "r"}), segments),
            ),
            sizes.few_repeats,
        ),
        *(
            Case(
                f"open after kill[log={megabytes} MB, 16 MB of it not flushed]",
                tuple(
                    Run(
                        f'{OURS}, durability="{durability}"',
                        Job(
                            "open_after_kill", {"megabytes": megabytes, "tail_megabytes": 16, "durability": durability}
                        ),
                    )
                    for durability in ("disk", "os")
                ),
                sizes.few_repeats,
            )
            for megabytes in sizes.log_megabytes[1:3]
        ),
    ]


def _import_case(sizes: Sizes) -> Case:
    return Case("import[loglib, above bare Python]", (Run(OURS, Job("import", {"repeats": 15})),), 1)
