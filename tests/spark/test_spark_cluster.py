"""loglib on a Spark cluster whose executors have another Python: one with PySpark and nothing of loglib."""

import json
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from counts import need
from spark_cluster import bare_python, can_hide, cluster, run_driver
from spark_logs import all_records, random_topic

from conftest import SOURCE
from loglib.spark.pickling import by_value

SCRIPT = SOURCE.parent / "scripts" / "spark_archive.py"

PROGRAM = """
    import json, os, sys
    from pyspark.sql import SparkSession
    import loglib.spark

    address, archive, path = sys.argv[1:]
    settings = {
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.task.maxFailures": "1",
    }

    builder = SparkSession.builder.master(address).config(map=settings)
    spark = loglib.spark.configure(builder, archive=archive or None).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")

    def seen(batches):
        import loglib, pyarrow, pyspark
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            daemon = file.read().split("\\0")[1:3]
        text = json.dumps([sys.executable, loglib.__file__, pyspark.__file__, daemon])
        for batch in batches:
            yield pyarrow.RecordBatch.from_pydict({"seen": [text] * batch.num_rows})

    frame = spark.read.format("loglib").option("minPartitions", 5).load(path)
    try:
        saw = {"records": frame.count()}
    except Exception as error:
        print(json.dumps(str(error)))
    else:
        saw["worker"] = json.loads(frame.select("offset").mapInArrow(seen, "seen string").first()["seen"])
        print(json.dumps(saw))
    spark.stop()
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    ran = subprocess.run([sys.executable, SCRIPT, directory], capture_output=True, text=True, check=True)
    return Path(ran.stdout.strip())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def on_cluster(tmp_path_factory: pytest.TempPathFactory, archive: Path, bare: Path) -> dict[str, Any]:
    """What a driver saw on a cluster, with the archive and without it.

    PySpark tells the tasks of a data source where the driver's Python looks for modules. So the worker must not see
    the driver's modules, as on another host.
    """
    directory = tmp_path_factory.mktemp("cluster")
    path = random_topic(directory / "logs" / "topic", seed=1)
    needed = [Path(str(metadata.distribution(name).locate_file(name))) for name in ("fastcrc", "sortedcontainers")]
    need(can_hide(), "unshare, and the right to mount")
    with cluster(directory, hidden=[SOURCE, *needed]) as address:
        saw, error = (
            json.loads(run_driver(PROGRAM, address, each, path, python=bare, directory=directory))
            for each in (archive, "")
        )
    assert isinstance(saw, dict), saw
    facts = {"expected": len(all_records(path)), "work": str(directory / "work"), "bare": str(bare), "error": error}
    return facts | saw


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_executors_that_have_only_pyspark_read_topics_with_the_archive(on_cluster: dict[str, Any]) -> None:
    assert on_cluster["records"] == on_cluster["expected"]
    python, of_loglib, _, _ = on_cluster["worker"]
    assert python == on_cluster["bare"]
    assert of_loglib.startswith(on_cluster["work"]) and "/loglib-archive/loglib/" in of_loglib


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_of_a_cluster_have_our_daemon_and_the_installed_pyspark(on_cluster: dict[str, Any]) -> None:
    _, _, of_pyspark, daemon = on_cluster["worker"]
    assert daemon == ["-m", "loglib_spark_daemon"]
    assert ".zip" not in of_pyspark


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_executor_without_loglib_says_what_is_missing_and_what_to_do(on_cluster: dict[str, Any]) -> None:
    error = on_cluster["error"]
    bare = on_cluster["bare"]
    assert f"loglib cannot run in this worker's Python: no module pyspark_loglib ({bare}, Python 3." in error
    assert "send the file of `make spark-archive`" in error


# --- without a cluster -----------------------------------------------------------------------------------------


def test_archive_is_complete(archive: Path, bare: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as content:
        content.extractall(tmp_path)
    path = random_topic(tmp_path / "topic", seed=1, compression="zlib")
    program = """if True:
        import sys
        import loglib_spark_daemon, pyspark_loglib
        from loglib.spark.source import BatchReader, schema_of
        assert "pyspark_loglib" in sys.modules and BatchReader.__module__ == "loglib.spark.source"
        reader = BatchReader({"path": sys.argv[1]}, schema_of({"path": sys.argv[1]}))
        print(sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task)))
        print({sys.modules[name].__cached__ != sys.modules[name].__file__ for name in ("loglib", "fastcrc")})
    """
    command = [str(bare), "-B", "-c", program, str(path)]
    ran = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert ran.stdout.split()[:1] == [str(len(all_records(path)))], ran.stderr
    assert not list(tmp_path.glob("**/tests"))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no_such_module_here", "no module no_such_module_here"),
        ("half_a_module", "no module fast_but_missing"),
        ("wrong_platform", "wrong ELF class"),
    ],
)
def test_error_names_the_module_that_is_missing(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_module.py").write_text("import fast_but_missing\n")
    (tmp_path / "wrong_platform.py").write_text("raise ImportError('wrong ELF class')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rebuild, arguments = by_value(module, "Reader")
    with pytest.raises(ImportError, match=rf"loglib cannot run in this worker's Python: {message} \({sys.executable}"):
        rebuild(*arguments)
