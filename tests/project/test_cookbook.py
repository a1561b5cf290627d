"""The recipes of the cookbook agree with plain Python, on made-up lines and on the access log in $LOGLIB_ACCESS_LOG."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_session import local_session

import accesslog
import cookbook

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "spark-cookbook.md"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with local_session(tmp_path_factory.mktemp("warehouse")) as session:
        session.conf.set("spark.sql.session.timeZone", "UTC")
        yield session


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    given = os.environ.get("LOGLIB_ACCESS_LOG")
    return Path(given).read_bytes().splitlines() if given else list(accesslog.generate(3000))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("recipe", cookbook.RECIPES)
def test_recipe_agrees_with_plain_python(recipe: str, spark: SparkSession, tmp_path: Path, lines: list[bytes]) -> None:
    if package := cookbook.missing(recipe):
        pytest.skip(f"needs the package {package}")
    print(cookbook.cook(recipe, spark, tmp_path, lines))


def test_code_that_the_page_quotes_is_that_of_the_recipes() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "examples" / "streams").glob("*.py")]
    quoted = re.findall(r"^```python quoted\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(quoted) > len(cookbook.RECIPES)
    for code in quoted:
        assert any(code in source for source in sources), code


def test_page_has_each_recipe() -> None:
    assert re.findall(r"^\| \[(\w+)\]\(#", PAGE.read_text("utf-8"), re.MULTILINE) == cookbook.RECIPES
