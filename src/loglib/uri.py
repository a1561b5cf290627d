"""URI: what the parts of an object store's URI mean, as far as it matters before a store is asked.

Invariant: nothing here asks a store, and no message shows a URI.
"""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["has_credentials", "normal"]

_HADOOP_S3 = ("s3a", "s3n")  # Hadoop's names for S3


def normal(uri: str) -> str:
    """The URI with the scheme as pyarrow writes it."""
    scheme, colon, rest = uri.partition(":")
    scheme = scheme.lower()
    return f"{'s3' if scheme in _HADOOP_S3 else scheme}{colon}{rest}"


def has_credentials(uri: str) -> bool:
    """Whether something stands before the name of the bucket in a URI of S3; False for every path."""
    uri = normal(uri)
    if not uri.startswith("s3://"):
        return False
    place = urlsplit(uri).netloc
    return ":" in place or "@" in place
