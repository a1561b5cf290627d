"""jobs/several_topics.py: a worker takes from the first of several topics that has a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import fork, wait
from shared_jobs import only

import loglib
from conftest import MANUAL
from loglib import Job, Topic
from loglib.errors import LogClosedError, ShareFullError, ShareMismatchError, UnsettledError

Open = Callable[..., Topic]


@pytest.fixture
def topics(open_topic: Open, path: Path) -> list[Topic]:
    """Two topics without records: the first one comes first."""
    return [open_topic(path.with_name(name), flush=MANUAL) for name in ("urgent", "normal")]


def add(topic: Topic, *values: bytes) -> None:
    topic.append_many(values, partition=0)
    topic.flush()


@pytest.fixture
def both(topics: list[Topic]) -> Iterator[Any]:
    with loglib.share(topics, "send") as share:
        yield share


def test_first_topic_that_has_a_job_gives_it(topics: list[Topic], both: Any) -> None:
    urgent, normal = topics
    add(normal, b"n1", b"n2", b"n3")
    add(urgent, b"u1")
    found = []
    for job in both.follow(0.0):
        found.append(job.value)
        if job.value == b"n1":
            add(urgent, b"u2")
            assert only(normal, "send").counts.accepted == 0, "it is in hand"
        if job.value == b"u2":
            assert only(normal, "send").counts.accepted == 1, "its accept waits for no job of its topic"
    assert found == [b"u1", b"n1", b"u2", b"n2", b"n3"]
    assert [only(each, "send").counts.accepted for each in topics] == [2, 3]


def test_waiting_thread_learns_of_a_record_of_each_topic(topics: list[Topic], both: Any) -> None:
    for topic in [*topics, *topics]:
        got: list[Job | None] = []
        thread = threading.Thread(target=lambda got=got: got.append(both.take(60)))
        thread.start()
        for _ in range(20):
            while not both._waiting:
                pass
            both.shares[0]._wait.wake()  # by others, who have taken what there was
        add(topic, b"x")
        thread.join()
        assert got[0] is not None and got[0].value == b"x"
        got[0].accept()


def test_thread_that_takes_a_job_wakes_another_one_that_waits(topics: list[Topic], both: Any) -> None:
    add(topics[0], b"x", b"y")
    both._waiting.append(None)  # as a thread has it that waits
    before = both.shares[0]._wait.number()
    job = both.take(0.0)
    assert job is not None and both.shares[0]._wait.number() > before


def test_waiting_thread_learns_of_a_record_of_another_process(path: Path, open_topic: Open) -> None:
    paths = [path.with_name(name) for name in ("urgent", "normal")]
    for each in paths:
        open_topic(each).close()

    def append() -> None:
        with Topic.open(paths[1]) as topic:
            topic.append(b"from elsewhere", sync=True)

    with Topic.open(paths[0], mode="r") as one, Topic.open(paths[1], mode="r") as other:
        share = loglib.share([one, other], "send")
        child = fork(append)
        job = share.take(60)
        assert job is not None and job.value == b"from elsewhere"
        assert wait(child) == 0
        share.close()


def test_threads_of_a_run_share_what_comes_from_all_topics(topics: list[Topic], both: Any) -> None:
    for topic in topics:
        add(topic, *(b"%d" % number for number in range(20)))
    done: list[bytes | None] = []
    both.run(lambda job: done.append(job.value), threads=3, timeout=0.05)
    assert sorted(done) == sorted([b"%d" % number for number in range(20)] * 2)  # type: ignore[type-var]
    assert [only(each, "send").counts.accepted for each in topics] == [20, 20]


def test_loop_that_is_left_releases_its_job_and_stop_ends_it(topics: list[Topic], both: Any) -> None:
    add(topics[1], b"a", b"b")
    with pytest.raises(RuntimeError):
        for job in both:
            raise RuntimeError(job.value)
    job = both.take(0.0)
    assert (job.value, job.attempt) in ((b"a", 2), (b"b", 1))
    job.accept()
    found = []
    for job in both:
        found.append(job)
        both.stop()
    assert len(found) == 1 and both.take(5) is None
    assert only(topics[1], "send").counts.accepted == 2


def test_stop_and_close_end_a_wait(topics: list[Topic]) -> None:
    for end in ("stop", "close"):
        share = loglib.share(topics, end)
        got: list[Job | None] = [None]
        thread = threading.Thread(target=lambda share=share, got=got: got.append(share.take()))
        thread.start()
        while not share._waiting:
            pass
        getattr(share, end)()
        thread.join()
        assert got == [None, None]
        share.close()


def test_full_window_of_one_topic_does_not_hold_the_others_up(topics: list[Topic]) -> None:
    urgent, normal = topics
    add(urgent, b"u1", b"u2")
    add(normal, b"n1")
    with loglib.share(topics, "send", window=1) as share:
        jobs = [share.take(0.0), share.take(0.0)]
        assert [job.value for job in jobs if job is not None] == [b"u1", b"n1"]
        with pytest.raises(ShareFullError):
            share.take(0.0)
        add(normal, b"n2")
        with pytest.raises(ShareFullError):
            share.take(0.01)


def test_options_are_those_of_each_share(topics: list[Topic]) -> None:
    add(topics[0], b"a", b"b")
    with loglib.share(topics, "send", settle="explicit", max_attempts=3) as share:
        with pytest.raises(UnsettledError):
            list(share.follow(0.0))
        share.flush()
    assert [each.share_info("send").settings.max_attempts for each in topics] == [3, 3]


def test_topic_that_is_closed_ends_the_loop_with_its_error(topics: list[Topic], both: Any) -> None:
    topics[1].close()
    with pytest.raises(LogClosedError):
        both.take(0.0)


def test_wrong_topics_are_refused_and_nothing_is_joined(topics: list[Topic]) -> None:
    topics[1].share("other").close()
    with pytest.raises(ValueError, match="different topics"):
        loglib.share([], "send")
    with pytest.raises(ValueError, match="different topics"):
        loglib.share([topics[0], topics[0]], "send")
    with pytest.raises(ShareMismatchError):
        loglib.share([topics[0], topics[1]], "other", window=5)
    assert not topics[0].share_info("other").members
