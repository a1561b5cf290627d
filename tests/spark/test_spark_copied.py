"""A checkpoint that is copied, in a real Spark: the copy writes its rows or is refused, and the original goes on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from spark_session import local_session
from spark_staging import make, numbers, values

from loglib import Topic

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse"), master="local[2]") as session:
        yield session


def run(spark: SparkSession, base: Path, name: str, to: str) -> None:
    stream = spark.readStream.format("loglib").option("startingOffsets", "earliest").load(str(base / "in"))
    writer = stream.select("key", "value").writeStream.format("loglib").trigger(availableNow=True)
    writer.option("checkpointLocation", str(base.parent / name)).start(str(base / to)).awaitTermination()


def feed(path: Path) -> None:
    with Topic.open(path, create=True) as topic:
        topic.append_many(numbers(20))


def test_copied_checkpoint_writes_its_rows_to_another_topic_and_none_are_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    base = tmp_path / "logs"
    one, other = make(base / "one"), make(base / "other")
    feed(make(base / "in"))
    run(spark, base, "original", "one")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    feed(base / "in")
    run(spark, base, "original", "one")
    run(spark, base, "copy", "other")
    assert (len(values(one)), len(values(other))) == (40, 20)
    feed(base / "in")
    with pytest.raises(PySparkException, match="is a copy of"):
        run(spark, base, "copy", "one")
    run(spark, base, "original", "one")
    assert len(values(one)) == 60
    shutil.rmtree(one)
    make(one)  # the next batch is not one that the old topic has
    feed(base / "in")
    run(spark, base, "original", "one")
    assert len(values(one)) == 20
