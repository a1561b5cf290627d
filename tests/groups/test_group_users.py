"""Members of several users: whose files are whose, and who is refused."""

import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from consumers import fill, numbers, rest, wait_for
from forked import in_child

from conftest import QUIET, needs_root
from loglib import Topic

pytestmark = pytest.mark.usefixtures("attentive")


@pytest.fixture
def shared_path() -> Iterator[Path]:
    """Where processes of all users may come. pytest closes its own directory to others when it starts anywhere."""
    with tempfile.TemporaryDirectory(prefix="loglib-users-", ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)
        yield Path(directory) / "topic"


def as_user(uid: int, action: Callable[[], None]) -> Callable[[], None]:
    def act() -> None:
        os.setgid(1000)
        os.setuid(uid)
        action()

    return act


@needs_root
def test_process_of_another_user_does_not_end_the_work_of_a_consumer(shared_path: Path) -> None:
    def own() -> None:
        with Topic.open(shared_path, create=True, partitions=2, **QUIET) as topic:
            fill(topic, 2)
            with topic.group("etl", member="healthy") as group:
                assert sorted(rest(group)) == [0, 1]

                def root() -> None:
                    with Topic.open(shared_path, mode="r") as reading:
                        intruder = reading.group("etl", member="root")
                        assert set(intruder.lag()) == {0, 1} and rest(intruder) == []
                        os.kill(os.getpid(), signal.SIGKILL)

                child = os.fork()
                if not child:
                    os.setresuid(0, 0, 0)
                    root()
                deadline = time.monotonic() + 30
                fill(topic, 2, first=2)
                seen: list[int] = []
                while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    seen += numbers(group.poll(timeout=0.01))
                seen += rest(group)
                assert set(seen) <= {2, 3} and group.members == ["healthy"]  # root may have handled the others
                fill(topic, 2, first=4)
                wait_for(lambda: group.poll() is not None and group.assignment == [0, 1])
                assert {each.offset for each in group.committed().values()} != {0}

    def unprivileged() -> None:
        os.setgid(1000)
        os.setresuid(1000, 1000, 0)  # so that a child may be root again
        own()

    shared_path.parent.chmod(0o777)
    assert in_child(unprivileged) == 0


@needs_root
def test_members_of_several_users_take_over_from_each_other(shared_path: Path) -> None:
    shared_path.parent.chmod(0o777)
    with Topic.open(shared_path, create=True, partitions=1, permissions=0o666, **QUIET) as topic:
        fill(topic, 4)

    def handle_one_and_die() -> None:
        with Topic.open(shared_path, mode="r") as topic:
            group = topic.group("etl", member="worker")
            (record,) = group.poll(max_records=1)
            group.commit(record)
            assert record.value == b"%d" % (os.getuid() % 10)
            os.kill(os.getpid(), signal.SIGKILL)

    old = os.umask(0o077)
    try:
        for uid in (1000, 1001, 1002):
            assert in_child(as_user(uid, handle_one_and_die)) == -signal.SIGKILL
    finally:
        os.umask(old)
    with Topic.open(shared_path, mode="r") as topic, topic.group("etl", member="worker") as group:
        assert rest(group) == [3]


@needs_root
def test_members_of_a_topic_with_narrow_permissions_follow_each_other(shared_path: Path) -> None:
    """root's commits count for the topic's own user, who may read and not write what root has left."""
    shared_path.parent.chmod(0o777)

    def handle(number: int) -> Callable[[], None]:
        def act() -> None:
            with Topic.open(shared_path, mode="r") as topic:
                group = topic.group("etl", member="worker")
                (record,) = group.poll(max_records=1)
                group.commit(record)
                assert record.value == b"%d" % number
                os.kill(os.getpid(), signal.SIGKILL)

        return act

    def make() -> None:
        with Topic.open(shared_path, create=True, partitions=1, **QUIET) as topic:
            fill(topic, 4)

    assert in_child(as_user(1000, make)) == 0
    for number, uid in enumerate((1000, 0, 1000, 0)):
        assert in_child(as_user(uid, handle(number))) == -signal.SIGKILL, number


@needs_root
def test_process_without_rights_is_refused_and_disturbs_nobody(shared_path: Path) -> None:
    with Topic.open(
        shared_path, create=True, partitions=1, permissions=0o644, **QUIET
    ) as topic, topic.group("etl") as group:
        fill(topic, 1)

        def intrude() -> None:
            with Topic.open(shared_path, mode="r") as reading, pytest.raises(PermissionError):
                reading.group("etl")

        assert in_child(as_user(1001, intrude)) == 0
        assert rest(group) == [0]


@pytest.mark.parametrize("umask", [0, 0o077])
@pytest.mark.parametrize("permissions", [0o600, 0o660])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int, permissions: int) -> None:
    old = os.umask(umask)
    try:
        with Topic.open(
            tmp_path / "data/here/topic", create=True, partitions=1, permissions=permissions, **QUIET
        ) as topic:
            fill(topic, 2)
            with topic.group("etl", member="m") as group:
                assert rest(group) == [0, 1]
                modes = {
                    str(each.relative_to(tmp_path)): stat.S_IMODE(each.stat().st_mode) for each in tmp_path.rglob("*")
                }
    finally:
        os.umask(old)
    directory = permissions | (permissions & 0o444) >> 2
    for name, mode in modes.items():
        inside = name.partition("groups/etl/")[2]
        file, tree = permissions, directory
        if "/" in inside:  # guarded by the directory above, and to be read by all who come in
            file, tree = permissions | 0o444, directory | 0o555
        assert mode == (tree if (tmp_path / name).is_dir() or name.endswith("offsets") else file), name
