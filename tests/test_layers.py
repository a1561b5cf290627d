"""The structure: imports point down, file calls stand in one module, and nothing forbidden is used."""

import ast
import sys
from pathlib import Path

import pytest

from conftest import SOURCE, run_python

PACKAGE = SOURCE / "loglib"

# From the ground up. A module may import only from layers below its own.
LAYERS = [
    {"config", "errors"},
    {"files", "turn", "index", "wait"},
    {"batch", "codec", "lock"},
    {"records", "watermark", "arrow", "partitioner"},
    {"segment", "arguments"},
    {"recovery", "retention", "description", "producers"},
    {"log", "open_batch"},
    {"writer", "reader", "transfer", "check"},
    {"flusher", "handles"},
    {"partition"},
    {"topic"},
    {"spark"},
    {"__init__"},
]
WITHIN = {("batch", "codec")}  # in one layer all the same: the format of a batch, and how its body is packed
LAZY = {("records", "arrow")}  # called by Batch.to_arrow, and imported only then

FORBIDDEN = {"mmap", "pickle", "marshal", "shelve", "dbm", "cloudpickle"}
# What concerns files; os.path, pids and random bytes do not. Pipes and polls belong to waiting.
FILE_CALLS = {
    "open", "close", "read", "write", "pread", "pwrite", "preadv", "pwritev", "fsync", "fdatasync", "ftruncate",
    "truncate", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "makedirs", "listdir", "scandir", "walk",
    "stat", "fstat", "lstat", "statvfs", "link", "symlink", "sendfile", "chmod", "fchmod", "chown", "lseek", "fdopen",
}  # fmt: skip
MAY_CALL = {"files": FILE_CALLS, "wait": {"close", "read", "write"}}


def modules() -> dict[str, Path]:
    found = {path.stem: path for path in PACKAGE.glob("*.py")}
    return found | {f"spark/{path.stem}": path for path in (PACKAGE / "spark").glob("*.py")}


def layer_of(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name.split("/", maxsplit=1)[0] in names)


def own_imports(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            inside_spark = name.startswith("spark/")
            if node.level == 0 and (node.module or "").split(".")[0] != "loglib":
                continue
            module = (node.module or "").removeprefix("loglib").strip(".")
            if inside_spark and node.level == 1:
                found.add("spark")
            elif module:
                found.add(module.split(".")[0])
            else:
                found |= {alias.name for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()}
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("loglib") for alias in node.names), f"{name}: import from, relatively"
    return found


def test_every_module_has_its_layer() -> None:
    assert {name.split("/")[0] for name in modules()} == set().union(*LAYERS)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    path = modules()[name]
    for imported in own_imports(name, path):
        if (name, imported) in WITHIN | LAZY or (name.startswith("spark/") and imported == "spark"):
            continue
        assert layer_of(imported) < layer_of(name), f"{name} imports {imported}, which is not below it"


@pytest.mark.parametrize("name", sorted(modules()))
def test_nothing_forbidden_is_imported(name: str) -> None:
    for node in ast.walk(ast.parse(modules()[name].read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        assert not {each.split(".")[0] for each in names} & FORBIDDEN


@pytest.mark.parametrize("name", sorted(set(modules()) - {"files"}))
def test_file_calls_stand_in_files_only(name: str) -> None:
    tree = ast.parse(modules()[name].read_text("utf-8"))
    allowed = MAY_CALL.get(name, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert node.attr not in FILE_CALLS - allowed, f"{name}, line {node.lineno}: os.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open", f"{name}, line {node.lineno}: open()"


def test_every_file_opened_at_run_time_is_opened_by_files(tmp_path: Path) -> None:
    program = """
        import sys
        from loglib import FlushPolicy, Topic

        strangers = set()

        def audit(event, args):  # of the calls that files.py makes from frames of its own
            if event not in ("open", "os.mkdir", "os.scandir", "os.listdir"):
                return
            frame = sys._getframe(1)
            while frame is not None and "/loglib/" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None and not frame.f_code.co_filename.endswith("/files.py"):
                strangers.add((event, frame.f_code.co_filename, frame.f_lineno))

        with Topic.open(sys.argv[1], segment_bytes=4096) as topic:  # imports what is imported late
            topic.append_many([b"x" * 100] * 100, producer=("p", 1), partition=0)
        sys.addaudithook(audit)
        with Topic.open(sys.argv[1]) as topic:
            for number in range(20):
                topic.append_many([b"x" * 100] * 100)
                topic.append(b"y", sync=True)
            topic.retain()
            assert len(list(topic.read())) == 2120
            topic.partition(0).check()
        assert not strangers, strangers
    """
    run_python(program, tmp_path / "topic")


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
