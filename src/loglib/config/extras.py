"""Extras: the packages that parts of the library need, and the extra that installs each.

Invariant: a package that is missing is named with the command that installs it.

Threads: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_EXTRAS = {
    "anyio": "ui", "boto3": "s3", "botocore": "s3", "click": "cli", "deltalake": "delta", "duckdb": "sql", "h11": "ui",
    "hypothesis": "testing", "lz4": "lz4", "numpy": "arrow", "opentelemetry": "opentelemetry",
    "prometheus_client": "prometheus", "pyarrow": "arrow", "pyspark": "spark", "rich": "cli", "starlette": "ui",
    "uvicorn": "ui", "zstandard": "zstd",
}  # fmt: skip
_WITHOUT_EXTRA = ("pandas", "polars")  # what loglib makes of these is for programs that have them


def how_to_install(error: ImportError, *, what: str = "this") -> str | None:
    """A message that names the missing package and its extra; None if the error is about something else.

    `what` is the part of the library that needs the package.
    """
    package = (error.name or "").partition(".")[0]
    if package in _WITHOUT_EXTRA:
        return f"{what} needs {package}: pip install {package}"
    extra = _EXTRAS.get(package)
    return None if extra is None else f"{what} needs {package}: pip install 'loglib-segments[{extra}]'"


def with_extra(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error, with the command that installs the package if loglib has a use for it."""
    message = how_to_install(error)
    return error if message is None else ModuleNotFoundError(message, name=error.name)


@contextmanager
def named_extras() -> Iterator[None]:
    """A context in which a missing package is a `ModuleNotFoundError` that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise with_extra(error) from None
