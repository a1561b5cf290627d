"""Spark's Python workers come from a daemon of ours, which is as good as PySpark's own and quieter."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession
from spark_logs import all_records, random_topic

from conftest import SOURCE, needs_proc, run_python
from loglib.spark import configure
from loglib.spark.daemon import calm, prefer_installed_pyspark

LAUNCHER = SOURCE / "loglib" / "spark" / "python.sh"
INSTALLED = Path(pyspark.__file__).parent
ZIPS = [str(zip_file) for zip_file in sorted((INSTALLED / "python" / "lib").glob("*.zip"))]
VARIABLES = ("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON", "LOGLIB_SPARK_PYTHON")


# --- which interpreter Spark is told of ------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of Python, and a process without a JVM."""
    for name in (*VARIABLES, "PYSPARK_GATEWAY_PORT", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(SparkContext, "_gateway", None)
    return monkeypatch


@pytest.mark.parametrize(
    ("master", "driver", "workers"),
    [
        (None, sys.executable, sys.executable),
        ("local[2]", str(LAUNCHER), str(LAUNCHER)),
        ("local-cluster[1,1,1024]", str(LAUNCHER), str(LAUNCHER)),
        ("spark://host:7077", None, None),
    ],
)
def test_spark_that_started_another_python_did_not_find_the_source(
    master: str | None, driver: str, workers: str | None, fresh: pytest.MonkeyPatch
) -> None:
    builder = SparkSession.Builder()
    configure(builder if master is None else builder.master(master))
    assert [os.environ.get(name) for name in VARIABLES[:2]] == [driver, workers]


def test_cluster_finds_a_python_by_its_name_on_each_host(fresh: pytest.MonkeyPatch) -> None:
    """PySpark reads on executors with the interpreter that it plans with: the driver's path need not exist there."""
    fresh.setenv("PATH", f"/usr/bin:{Path(sys.executable).parent}")
    for _ in range(2):
        configure(SparkSession.Builder().master("spark://host:7077"))
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_planning_with_the_clusters_python_finds_loglib(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv("PYTHONPATH", "/mine")
    fresh.setenv("PYSPARK_PYTHON", sys.executable)
    for _ in range(2):
        configure(SparkSession.Builder().master("spark://host:7077"))
    assert "PYSPARK_DRIVER_PYTHON" not in os.environ
    entries = os.environ["PYTHONPATH"].split(":")
    assert entries[:2] == ["/mine", str(SOURCE)] and len(set(entries)) == len(entries) <= 4
    fresh.setenv("PYSPARK_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ValueError, match="this host has no such program"):
        configure(SparkSession.Builder().master("spark://host:7077"))


def test_archive_is_added_to_what_the_builder_has(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "loglib-spark.zip"
    settings: dict[str, Any] = {"spark.archives": "a.zip", "spark.executorEnv.PYTHONPATH": "b"}
    with pytest.raises(FileNotFoundError, match="make spark-archive"):
        configure(SparkSession.Builder().master("spark://host:7077"), archive=archive)
    archive.touch()
    builder = configure(SparkSession.Builder().master("spark://host:7077").config(map=settings), archive=archive)
    assert builder._options["spark.archives"] == f"a.zip,{archive}#loglib-archive"
    assert builder._options["spark.executorEnv.PYTHONPATH"] == "loglib-archive:b"
    assert builder._options["spark.python.daemon.module"] == "loglib_spark_daemon"
    local = configure(SparkSession.Builder().master("local[2]"), archive=archive)
    assert "spark.archives" not in local._options


def test_interpreter_that_is_set_already_stays(fresh: pytest.MonkeyPatch) -> None:
    for name in VARIABLES[:2]:
        fresh.setenv(name, "/opt/python")
    configure(SparkSession.Builder().master("local[2]"))
    assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == "/opt/python"


def test_jvm_that_runs_already_is_not_told_of_the_launcher(fresh: pytest.MonkeyPatch) -> None:
    """It would not have the variable that names the interpreter to the launcher."""
    fresh.setenv("PYSPARK_GATEWAY_PORT", "25333")
    configure(SparkSession.Builder().master("local[2]"))
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_launcher_that_may_not_run_is_left_out(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr("loglib.spark.session._LAUNCHER", str(tmp_path / "python"))
    configure(SparkSession.Builder().master("local[2]"))
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_launcher_is_the_interpreter_itself_for_all_but_the_daemon() -> None:
    program = "import sys; print(sys.executable, sys.argv[1:])"
    ran = subprocess.run(
        [LAUNCHER, "-c", program, "a b", "-m"],
        env=os.environ | {"LOGLIB_SPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == f"{sys.executable} ['a b', '-m']"


def test_other_processes_of_pyspark_have_the_installed_package_too(tmp_path: Path) -> None:
    """Each stream that is read, and each batch that a stream writes, has one, which compiled PySpark again."""
    variables = {
        "LOGLIB_SPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(ZIPS),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_PATH": str(tmp_path / "no JVM listens here"),
    }
    ran = subprocess.run(
        [LAUNCHER, "-m", "pyspark.sql.streaming.python_streaming_source_runner"],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    where = ran.stderr.splitlines()
    assert "no JVM listens here" in where[-1], ran.stderr
    assert any(f'"{INSTALLED}/sql/streaming/' in line and "in <module>" in line for line in where)
    assert not any(".zip" in line for line in where)


# --- the path ------------------------------------------------------------------------------------------------


def test_installed_pyspark_is_preferred_to_its_zip_file() -> None:
    others = ["", "/somewhere", str(INSTALLED.parent)]
    jar = str(INSTALLED / "jars" / "spark-core_2.13-4.3.0.jar")  # Spark puts it there, and it has no Python
    path = ["", *ZIPS, jar, "/somewhere", str(INSTALLED.parent)]
    assert PathFinder.find_spec("no_such_module", path) is None  # and now Python knows the path
    assert jar in sys.path_importer_cache
    prefer_installed_pyspark(path)
    assert path == others
    assert not sys.path_importer_cache.keys() & {*ZIPS, jar}  # each worker would read their directories again


@needs_proc
def test_packages_of_workers_are_imported_before_the_fork_and_start_no_thread_of_theirs() -> None:
    output = run_python(
        """
        import os, runpy, sys
        os.environ["OMP_NUM_THREADS"] = "1"  # as Spark sets it
        preload = runpy.run_path(sys.argv[1])["preload"]
        preload("no.such.module")
        preload("pyspark.worker")
        threads = {open(f"/proc/self/task/{each}/comm").read().strip() for each in os.listdir("/proc/self/task")}
        modules = {"numpy", "pyarrow", "pandas", "loglib.spark.sink"} & set(sys.modules)
        print(threads - {"jemalloc_bg_thd"}, *sorted(modules))
        """,
        SOURCE / "loglib" / "spark" / "daemon.py",
    )
    threads, *modules = output.split()
    assert "," not in threads and modules == ["loglib.spark.sink", "numpy", "pyarrow"]


def test_job_that_brings_another_loglib_has_it_in_its_workers(tmp_path: Path) -> None:
    """Each worker is forked with the modules of the daemon, which has one."""
    (tmp_path / "loglib").mkdir()
    (tmp_path / "loglib" / "__init__.py").write_text("mine = True")
    output = run_python(
        """
        import importlib, runpy, sys
        import loglib.spark.daemon
        sys.meta_path.append(loglib.spark.daemon.Preloaded())
        (tmp_path,) = sys.argv[1:]
        for path in ("/elsewhere", tmp_path):  # what PySpark does with the files of a job
            sys.path.insert(1, path)
            importlib.invalidate_caches()
            import loglib
            print(hasattr(loglib, "mine"), "loglib.spark" in sys.modules)
        """,
        tmp_path,
    )
    assert output.splitlines() == ["False True", "True False"]


@pytest.mark.parametrize("case", ["another Spark's", "not installed", "no zip"])
def test_path_stays_as_it_is_where_the_zip_file_is_not_the_installed_pysparks(case: str, tmp_path: Path) -> None:
    path = {
        "another Spark's": [str(tmp_path / "python/lib/pyspark.zip"), str(INSTALLED.parent)],
        "not installed": [*ZIPS, str(tmp_path)],
        "no zip": [str(tmp_path), str(INSTALLED.parent)],
    }[case]
    before = list(path)
    prefer_installed_pyspark(path)
    assert path == before


# --- a closed socket -------------------------------------------------------------------------------------------


def sends(sock: socket.socket, _: bool) -> int:
    for _attempt in range(2):  # over TCP only the second one notices
        sock.sendall(bytes(1 << 20))
    return 0


def raises(error: BaseException) -> int:
    raise error


def closed_pair(family: str) -> socket.socket:
    if family == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
    theirs.close()
    return ours


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_worker_whose_socket_the_jvm_closed_ends_without_an_error(family: str) -> None:
    with closed_pair(family) as ours:
        assert calm(sends)(ours, True) == 1


def test_broken_pipe_of_something_else_is_raised() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BrokenPipeError):
        calm(lambda *_: raises(BrokenPipeError()))(ours, True)


def test_error_that_a_broken_pipe_hides_is_raised_with_it() -> None:
    def worker(sock: socket.socket, authenticated: bool) -> int:
        try:
            raise ValueError("the worker's own")
        finally:
            sends(sock, authenticated)

    with closed_pair("unix") as ours, pytest.raises(BrokenPipeError) as raised:
        calm(worker)(ours, True)
    assert isinstance(raised.value.__context__, ValueError)


@pytest.mark.parametrize("error", [ValueError(), OSError(), EOFError(), SystemExit(3)], ids=repr)
def test_other_errors_of_a_worker_are_raised(error: BaseException) -> None:
    with closed_pair("unix") as ours, pytest.raises(type(error)):
        calm(lambda *_: raises(error))(ours, True)


def test_exit_code_of_a_worker_is_passed_on() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert [calm(lambda *_, code=code: code)(ours, True) for code in (0, 7)] == [0, 7]


# --- in Spark ----------------------------------------------------------------------------------------------------

PROGRAM = """
    import json, os, signal, sys, time
    import pyspark
    from pyspark.sql import SparkSession
    import loglib.spark

    settings = {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        # Spark closes the sockets of all idle workers but one; else it would do so after a minute.
        "spark.python.factory.idleWorkerMaxPoolSize": "1",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10",
        "spark.ui.enabled": "false",
    }
    spark = loglib.spark.configure(SparkSession.builder.master("local[2,4]").config(map=settings)).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    saw = {}

    topic = spark.read.format("loglib").option("minPartitions", "4").option("arrowBatchBytes", "1k")
    saw["few"] = []
    for _ in range(2):
        frame = topic.load(sys.argv[1])
        mapped = frame.select("offset").mapInArrow(lambda batches: batches, "offset long")
        saw["few"] += [len(frame.limit(1).collect()), len(frame.take(3)), len(mapped.limit(2).collect())]
    saw["all"] = frame.count()

    def run(function):
        return spark.sparkContext.parallelize([1], 1).map(function).collect()[0]

    def error_of(function):
        try:
            run(function)
        except Exception as error:
            return str(error)

    def seen(_):
        import pyspark
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            return pyspark.__file__, file.read().split("\\0")[1], os.getcwd() in sys.path

    def breaks_a_pipe(_):
        raise BrokenPipeError("of the user")

    saw["worker"] = run(seen)
    worker, daemon = run(lambda _: (os.getpid(), os.getppid()))
    saw["reused"] = run(lambda _: (os.getpid(), os.getppid())) == (worker, daemon)
    saw["pipe"] = error_of(breaks_a_pipe)
    saw["division"] = error_of(lambda _: 1 // 0)
    saw["killed"] = error_of(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    saw["survived"] = run(lambda _: os.getppid()) == daemon
    os.kill(daemon, signal.SIGTERM)
    while os.path.exists(f"/proc/{daemon}"):
        time.sleep(0.01)
    saw["replaced"] = run(lambda _: os.getppid()) != daemon
    spark.sparkContext.addPyFile(sys.argv[2])
    saw["brought"] = run(lambda _: __import__("loglib").mine)
    spark.stop()
    print(json.dumps(saw))
"""


@pytest.fixture(scope="module")
def in_spark(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the program saw in a Spark of its own, and what that Spark wrote to its standard error."""
    directory = tmp_path_factory.mktemp("logs")
    path = random_topic(directory / "topic", seed=1, batches=300)
    with ZipFile(directory / "mine.zip", "w") as brought:
        brought.writestr("loglib/__init__.py", "mine = 7")
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": str(SOURCE), "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(path), str(directory / "mine.zip")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout) | {"records": len(all_records(path))}, ran.stderr


@needs_proc
@pytest.mark.spark
@pytest.mark.slow
def test_job_whose_reader_is_cut_short_prints_no_traceback(in_spark: tuple[dict[str, Any], str]) -> None:
    """It printed BrokenPipeError, once for each worker."""
    saw, errors = in_spark
    assert saw["few"] == [1, 3, 2] * 2
    assert saw["all"] == saw["records"]
    assert "Traceback" not in errors


@needs_proc
@pytest.mark.spark
@pytest.mark.slow
def test_workers_are_forked_by_our_daemon_and_have_the_installed_pyspark(in_spark: tuple[dict[str, Any], str]) -> None:
    assert in_spark[0]["worker"] == [pyspark.__file__, str(LAUNCHER.with_name("daemon.py")), True]


@needs_proc
@pytest.mark.spark
@pytest.mark.slow
def test_daemon_does_what_pysparks_own_does(in_spark: tuple[dict[str, Any], str]) -> None:
    """Its workers are used again, their errors come through, and it survives them. One that ended is replaced.

    A job's own files come before what the daemon has imported.
    """
    saw, _ = in_spark
    assert saw["reused"] and saw["survived"] and saw["replaced"]
    assert saw["brought"] == 7
    assert "BrokenPipeError: of the user" in saw["pipe"]
    assert "ZeroDivisionError" in saw["division"]
    assert "Python worker exited unexpectedly" in saw["killed"]
