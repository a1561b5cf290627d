"""Write one file with all that Spark's executors need for loglib, beside PySpark itself; see docs/spark.md.

Usage: spark_archive.py [DIRECTORY]   The file goes to the directory, `dist` if none is given. Its path is printed.

The file is a zip archive, which Spark unpacks on each executor. It holds loglib, `pyspark_loglib`, loglib's daemon for
Spark as a module of its own, the dependencies of loglib, and the codecs that are installed here. A dependency is
compiled, so the archive is for this Python version and platform, and its name says which. It holds byte code as well:
otherwise each executor of each application would compile the modules again.
"""

from __future__ import annotations

import compileall
import re
import shutil
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).resolve().parents[1] / "src"
DISTRIBUTION = "loglib-segments"
CODECS = ("lz4", "zstandard")
DAEMON = "loglib_spark_daemon.py"  # not in the package: it puts the path right before it imports anything


def main() -> None:
    directory = Path(sys.argv[1] if sys.argv[1:] else "dist")
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{write(directory)}\n")


def write(directory: Path) -> Path:
    """Write the archive to the directory, and return its path."""
    with TemporaryDirectory() as temporary:
        root = Path(temporary)
        gather(root)
        compileall.compile_dir(root, quiet=2, stripdir=root, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
        path = directory / name()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(each for each in root.rglob("*") if each.is_file()):
                archive.write(file, file.relative_to(root))
    return path


def name() -> str:
    version = metadata.version(DISTRIBUTION)
    platform = sysconfig.get_platform().replace("-", "_")
    return f"loglib-spark-{version}-cp{sys.version_info.major}{sys.version_info.minor}-{platform}.zip"


def gather(root: Path) -> None:
    """Copy all files of the archive to the directory."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(SOURCE / "loglib", root / "loglib", ignore=ignore)
    shutil.copy(SOURCE / "pyspark_loglib.py", root)
    shutil.copy(SOURCE / "loglib" / "spark" / "daemon.py", root / DAEMON)
    for dependency in [*dependencies(), *CODECS]:
        try:
            distribution = metadata.distribution(dependency)
        except metadata.PackageNotFoundError:
            if dependency in CODECS:
                continue
            raise
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix not in (".pyc", ".pyi"):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), root / file)


def dependencies() -> list[str]:
    """The names of the distributions that loglib itself needs, without those of its extras."""
    found = []
    for requirement in metadata.requires(DISTRIBUTION) or ():
        named = re.match(r"[\w.-]+", requirement)
        if named and "extra ==" not in requirement:
            found.append(named[0])
    return found


if __name__ == "__main__":
    main()
