"""The stream-processing cookbook (docs/spark-cookbook.md): runs recipes and compares each with plain Python.

    python examples/cookbook.py                                 # all recipes on made-up lines
    python examples/cookbook.py windows joins                   # these recipes
    python examples/cookbook.py --log /var/log/access.log       # on an access log
"""

import argparse
import os
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from pyspark import cloudpickle
from pyspark.sql import SparkSession

import accesslog
import loglib.spark
from streams.common import Kitchen

RECIPES = ["windows", "pipeline", "joins", "duplicates", "stateful", "hourly", "delta", "backfill"]
NEEDS = {"stateful": ("google.protobuf", "protobuf>=6.33.5,<7"), "delta": ("deltalake", "deltalake>=1")}
LOG4J = Path(__file__).resolve().with_name("log4j2.properties")  # keeps Spark quiet


def cook(recipe: str, spark: SparkSession, directory: Path, lines: list[bytes]) -> str:
    """Run a recipe; returns what it found. AssertionError if plain Python finds something else."""
    module = import_module(f"streams.{recipe}")
    cloudpickle.register_pickle_by_value(module)  # Spark's workers cannot import it
    said: str = module.run(Kitchen(spark, directory, lines))
    return said


def missing(recipe: str) -> str | None:
    """The package that the recipe needs and that is not installed."""
    module, package = NEEDS.get(recipe, ("", ""))
    try:
        import_module(module or "loglib")
    except ModuleNotFoundError:
        return package
    return None


def session() -> SparkSession:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        loglib.spark.configure(SparkSession.builder.master("local[2]"))
        .config("spark.driver.extraJavaOptions", f'-Dlog4j2.configurationFile="{LOG4J}"')
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")  # as many as cores: each has a state of its own
        .config("spark.sql.adaptive.enabled", "false")  # streams do without it, and warn of it
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", choices=[*RECIPES, []], metavar="recipe", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--log", type=Path, help="an access log (default: 3,000 made-up lines)")
    args = parser.parse_args()
    lines = args.log.read_bytes().splitlines() if args.log else list(accesslog.generate(3000))
    spark = session()
    for recipe in args.recipes or RECIPES:
        if package := missing(recipe):
            print(f"{recipe}: left out, it needs the package {package}")
            continue
        began = monotonic()
        with TemporaryDirectory() as directory:
            said = cook(recipe, spark, Path(directory), lines)
        print(f"{recipe}: {said} ({monotonic() - began:.1f} s)", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
