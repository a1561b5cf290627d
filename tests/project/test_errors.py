"""errors.py: each error keeps its facts, says what to do, and is caught as what it is."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
from collections.abc import Callable

import pytest

import loglib
from loglib import OffsetRange, errors
from loglib.system.failures import together

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


def naming(error: errors.LogError, **facts: object) -> errors.LogError:
    vars(error).update(facts)
    return error


CASES = [
    (
        errors.CorruptLogError("a.log", 12, "nothing", "a CRC"),
        {"path": "a.log", "file_position": 12, "found": "nothing", "expected": "a CRC"},
        "a.log, byte 12: found nothing, expected a CRC; nothing was changed",
    ),
    (
        errors.UnsupportedFormatError("a.log", "batch version", 2, 1),
        {"path": "a.log", "found": 2, "supported": 1},
        "a.log: batch version 2 is newer than this loglib knows (1); upgrade loglib",
    ),
    (
        errors.OffsetOutOfRangeError(3, 5, 10, 20),
        {"partition": 3, "offset": 5, "log_start_offset": 10, "high_watermark": 20},
        "partition 3: offset 5 is outside the log, which holds [10, 20); start at 10 or 'begin'",
    ),
    (
        errors.InvalidOffsetError(0, 7, range(3), 144),
        {"partition": 0, "offset": 7, "batch_offsets": range(3), "next_offset": 144},
        "partition 0: no record has offset 7; the records around it are 0 to 2, then 144; use Record.offset or",
    ),
    (
        errors.LockedError("lock", "pid 5"),
        {"path": "lock", "holder": "pid 5"},
        "lock is held by pid 5; close that writer",
    ),
    (
        errors.TooFewCopiesError("t", 2, 1, {"/b": "gone"}, "a flush"),
        {"path": "t", "needed": 2, "found": 1, "missing": {"/b": "gone"}},
        "t: a flush takes 2 of its directories, and 1 count; missing: /b: gone",
    ),
    (errors.LogClosedError("closed"), {}, "closed"),
    (errors.ForkedHandleError("t", 9), {"path": "t", "parent_pid": 9}, "by pid 9 before a fork; open it again here"),
    (
        errors.FencedError("etl", "a1", "b2"),
        {"app": "etl", "owner": "a1", "current": "b2"},
        "app etl: a1 is not its owner, b2 is; stop, or take the app over if b2 has ended",
    ),
    (
        errors.SourceMismatchError("etl", "5c07", "9a1f"),
        {"app": "etl", "given": "5c07", "found": "9a1f"},
        "app etl: its versions count what comes from source 9a1f, not from 5c07: this is another query",
    ),
    (
        errors.CommitPendingError(17, "the writer of orders-3"),
        {"number": 17, "waiting_for": "the writer of orders-3"},
        "transaction 17 is committed and must not be repeated; it is not yet visible everywhere: it waits for the",
    ),
    (
        errors.GroupBusyError("etl", ["a", "b"]),
        {"group": "etl", "members": ["a", "b"]},
        "group etl is in use by a, b; stop its members first",
    ),
    (
        errors.GroupNotFoundError("t", "shup", ["audit", "ship"]),
        {"path": "t", "group": "shup", "found": ["audit", "ship"]},
        "t has no group shup; it has audit, ship",
    ),
    (
        errors.GroupNotFoundError("t", "mial", ["mail"], "share"),
        {"path": "t", "group": "mial", "found": ["mail"], "kind": "share"},
        "t has no share mial; it has mail",
    ),
    (
        errors.LogMovedError("t/0000", "was moved away", kept=True),
        {"path": "t/0000", "became": "was moved away", "kept": True},
        "was moved away; all flushed records are whole in the old files, even if these were moved; open the",
    ),
    (
        errors.LogMovedError("a.log", "was removed", kept=False),
        {"kept": False},
        "a.log was removed; the appended records may be lost with it; open the topic again",
    ),
    (errors.LogMovedError("t", "was removed"), {"kept": None}, "t was removed; open the topic again"),
    (
        errors.GroupMismatchError("etl", "a", "range", "sticky"),
        {"group": "etl", "member": "a", "given": "range", "found": "sticky"},
        "group etl: member a has strategy='sticky', this member has strategy='range'",
    ),
    (
        errors.GroupElsewhereError("groups/etl", "etl", "clicks"),
        {"path": "groups/etl", "group": "etl", "topic": "clicks"},
        "group etl is kept with topic clicks, as groups/etl says",
    ),
    (
        errors.LogReplacedError("etl", "clicks-3", 128, "it is another"),
        {"group": "etl", "partition": "clicks-3", "offset": 128, "differs": "it is another"},
        "clicks-3 is not the log in which offset 128 was committed: it is another; choose a place",
    ),
    (
        errors.StaleGenerationError("etl", "a", "clicks-3"),
        {"group": "etl", "member": "a", "partition": "clicks-3"},
        "member a no longer owns clicks-3",
    ),
    (errors.StaleGenerationError("etl", "a"), {"partition": ""}, "member a was evicted"),
    (
        errors.NotLeaderError("t", "snapshot", "orders"),
        {"path": "t", "role": "snapshot", "of": "orders"},
        "t is a snapshot of orders; open it with mode='r', or make it a topic of its own with loglib.copies.promote",
    ),
    (
        errors.NotLeaderError("t", "superseded", "copy"),
        {"path": "t", "role": "superseded", "of": "copy"},
        "t was superseded by copy; open it with mode='r'",
    ),
    (errors.ReadOnlyError("t"), {"path": "t"}, "open it with mode='a' to write"),
    (
        errors.DecodeError(2, 4096, "value", "is not JSON: Expecting value"),
        {"partition": 2, "offset": 4096, "column": "value", "why": "is not JSON: Expecting value"},
        "partition 2, offset 4096: the value is not JSON: Expecting value; without decode= it is read as bytes",
    ),
    (
        errors.RecordTooLargeError("the record", 11, 10),
        {"size_bytes": 11, "limit_bytes": 10},
        "the record is 11 bytes, the limit is 10; nothing was appended",
    ),
    (
        naming(errors.StorageFullError("a.log", FULL), lost=(OffsetRange(2, range(8, 11)),)),
        {"path": "a.log", "lost": (OffsetRange(2, range(8, 11)),), "errno": errno.ENOSPC},
        "a.log: No space left on device; 3 buffered records from offset 8 of partition 2 were not written",
    ),
    (
        errors.StorageIOError("a.log", BROKEN, "reading at byte 5"),
        {"path": "a.log", "errno": errno.EIO},
        "a.log: Input/output error while reading at byte 5",
    ),
    (
        errors.TooManyFilesError("t", OSError(24, "Too many open files"), 1023, 1024),
        {"path": "t", "needed": 1023, "limit": 1024, "errno": 24},
        "Too many open files; writing to it needs 1023 descriptors besides those in use, and `ulimit -n` is 1024",
    ),
    (errors.WriterFailedError("a.log", BROKEN), {"path": "a.log", "error": BROKEN}, "are in doubt, reopen"),
    (
        naming(errors.WriterFailedError("a.log", BROKEN), in_doubt=(OffsetRange(1, range(5, 9)),), not_appended=(3,)),
        {"in_doubt": (OffsetRange(1, range(5, 9)),), "not_appended": (3,), "lost": ()},
        "records in [5, 9) of partition 1 are in doubt until it is reopened",
    ),
    (errors.BrokenStreamError("sending", "timed out"), {"why": "timed out"}, "broke while sending (timed out)"),
    (errors.UntrustedPeerError("asking", "expired"), {"why": "expired"}, "no trust while asking: expired"),
    (
        errors.ConfigConflictError("t", "partitions", 3, 2),
        {"path": "t", "name": "partitions", "given": 3, "stored": 2},
        "t was created with partitions=2, not 3; leave the argument out, or open it with mode=",
    ),
    (
        errors.FencedJobError("mail", 1, 5, 9, "its lease was over"),
        {"share": "mail", "partition": 1, "offset": 5, "token": 9, "by": "its lease was over"},
        "share mail: the record at offset 5 of partition 1 is no longer in this hand: its lease was over; this call",
    ),
    (
        errors.UnsettledError("mail", 1, 5),
        {"share": "mail", "partition": 1, "offset": 5},
        "is not settled: call accept(), release() or reject() before the next step",
    ),
    (
        errors.ShareMismatchError("mail", "window", 5, 10),
        {"share": "mail", "name": "window", "given": 5, "stored": 10},
        "share mail has window=10, not 5: leave the argument out, or change the share",
    ),
    (
        errors.ShareFullError("mail", 1, 100),
        {"share": "mail", "partition": 1, "window": 100},
        "share mail: 100 records of partition 1 wait or are in hand, which is its window",
    ),
    (
        errors.ShareReplacedError("mail", 1, 5, "the log ends at offset 3"),
        {"share": "mail", "partition": 1, "offset": 5, "differs": "the log ends at offset 3"},
        "the log ends at offset 3; choose a place with topic.reset_share()",
    ),
    (errors.MissingCodecError("lz4", "lz4"), {"codec": "lz4", "extra": "lz4"}, "pip install 'loglib-segments[lz4]'"),
]
IDS = [type(error).__name__ for error, _, _ in CASES]


@pytest.mark.parametrize(("error", "facts", "message"), CASES, ids=IDS)
def test_error_keeps_its_facts_and_says_what_to_do(
    error: errors.LogError, facts: dict[str, object], message: str
) -> None:
    assert isinstance(error, errors.LogError)
    assert message in str(error)
    for name, value in facts.items():
        assert getattr(error, name) == value


@pytest.mark.parametrize(("error", "facts", "message"), CASES, ids=IDS)
def test_error_survives_the_way_to_another_process(
    error: errors.LogError, facts: dict[str, object], message: str
) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        for name, value in facts.items():
            found = getattr(again, name)
            assert found == value or str(found) == str(value)


def test_every_error_has_a_case_and_is_public() -> None:
    named = {each for name, each in inspect.getmembers(errors, inspect.isclass) if not name.startswith("_")}
    classes = {each for each in named if issubclass(each, errors.LogError)}
    assert {type(error) for error, _, _ in CASES} | {errors.LogError} == classes
    public = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    assert {each.__name__ for each in classes} | {"OffsetRange"} == public
    at_the_top = {name for name in loglib.__all__ if name.endswith("Error")}
    assert len(at_the_top) == 19 and at_the_top < public, "those that most programs meet"
    assert all(getattr(loglib, name) is getattr(errors, name) for name in at_the_top)


def test_error_with_other_facts_than_it_declares_is_refused() -> None:
    made = errors.LockedError("lock", holder="pid 5", advice="wait")
    assert str(made) == "lock is held by pid 5; wait"
    kind: Callable[..., object] = errors.LockedError
    for values, by_name in (("lock",), {}), (("lock", "pid 5", "wait", "more"), {}), (("lock", "pid 5"), {"path": "l"}):
        with pytest.raises(TypeError, match="LockedError takes path, holder, advice, not"):
            kind(*values, **by_name)
    with pytest.raises(TypeError, match="nonsense"):
        kind("lock", "pid 5", nonsense=1)


class TornError(errors.CorruptLogError):
    """An error of an application, with one more fact."""

    torn_bytes: int = 0


def test_error_of_an_application_may_have_more_facts() -> None:
    made = TornError("a.log", 12, "nothing", "a CRC", 7)
    again = pickle.loads(pickle.dumps(made))
    assert (again.path, again.torn_bytes, str(again)) == ("a.log", 7, str(made))


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (errors.OffsetOutOfRangeError, LookupError), (errors.InvalidOffsetError, ValueError),
        (errors.GroupNotFoundError, LookupError),
        (errors.RecordTooLargeError, ValueError), (errors.DecodeError, ValueError),
        (errors.ConfigConflictError, ValueError),
        (errors.StorageFullError, OSError), (errors.StorageIOError, OSError), (errors.MissingCodecError, ImportError),
        (errors.ForkedHandleError, errors.LogClosedError),
    ],
)  # fmt: skip
def test_error_is_also_what_python_calls_it(child: type, parent: type) -> None:
    assert issubclass(child, parent)


def test_storage_error_without_a_number_has_one() -> None:
    assert errors.StorageIOError("a", OSError("odd"), "reading").errno == errno.EIO
    assert errors.StorageFullError("a", OSError("odd")).errno == errno.ENOSPC


def test_together_the_most_telling_error_names_all_that_is_lost() -> None:
    full = naming(errors.StorageFullError("a", FULL), lost=(OffsetRange(0, range(2)),))
    failed = naming(errors.WriterFailedError("b", BROKEN), in_doubt=(OffsetRange(1, range(3)),))
    for given in ([full, MemoryError(), failed], [OSError("odd"), failed, full]):
        for each in (full, failed):
            each.errors = ()
        full.lost, failed.lost, failed.in_doubt = (OffsetRange(0, range(2)),), (), (OffsetRange(1, range(3)),)
        found = together(given)
        assert found is failed
        assert list(failed.lost) == [OffsetRange(0, range(2))]
        assert list(failed.in_doubt) == [OffsetRange(1, range(3))]
        assert len(failed.errors) == 2 and full in failed.errors


def test_together_errors_of_the_system_alone_stay_what_they_are() -> None:
    first, second = OSError("odd"), MemoryError()
    assert together([second, first]) is first
    assert first.__notes__ == ["also: MemoryError()"]
    alone = errors.LogClosedError("closed")
    assert together([alone]) is alone and alone.errors == ()
