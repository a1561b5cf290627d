"""URI: whether a path is a URI, and what the parts of an object store's URI mean before a store is asked.

Invariant: nothing here asks a store, and no message shows a URI.
"""

from __future__ import annotations

import re

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)  # two letters or more, as in s3://
_HADOOP_S3 = ("s3a", "s3n")  # Hadoop's names for S3


def is_remote(path: str) -> bool:
    """True if the path is a URI of anything but local files."""
    return _SCHEME.match(path) is not None and not path.startswith("file:")


def local_path(path: str) -> str:
    """The path without `file:`."""
    if not path.startswith("file:"):
        return path
    from urllib.parse import unquote, urlsplit

    return unquote(urlsplit(path).path)


def normal(uri: str) -> str:
    """The URI with the scheme as pyarrow writes it."""
    scheme, colon, rest = uri.partition(":")
    scheme = scheme.lower()
    return f"{'s3' if scheme in _HADOOP_S3 else scheme}{colon}{rest}"


def has_credentials(uri: str) -> bool:
    """True if a URI of S3 has credentials before the name of the bucket; False for every path."""
    uri = normal(uri)
    if not uri.startswith("s3://"):
        return False
    from urllib.parse import urlsplit

    place = urlsplit(uri).netloc
    return ":" in place or "@" in place
