"""system/files.py: whole writes or an error, regular files or a refusal, and never a wait that nobody ends."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from conftest import open_files, opened_since, records_of, run_python, settled_files
from loglib import CorruptLogError, LogError, StorageIOError, testing
from loglib.errors import TooManyFilesError
from loglib.log import catalog
from loglib.system import files as module
from loglib.system import system_calls
from loglib.system.directory import Directory
from loglib.system.files import REAL, Files
from loglib.system.system_calls import SystemCalls
from loglib.testing import Call, FaultyFiles, RecordingFiles, ShortWrites, WatchedFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


# --- what may be opened ---------------------------------------------------------------------------------


def plant(kind: str, path: Path) -> None:
    """Something at the path that is no regular file."""
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "symlink":
            path.with_name("elsewhere").write_bytes(b"not to be touched")
            path.symlink_to("elsewhere")
        case "dangling":
            path.symlink_to("nowhere")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))
        case "device":
            path.symlink_to("/dev/null")


KINDS = ["directory", "fifo", "symlink", "dangling", "socket", "device"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["open_read", "open_write", "create", "create-shared"])
def test_only_regular_files_are_opened_and_nothing_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, operation: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "planted"
    plant(kind, path)
    before = settled_files()
    with pytest.raises((CorruptLogError, FileExistsError)) as caught:
        match operation:
            case "create":
                REAL.create(str(path), 0o600)
            case "create-shared":
                REAL.create(str(path), 0o600, exclusive=False)
            case _:
                getattr(REAL, operation)(str(path))
    assert str(path) in str(caught.value)
    assert not opened_since(before), "files were left open"
    if kind == "symlink":
        assert (tmp_path / "elsewhere").read_bytes() == b"not to be touched"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
def test_devices_are_refused(name: str) -> None:
    with pytest.raises(CorruptLogError, match="a regular file, and no link") as caught:
        REAL.open_read(name)
    assert caught.value.path == name


def test_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    for operation in (REAL.open_read, REAL.open_write):
        with pytest.raises(FileNotFoundError):
            operation(str(tmp_path / "missing"))


def test_files_are_not_inherited_by_programs(file: Path) -> None:
    for fd in (REAL.open_read(str(file)), REAL.open_write(str(file)), REAL.create(str(file) + "2", 0o600)):
        assert not os.get_inheritable(fd)
        REAL.close(fd)


# --- modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777], ids=oct)
@pytest.mark.parametrize(
    ("permissions", "directory"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o666, 0o777)], ids=oct
)
def test_modes_are_what_was_asked_for_under_any_umask(
    tmp_path: Path, umask: int, permissions: int, directory: int
) -> None:
    before = os.umask(umask)
    try:
        REAL.write_new(str(tmp_path / "new"), b"content", permissions)
        REAL.make_directory(str(tmp_path / "directory"), permissions)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == permissions
    # A directory that may be read may be searched; one that may be written may be changed.
    assert stat.S_IMODE((tmp_path / "directory").stat().st_mode) & 0o555 == directory & 0o555
    assert stat.S_IMODE((tmp_path / "directory").stat().st_mode) & 0o222 == permissions & 0o222


def test_directory_below_one_with_the_setgid_bit_has_it(tmp_path: Path) -> None:
    """So all that is made in a topic belongs to the group of its users."""
    os.chmod(tmp_path, 0o2770)
    REAL.make_directories(str(tmp_path / "a" / "b"), 0o660)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o2770


def test_directory_that_cannot_be_listed_for_want_of_descriptors_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(place: str | int) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with Directory.open(REAL, str(tmp_path)) as directory:
        monkeypatch.setattr(SystemCalls, "listdir", staticmethod(none_left))
        for look in (directory.names, directory.sizes, lambda: REAL.names_in(str(tmp_path))):
            with pytest.raises(TooManyFilesError, match=re.escape(str(tmp_path)) if look == directory.names else None):
                look()


def test_file_that_exists_is_created_only_if_it_may_be(file: Path) -> None:
    with pytest.raises(FileExistsError):
        REAL.create(str(file), 0o600)
    fd = REAL.create(str(file), 0o600, exclusive=False)
    assert REAL.size(fd) == 10
    REAL.close(fd)


# --- writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_written_back_to_back_at_their_place(file: Path, seed: int) -> None:
    choose = random.Random(seed)
    parts = [bytes(choose.randbytes(choose.randrange(50))) for _ in range(choose.randrange(1, 20))]
    fd = REAL.open_write(str(file))
    assert REAL.write_all(fd, [*parts, bytearray(b"ab"), memoryview(b"cd")], 3) == len(b"".join(parts)) + 4
    os.close(fd)
    assert file.read_bytes()[: 3 + len(b"".join(parts)) + 4] == b"012" + b"".join(parts) + b"abcd"


@pytest.mark.parametrize("at_once", [1, 5, 10, 11])
def test_short_writes_are_carried_on(file: Path, at_once: int) -> None:
    fd = REAL.open_write(str(file))
    assert ShortWrites(at_once).write_all(fd, [b"hello ", b"world"], 4) == 11
    os.close(fd)
    assert file.read_bytes() == b"0123hello world"


def test_write_that_makes_no_headway_is_an_error(file: Path) -> None:
    fd = REAL.open_write(str(file))
    with pytest.raises(OSError, match="wrote nothing"):
        ShortWrites(0).write_all(fd, [b"hello"], 0)
    os.close(fd)


@pytest.mark.usefixtures("unmeasured")  # what it measured would not fit either
def test_write_beyond_the_limit_of_the_file_size_fails_after_what_fitted(tmp_path: Path) -> None:
    printed = run_python(
        """
        import errno, os, resource, signal, sys
        from loglib.system.files import REAL
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        fd = REAL.create(sys.argv[1], 0o600)
        try:
            REAL.write_all(fd, [b"a" * 700, b"b" * 700], 0)
        except OSError as error:
            print(errno.errorcode[error.errno], REAL.size(fd))
        """,
        tmp_path / "limited",
    )
    assert printed.split() == ["EFBIG", "1000"]
    assert (tmp_path / "limited").read_bytes() == b"a" * 700 + b"b" * 300


def test_new_file_whose_writing_fails_is_closed(tmp_path: Path) -> None:
    class Full(Files):
        def write_all(self, *_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    before = settled_files()
    with pytest.raises(OSError, match="No space"):
        Full().write_new(str(tmp_path / "new"), b"x", 0o600)
    assert not opened_since(before)


def test_what_cannot_be_synced_is_reported(tmp_path: Path) -> None:
    from_here, to_here = os.pipe()
    with pytest.raises(OSError):
        REAL.datasync(to_here)
    os.close(from_here)
    os.close(to_here)
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        REAL.sync_directory(str(tmp_path / "file"))
    REAL.sync_directory(str(tmp_path))


# --- reading and copying ----------------------------------------------------------------------------------


def test_whole_file_is_read_up_to_a_limit(file: Path) -> None:
    assert REAL.read_whole(str(file), 10) == b"0123456789"
    with pytest.raises(CorruptLogError, match="10 bytes, expected at most 9") as caught:
        REAL.read_whole(str(file), 9)
    assert caught.value.file_position == 9


class BadSector(Files):
    """Reads what stands before the bad place, and at it fails."""

    def __init__(self, at: int) -> None:
        self.at = at

    def pread(self, fd: int, size: int, position: int) -> bytes:
        if position >= self.at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, min(size, self.at - position), position)


class ShortReads(Files):
    def pread(self, fd: int, size: int, position: int) -> bytes:
        return super().pread(fd, min(size, 3), position)


def test_short_read_is_carried_on_to_the_size_or_the_end(file: Path) -> None:
    files = ShortReads()
    fd = files.open_read(str(file))
    assert files.read_at(fd, 8, 1) == b"12345678"
    assert files.read_at(fd, 100, 1) == b"123456789"
    assert files.read_at(fd, 100, 10) == files.read_at(fd, 0, 0) == b""
    files.close(fd)
    assert files.read_whole(str(file), 10) == b"0123456789"


def test_short_read_ahead_of_a_bad_sector_is_no_end_of_the_file(file: Path) -> None:
    files = BadSector(4)
    fd = files.open_read(str(file))
    assert files.read_at(fd, 4, 0) == b"0123"
    with pytest.raises(OSError, match="Input/output error"):
        files.read_at(fd, 8, 0)
    files.close(fd)
    with pytest.raises(OSError, match="Input/output error"):
        files.read_whole(str(file), 10)


def test_links_in_a_circle_on_the_way_to_a_file_are_not_called_damage(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        REAL.open_read(str(tmp_path / "circle" / "file"))


def test_range_is_copied_within_a_file_and_to_another(file: Path, tmp_path: Path) -> None:
    large = random.Random(1).randbytes((2 << 20) + 77)
    file.write_bytes(large)
    source, target = REAL.open_write(str(file)), REAL.create(str(tmp_path / "copy"), 0o600)
    REAL.copy_range(source, target, start=5, end=len(large) - 5, at=2)
    REAL.copy_range(source, source, start=10, end=1000, at=10)
    with pytest.raises(OSError, match="ended early"):
        REAL.copy_range(source, target, start=len(large) - 5, end=len(large) + 5, at=0)
    os.close(source)
    os.close(target)
    assert file.read_bytes() == large
    assert (tmp_path / "copy").read_bytes()[7:] == large[10:-5]


def test_range_beyond_the_file_cannot_be_sent(file: Path) -> None:
    source = REAL.open_read(str(file))
    from_here, to_here = os.pipe()
    with pytest.raises(OSError, match="ended early"):
        REAL.send_range(to_here, source, 8, 5)
    assert os.read(from_here, 100) == b"89"
    for fd in (source, from_here, to_here):
        os.close(fd)


def test_range_to_a_file_open_for_appending_goes_the_long_way(file: Path, tmp_path: Path) -> None:
    large = random.Random(2).randbytes((2 << 20) + 77)
    file.write_bytes(large)
    with (tmp_path / "appended").open("ab") as target, file.open("rb") as source:
        target.write(b"before")
        target.flush()
        REAL.send_range(target.fileno(), source.fileno(), 3, len(large) - 3)
        with pytest.raises(OSError, match="ended early"):
            REAL.send_range(target.fileno(), source.fileno(), len(large), 1)
    assert (tmp_path / "appended").read_bytes() == b"before" + large[3:]


def test_sending_to_what_cannot_be_written_is_an_error(file: Path) -> None:
    source = REAL.open_read(str(file))
    other = REAL.open_read(str(file))
    with pytest.raises(OSError) as caught:
        REAL.send_range(other, source, 0, 10)
    assert caught.value.errno == errno.EBADF
    for fd in (source, other):
        os.close(fd)


def test_stream_that_is_not_ready_is_waited_for(file: Path) -> None:
    file.write_bytes(bytes(300_000))
    from_here, to_here = os.pipe()
    os.set_blocking(to_here, False)
    source = REAL.open_read(str(file))
    received = bytearray()

    def receive() -> None:
        REAL.wait_readable(from_here)
        while piece := os.read(from_here, 1 << 16):
            received.extend(piece)

    receiver = threading.Thread(target=receive)
    receiver.start()
    REAL.write_stream(to_here, b"x" * 200_000)
    REAL.send_range(to_here, source, 0, 300_000)
    os.close(to_here)
    receiver.join()
    assert received == b"x" * 200_000 + bytes(300_000)
    for fd in (source, from_here):
        os.close(fd)


# --- directories and locks ----------------------------------------------------------------------------------


def test_directories_that_are_missing_are_made(tmp_path: Path) -> None:
    REAL.make_directories(str(tmp_path / "a" / "b" / "c"))
    REAL.make_directories(str(tmp_path / "a" / "b" / "c"))
    assert (tmp_path / "a" / "b" / "c").is_dir()
    REAL.remove_tree(str(tmp_path / "a"))
    assert not REAL.exists(str(tmp_path / "a"))


def test_directory_that_another_process_makes_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_mkdir = os.mkdir

    def slow(path: str) -> None:
        real_mkdir(path)
        raise FileExistsError(errno.EEXIST, "File exists", path)

    monkeypatch.setattr(os, "mkdir", slow)
    REAL.make_directories(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


def test_file_in_the_way_of_a_directory_is_an_error(file: Path) -> None:
    with pytest.raises(OSError):
        REAL.make_directories(str(file / "below"))


def test_sizes_tell_of_everything_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "dangling").symlink_to("nowhere")
    found = REAL.sizes(str(tmp_path))
    assert found == {"one": 1, "link": 3, "dangling": 7}
    assert REAL.exists(str(tmp_path / "dangling"))


def test_file_removed_while_a_directory_is_listed_is_left_out(tmp_path: Path) -> None:
    for name in ("stays", "goes"):
        (tmp_path / name).write_bytes(b"1")

    class Removing(WatchedFiles):
        def after(self, call: Call, result: Any) -> Any:
            if call.name == "listdir":
                (tmp_path / "goes").unlink()
            return result

    assert Removing().sizes(str(tmp_path)) == {"stays": 1}


@pytest.mark.parametrize("name", ["fstat", "fchmod"])
def test_file_that_is_opened_in_vain_is_closed(tmp_path: Path, name: str) -> None:
    # It stayed open when the system would not say what it is.
    files = FaultyFiles(name)
    recorded = RecordingFiles(files)
    with pytest.raises(OSError, match="Input/output"):
        recorded.create(str(tmp_path / "new"), 0o600)
    assert recorded.count("create") == recorded.count("close") == 1


def test_second_handle_does_not_get_the_lock_until_the_first_is_closed(file: Path) -> None:
    one, other = REAL.open_write(str(file)), REAL.open_write(str(file))
    assert REAL.try_lock(one)
    assert not REAL.try_lock(other)
    REAL.close(one)
    assert REAL.try_lock(other)
    REAL.close(other)


def test_file_is_the_same_until_its_name_is_anothers(file: Path) -> None:
    fd = REAL.open_read(str(file))
    assert REAL.same_file(fd, str(file))
    file.rename(file.with_name("moved"))
    assert not REAL.same_file(fd, str(file))
    file.write_bytes(b"another")
    assert not REAL.same_file(fd, str(file))
    REAL.close(fd)


def test_free_space_is_within_the_total(tmp_path: Path) -> None:
    free, total = REAL.free_space(str(tmp_path))
    assert 0 <= free <= total


def test_file_made_by_another_just_before_is_opened_and_none_made_in_its_place(tmp_path: Path) -> None:
    class Racing(WatchedFiles):
        def before(self, call: Call) -> None:
            if call.name == "create" and not raced:
                raced.append(call.path)
                (tmp_path / "file").write_bytes(b"theirs")

    raced: list[str] = []
    files = Racing()
    fd = files.create(str(tmp_path / "file"), 0o600, exclusive=False)
    assert raced and files.read_at(fd, 10, 0) == b"theirs"
    files.close(fd)


def test_file_that_is_opened_if_it_is_there_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        REAL.close(REAL.create(str(tmp_path / "file"), 0o664, exclusive=False))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o664
    (tmp_path / "file").chmod(0o600)
    REAL.close(REAL.create(str(tmp_path / "file"), 0o664, exclusive=False))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600  # as it is


# --- file systems that lack a call --------------------------------------------------------------------


class LackingFiles(Files):
    """A file system that answers some calls with an error."""

    def __init__(self, name: str, number: int) -> None:
        def refuse(*arguments: Any, **places: Any) -> Any:
            raise OSError(number, os.strerror(number))

        setattr(self, name, refuse)


LACKS = [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP]


@pytest.mark.parametrize("number", [*LACKS, errno.ENOLCK, errno.EBADF])
def test_a_file_system_without_locks_is_reported_with_the_reason(number: int, tmp_path: Path) -> None:
    files = LackingFiles("flock", number)
    with pytest.raises(StorageIOError, match="0000: .* while locking it: this file system has no flock.* local disk"):
        testing.open_topic(tmp_path / "t", files=files)
    assert not [each for each in open_files() if str(tmp_path) in each]


def test_another_error_of_a_lock_stays_as_it_is(file: Path) -> None:
    files = LackingFiles("flock", errno.EIO)
    fd = files.open_read(str(file))
    with pytest.raises(OSError, match="Input/output") as caught:
        files.try_lock(fd, str(file))
    assert not isinstance(caught.value, LogError)
    with pytest.raises(OSError, match="Input/output"):
        files.unlock(fd)
    files.close(fd)


@pytest.mark.parametrize("number", [*LACKS, errno.EPERM])
def test_a_file_system_without_hard_links_is_reported_with_the_reason(number: int, file: Path) -> None:
    files = LackingFiles("link", number)
    with pytest.raises(StorageIOError, match="has no hard links, or forbids them here"):
        files.link_name(str(file), str(file) + ".other")
    with Directory.open(files, str(file.parent)) as directory, pytest.raises(StorageIOError, match="no hard links"):
        directory.link(file.name, "other")


def test_a_second_name_that_is_taken_is_the_systems_error_with_both_paths(file: Path) -> None:
    REAL.link_name(str(file), str(file) + ".other")
    with pytest.raises(FileExistsError) as caught:
        REAL.link_name(str(file), str(file) + ".other")
    assert (caught.value.filename, caught.value.filename2) == (str(file), str(file) + ".other")


@pytest.mark.parametrize("number", LACKS)
def test_a_file_system_that_cannot_sync_a_directory_is_used_and_told_once(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module._logged.clear()
    files = LackingFiles("fsync", number)
    with testing.open_topic(tmp_path / "t", partitions=2, files=files) as topic:
        topic.append(b"one", sync=True)
    assert [each.value for each in records_of(tmp_path / "t")] == [b"one"]
    assert [each.getMessage() for each in caplog.records if "cannot sync a directory" in each.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_directory_whose_sync_fails_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output") as caught:
        LackingFiles("fsync", errno.EIO).sync_directory(str(tmp_path))
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("number", [*LACKS, errno.EPERM])
def test_a_file_system_with_permissions_of_its_own_is_used_and_told_once(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module._logged.clear()
    files = LackingFiles("fchmod", number)
    (tmp_path / "a").mkdir()
    for name in ("one", "two"):
        files.close(files.create(str(tmp_path / name), 0o666))
    assert [each.getMessage().partition("this ")[2] for each in caplog.records] == [
        "file system does not take permissions: instead of 666 files and directories have 644"
    ]
    LackingFiles("chmod", number).make_directory(str(tmp_path / "private"), 0o600)  # as it is by itself
    assert len(caplog.records) == 1


def test_another_error_of_permissions_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"):
        LackingFiles("chmod", errno.EIO).make_directory(str(tmp_path / "a"), 0o600)


@pytest.mark.parametrize("number", LACKS)
def test_a_file_that_cannot_be_synced_alone_is_synced_as_a_whole(
    number: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", LackingFiles("fdatasync", number).fdatasync)  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "fsync", synced.append)
    fd = REAL.open_write(str(file))
    REAL.datasync(fd)
    assert synced == [fd]
    monkeypatch.setattr(os, "fdatasync", LackingFiles("fdatasync", errno.EIO).fdatasync)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="Input/output"):
        REAL.datasync(fd)
    REAL.close(fd)


def test_a_call_that_the_interpreter_lacks_is_one_that_the_system_lacks(file: Path, tmp_path: Path) -> None:
    files = Files()
    files.copy_file_range = system_calls._lacking
    source, target = files.open_read(str(file)), files.create(str(tmp_path / "target"), 0o600)
    files.write_all(target, [b"before"], 0)
    files.share_range(target, target, start=0, end=6, at=6)
    assert files.read_at(target, 20, 0) == b"beforebefore"
    files.close(source)
    files.close(target)


class Overlay(Files):
    """An overlay renames no directory of the image below it."""

    def rename(self, source: Any, target: Any, **places: Any) -> None:  # type: ignore[override]
        facts = os.stat(source, dir_fd=places.get("src_dir_fd"))
        if stat.S_ISDIR(facts.st_mode) and not os.path.basename(source).startswith("."):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().rename(source, target, **places)


def test_a_topic_and_a_group_of_an_image_are_deleted_through_an_overlay(tmp_path: Path) -> None:
    files, path = Overlay(), str(tmp_path / "t")
    with testing.open_topic(path, partitions=2, files=files) as topic:
        topic.append(b"one", sync=True)
        with topic.group("g") as group:
            assert group.poll()
        topic.share("s").close()
        topic.delete_share("s")
        topic.delete_group("g")
        assert (topic.groups(), topic.shares()) == ([], [])
    with pytest.raises(LogError, match="an overlay does not rename"):
        catalog.rename(path, "u", check_unused=lambda files, path: None, files=files)
    assert os.listdir(tmp_path) == ["t"]
    catalog.delete(path, check_unused=lambda files, path: None, files=files)
    assert os.listdir(tmp_path) == []


def test_topic_that_cannot_be_renamed_keeps_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    testing.open_topic(path).close()
    files = FaultyFiles("rename", error=errno.EROFS, inner=Files())
    with pytest.raises(OSError, match="Read-only"):
        catalog.rename(path, "u", check_unused=lambda files, path: None, files=files)
    assert os.listdir(tmp_path) == ["t"]


def test_directory_that_cannot_be_renamed_for_another_reason_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "t" / "inner").mkdir(parents=True)
    files = FaultyFiles("rename", error=errno.EACCES)
    with pytest.raises(PermissionError):
        files.move_directory(str(tmp_path / "t"), str(tmp_path / "aside"))
    assert os.listdir(tmp_path) == ["t"] and os.listdir(tmp_path / "t") == ["inner"]


def test_the_file_that_makes_a_topic_of_a_directory_is_moved_first(tmp_path: Path) -> None:
    class Full(Overlay):
        def rename(self, source: Any, target: Any, **places: Any) -> None:  # type: ignore[override]
            if os.path.basename(source) == "a":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().rename(source, target, **places)

    (tmp_path / "t").mkdir()
    for name in ("a", "topic.json"):
        (tmp_path / "t" / name).touch()
    with pytest.raises(OSError, match="No space"):
        Full().move_directory(str(tmp_path / "t"), str(tmp_path / "aside"), first="topic.json")
    assert os.listdir(tmp_path / "t") == ["a"] and os.listdir(tmp_path / "aside") == ["topic.json"]


# --- appending ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["real", "memory", "recording"])
def test_append_writes_at_the_end_whoever_else_appends(tmp_path: Path, kind: str) -> None:
    files: Files = {"real": REAL, "memory": testing.MemoryFiles(), "recording": RecordingFiles()}[kind]
    files.make_directories(str(tmp_path))
    path = str(tmp_path / "entries")
    files.write_new(path, b"begin", 0o600)
    with files.closing(files.open_append(path)) as one, files.closing(files.open_append(path)) as other:
        for number in range(20):
            assert files.append((one, other)[number % 2], b"-%02d" % number) == 3
        expected = b"begin" + b"".join(b"-%02d" % number for number in range(20))
        assert files.read_at(one, 1000, 0) == files.read_at(other, 1000, 0) == expected
    if isinstance(files, RecordingFiles):
        assert files.count("append") == 20


def test_append_of_a_full_disk_is_short_and_then_fails(tmp_path: Path) -> None:
    path = str(tmp_path / "entries")
    REAL.write_new(path, b"", 0o600)
    disk = testing.FullDisk(5)
    with disk.closing(disk.open_append(path)) as fd:
        assert (disk.append(fd, b"abc"), disk.append(fd, b"def")) == (3, 2)
        with pytest.raises(OSError, match="No space"):
            disk.append(fd, b"f")
    assert Path(path).read_bytes() == b"abcde"


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened_for_appending(tmp_path: Path, kind: str) -> None:
    plant(kind, tmp_path / "planted")
    with pytest.raises((CorruptLogError, OSError)):
        REAL.open_append(str(tmp_path / "planted"))
