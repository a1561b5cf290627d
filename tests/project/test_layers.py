"""The structure: rooms import only from rooms above them, file calls stand in one module, nothing forbidden is used."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

import pytest

from conftest import SOURCE, run_python
from loglib import Topic

PACKAGE = SOURCE / "loglib"

# A room, which is a module or a package, imports only from the rooms above it.
ROOMS = (
    "errors",
    "config",
    "system",
    "format",
    "segment",
    "log",
    "retention",
    "append",
    "partition",
    "open_topic",
    "groups",
    "jobs",
    "offload",
    "transactions",
    "copies",
    "topic",
    "__init__",
    # What users import by name.
    "testing",
    "logging",
    "aio",
    "metrics",
    "audit",
    "spark",
    "ui",
    "cli",
    "__main__",
)
MOST_AT_THE_TOP = 9  # modules beside the rooms that are packages

FORBIDDEN = {"mmap", "pickle", "marshal", "shelve", "dbm", "cloudpickle"}
# What concerns files; os.path, pids and random bytes do not. Pipes and polls belong to waiting. The files that
# `loglib.testing` has are in memory, or those of `files` behind something, so it calls the system for none.
FILE_CALLS = {
    "open", "close", "read", "write", "pread", "pwrite", "preadv", "pwritev", "readv", "writev", "fsync", "fdatasync",
    "sync", "ftruncate", "truncate", "rename", "renames", "replace", "unlink", "remove", "removedirs", "rmdir", "mkdir",
    "makedirs", "listdir", "scandir", "walk", "fwalk", "stat", "fstat", "lstat", "statvfs", "fstatvfs", "access",
    "link", "symlink", "readlink", "mkfifo", "mknod", "sendfile", "copy_file_range", "splice", "posix_fallocate",
    "posix_fadvise", "chmod", "fchmod", "lchmod", "chown", "fchown", "lchown", "utime", "lseek", "fdopen", "dup",
    "dup2", "memfd_create", "lockf",
}  # fmt: skip
MAY_CALL = {
    "system/system_calls": FILE_CALLS, "system/notify": {"close", "read", "write"}, "spark/session": {"access"},
    # These are the ends of a process: what it reads and writes are its own standard streams, and files that its
    # user names.
    "cli/lines": {"open", "close", "read", "pread", "fstat"}, "cli/signals": {"close"},
    "cli/streams": {"open", "close", "dup2", "fstat", "fdopen"},
}  # fmt: skip
# Modules by which files could be reached all the same, and who may have them: for constants, except the system calls.
FILE_MODULES = {"fcntl", "io", "shutil", "tempfile", "pathlib", "glob", "fileinput", "subprocess"}
MAY_IMPORT = {
    "__init__": {"fcntl"}, "format/columns": {"io"},
    "system/files": {"fcntl"},
    "system/system_calls": {"fcntl", "tempfile"},  # the second for a file that is compared before it is uploaded
    "testing/memory": {"fcntl"},
    "cli/copies": {"subprocess"},  # its user names a command, such as ssh, that carries a stream
    "offload/parquet": {"io"},  # the base of what Arrow takes for a file; its calls go to `Files`
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """By name, as "log" or "system/files"."""
    return {str(path.relative_to(PACKAGE).with_suffix("")): path for path in PACKAGE.rglob("*.py")}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a module; it is not changed."""
    return ast.parse(path.read_text("utf-8"))


def room_of(name: str) -> str:
    """"groups" for "groups/offsets", and "topic" for "topic"."""
    return name.partition("/")[0]


def own_imports(name: str, path: Path) -> set[str]:
    """The modules and packages of loglib that a module imports, wherever the import stands."""
    package = [*name.split("/")[:-1]]
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("loglib") for alias in node.names), f"{name}: import from, relatively"
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            parts = package[: len(package) - node.level + 1] + parts
        elif parts[0] != "loglib":
            continue
        else:
            del parts[0]
        module = "/".join(parts)
        inside = {f"{module}/{alias.name}".strip("/") for alias in node.names} & set(modules())
        found |= inside or {module}
    return found


def test_every_module_is_in_a_room_and_few_stand_at_the_top() -> None:
    assert {room_of(name) for name in modules()} == set(ROOMS)
    assert len([name for name in modules() if "/" not in name]) <= MOST_AT_THE_TOP


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_from_its_room_and_from_those_above_it(name: str) -> None:
    allowed = ROOMS[: ROOMS.index(room_of(name)) + 1]
    below = {each for each in own_imports(name, modules()[name]) if room_of(each or "__init__") not in allowed}
    assert not below, f"{name} imports {sorted(below)}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {name: own_imports(name, path) - {name} for name, path in modules().items()}
    while free := {name for name, imported in imports.items() if not imported & imports.keys()}:
        imports = {name: imported for name, imported in imports.items() if name not in free}
    assert not imports, f"circles, and what imports them: {sorted(imports)}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_nothing_forbidden_is_imported(name: str) -> None:
    for node in ast.walk(parsed(modules()[name])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        assert not {each.split(".")[0] for each in names} & FORBIDDEN


@pytest.mark.parametrize("name", sorted(set(modules()) - {"system/system_calls"}))
def test_file_calls_stand_in_one_module(name: str) -> None:
    tree = parsed(modules()[name])
    allowed = MAY_CALL.get(name, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in FILE_CALLS - allowed, f"{name}, line {node.lineno}: os.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"{name}, line {node.lineno}: open()"


# Calls that make a descriptor, and the module that may make each: there its number is seen to be above 2. The modules
# of the command line need not see to it, because `cli/streams` opens what is closed of the three.
MAKES_DESCRIPTORS = {
    "open", "dup", "pipe", "pipe2", "memfd_create", "eventfd", "timerfd_create", "pidfd_open", "openpty", "socket",
    "socketpair", "create_connection", "create_server", "accept", "fromfd", "epoll", "kqueue", "Popen", "run",
    "inotify_init", "inotify_init1", "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "mkstemp",
}  # fmt: skip
MAY_MAKE = {
    "system/system_calls": {"os.open", "os.dup"}, "system/notify": {"os.pipe"},
    "system/doorbell": {"socket.socket"},
    "cli/lines": {"os.open"}, "cli/signals": {"os.pipe"}, "cli/streams": {"os.open"},
    "cli/copies": {"socket.create_server", "socket.socket", "listener.accept", "subprocess.Popen"},
    "ui/server": {"socket.create_server"},
}
_MAKERS = {"os", "socket", "select", "subprocess", "tempfile", "listener", "ctypes"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_descriptors_are_made_where_their_numbers_are_seen_to(name: str) -> None:
    for node in ast.walk(parsed(modules()[name])):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in _MAKERS:
            made = f"{called.value.id}.{called.attr}"
            assert called.attr not in MAKES_DESCRIPTORS or made in MAY_MAKE.get(name, set()), f"{name}: {made}"


@pytest.mark.parametrize("name", sorted(set(modules()) - {"system/process"}))
def test_forks_exits_and_frames_are_seen_to_in_one_module(name: str) -> None:
    for node in ast.walk(parsed(modules()[name])):
        used = node.attr if isinstance(node, ast.Attribute) else ""
        assert used not in {"register_at_fork", "WeakSet", "Finalize", "_getframe"}, f"{name}: {used}"
        if isinstance(node, ast.Import):
            assert "atexit" not in {each.name for each in node.names}, f"{name}, line {node.lineno}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_module_has_another_way_to_files(name: str) -> None:
    for node in ast.walk(parsed(modules()[name])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
            assert node.module != "os", f"{name}, line {node.lineno}: os is imported whole, so that its calls show"
        reached = {each.split(".")[0] for each in names} & FILE_MODULES
        assert reached <= MAY_IMPORT.get(name, set()), f"{name} imports {reached}"


@pytest.mark.parametrize("keyed", [False, True], ids=["keyless", "keyed"])
@pytest.mark.parametrize(("count", "rooms"), [(10, set()), (5000, {"format", "system"})], ids=["few", "many"])
def test_append_many_leaves_its_room_only_for_lower_ones(
    count: int, rooms: set[str], keyed: bool, open_topic: Callable[..., Topic]
) -> None:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(room_of(str(path.relative_to(PACKAGE))))

    topic = open_topic(partitions=4)
    keys = [b"%d" % (number % 50) for number in range(count)] if keyed else None
    topic.append_many([b"value"] * count, keys=keys)  # makes the writers
    sys.setprofile(note)
    try:
        topic.append_many([b"value"] * count, keys=keys)
    finally:
        sys.setprofile(None)
    assert entered == {"append"} | rooms


@pytest.mark.usefixtures("unmeasured")
def test_import_brings_in_nothing_heavy() -> None:
    program = """
        import sys
        import loglib
        heavy = {"pyarrow", "numpy", "pyspark", "pandas", "ctypes", "asyncio", "hashlib", "multiprocessing"}
        heavy |= {"html", "urllib.parse", "concurrent.futures", "tempfile", "subprocess"}
        print(sorted(heavy & set(sys.modules)))
        rooms = ("loglib.copies.", "loglib.offload.", "loglib.transactions.store", "loglib.log.repair")
        print([name for name in sys.modules if name.startswith(rooms) and name != "loglib.copies.parts"])
    """
    assert run_python(program).split() == ["[]", "[]"]


def test_a_topic_without_copies_and_groups_loads_neither() -> None:
    program = """
        import sys, tempfile, os
        import loglib
        with tempfile.TemporaryDirectory() as place:
            with loglib.Topic.open(
                os.path.join(place, "orders"), create=True, retention=loglib.Retention(age=None)
            ) as topic:
                topic.append(b"1", sync=True)
                assert len(list(topic.read())) == 1
            loglib.Topic.open(os.path.join(place, "orders"), mode="r").close()
        rooms = ("loglib.copies.", "loglib.offload.", "loglib.groups.", "loglib.jobs.", "loglib.log.verify")
        rooms += ("loglib.log.donors",)
        loaded = {name for name in sys.modules if name.startswith(rooms)}
        # The first looks at the arguments alone, and the others have the methods of `Topic`.
        print(sorted(loaded - {"loglib.copies.parts", "loglib.groups.grouped_topic", "loglib.jobs.sharing_topic"}))
    """
    assert run_python(program).strip() == "[]"


def test_each_public_name_can_be_imported_and_is_listed() -> None:
    program = """
        import loglib
        assert set(loglib.__all__) <= set(dir(loglib))
        for name in loglib.__all__:
            assert getattr(loglib, name) is not None
        from loglib import *
        try:
            loglib.nothing
        except AttributeError as error:
            print(error)
    """
    assert run_python(program).strip() == "module 'loglib' has no attribute 'nothing'"


def test_importing_spark_discovery_costs_nothing_heavy_without_spark() -> None:
    program = """
        import sys
        sys.modules["pyspark"] = None  # as on a machine without it
        import pyspark_loglib
        print(hasattr(pyspark_loglib, "DefaultSource"), "pyarrow" in sys.modules)
    """
    assert run_python(program).strip() == "False False"


def test_platform_without_file_locks_is_told_so() -> None:
    program = """
        import sys
        sys.modules["fcntl"] = None  # as on a platform without it
        try:
            import loglib
        except ImportError as error:
            print(error)
    """
    assert "Linux and macOS" in run_python(program)


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert sys.version_info >= (3, 11)
