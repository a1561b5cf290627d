"""The structure: imports point down, file calls stand in one module, and nothing forbidden is used."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

from conftest import SOURCE, run_python

PACKAGE = SOURCE / "loglib"

# From the ground up: modules, or packages as a whole. A module may import only from layers below its own.
LAYERS = [
    {"uri", "times"},
    {"config", "errors", "unique", "display", "tiering/ahead"},
    {"lifetime"},
    {"system/files", "system/heap", "system/turn", "system/wait", "index", "format/jumps"},
    {"system/directory", "system/stream", "format/items"},
    {"format/columns", "format/codec"},
    {"format/batch", "records", "system/lock", "system/mounts", "system/clock"},
    {"format/bundle", "format/watermark", "numbered"},
    {"batch", "format/arrow"},
    {"segment", "arguments", "append/record_arguments"},
    {"bundle", "search", "sealed", "tiering/objects", "tiering/store"},
    {"tiering/storage"},
    {
        "gaps", "recovery", "timeline", "description", "append/producers", "append/partitioner", "transactions/done",
        "transactions/manifest", "role", "archiving/manifest", "tiering/manifest", "tiering/s3",
    },
    {
        "append/open_batch", "append/active", "append/bulk", "append/arrow_bodies", "append/arrow_columns",
        "append/helper", "retention", "transactions/home", "transactions/state", "archiving/place", "archiving/parquet",
    },
    {
        "log", "transactions/store", "archiving/floor", "archiving/objects", "append/spreading", "append/pieces",
        "replication/copied", "replication/members",
    },
    {"donors"},
    {"cursor", "lag", "append/tail", "replication/source", "replication/choice", "tiering/place"},
    {"starts", "append/flush_times", "replication/pair", "tiering/floor"},
    {"append/writer", "reader", "transfer", "verify", "archiving/delta"},
    {"archiving/past", "replication/replica"},
    {"columnar", "kept", "examination"},
    {
        "append/flusher", "append/router", "append/section", "handles", "keeper", "mending",
        "transactions/inbox",
    },
    {"access", "groups", "repair", "transactions/staging", "append/columnar"},
    {"transactions/applying", "replication/origin"},
    {"transactions/serving", "replication/commits"},
    {"partition", "placement", "stats", "replication/replicas"},
    {"open_topic"},
    {"store", "replication/opening"},
    {"consumer_groups", "transactions/transaction", "archiving/archiver", "tiering/uploader"},
    {"topic"},
    {"spool"},
    {"replication"},
    {"logging", "metrics", "aio", "audit"},
    {"spark", "testing"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LAZY = {("batch", "format/arrow")}  # called by Batch.to_arrow, and imported only then

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
MAY_CALL = {"system/files": FILE_CALLS, "system/wait": {"close", "read", "write"}, "spark/session": {"access"},
    # These two are the ends of a process: what it reads and writes are its own standard streams, and files that its
    # user names.
    "cli/program": {"open", "dup2"}, "cli/writing": {"open", "read", "close"},
}  # fmt: skip
# Modules by which files could be reached all the same, and who may have them: for constants only, but for `files`.
FILE_MODULES = {"fcntl", "io", "shutil", "tempfile", "pathlib", "glob", "fileinput", "subprocess"}
MAY_IMPORT = {
    "__init__": {"fcntl"}, "format/columns": {"io"}, "system/files": {"fcntl"}, "testing/memory": {"fcntl"},
    "cli/streams": {"subprocess"},  # its user names a command, such as ssh, that carries a stream
    "archiving/parquet": {"io"},  # the base of what Arrow takes for a file; its calls go to `Files`
    "archiving/objects": {"tempfile"},  # a file that is compared before it is uploaded
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """By name, as "log" or "system/files"."""
    return {str(path.relative_to(PACKAGE).with_suffix("")): path for path in PACKAGE.rglob("*.py")}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a module; it is not changed."""
    return ast.parse(path.read_text("utf-8"))


def place_of(name: str) -> str:
    """What of the layers a module is, or is in: "groups" for "groups/offsets", and "format" for the package itself."""
    package = name.partition("/")[0]
    return name if any(name in layer for layer in LAYERS) else package


def layer_of(name: str) -> int:
    return next(number for number, places in enumerate(LAYERS) if place_of(name) in places)


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


def test_every_module_has_its_layer() -> None:
    packages = {f"{path.parent.name}/__init__" for path in PACKAGE.glob("*/__init__.py")}
    assert {place_of(name) for name in set(modules()) - packages} == set().union(*LAYERS)
    for name in packages - {f"{each}/__init__" for each in set().union(*LAYERS)}:
        assert not own_imports(name, modules()[name]), f"{name} gives a name of its own to what stands in a module"


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    for imported in own_imports(name, modules()[name]):
        if (name, imported) in LAZY or place_of(name) == place_of(imported):
            continue
        assert layer_of(imported) < layer_of(name), f"{name} imports {imported}, which is not below it"


@pytest.mark.parametrize("name", sorted(modules()))
def test_nothing_forbidden_is_imported(name: str) -> None:
    for node in ast.walk(parsed(modules()[name])):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        assert not {each.split(".")[0] for each in names} & FORBIDDEN


@pytest.mark.parametrize("name", sorted(set(modules()) - {"system/files"}))
def test_file_calls_stand_in_files_only(name: str) -> None:
    tree = parsed(modules()[name])
    allowed = MAY_CALL.get(name, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in FILE_CALLS - allowed, f"{name}, line {node.lineno}: os.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"{name}, line {node.lineno}: open()"


@pytest.mark.parametrize("name", sorted(set(modules()) - {"lifetime"}))
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


@pytest.mark.usefixtures("unmeasured")
def test_import_brings_in_nothing_heavy() -> None:
    program = """
        import sys
        import loglib
        heavy = {"pyarrow", "numpy", "pyspark", "pandas", "ctypes", "asyncio", "hashlib", "multiprocessing"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert run_python(program).strip() == "[]"


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
