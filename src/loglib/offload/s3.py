"""S3: a place in an object store that speaks the S3 API.

Invariant: whatever is made under a new name is made by a conditional put (`If-None-Match: *`), so the store refuses a
name that is taken. An object appears when all its bytes are there: a small one with its request, a large one when its
parts are completed. A store that ignores the condition is found out at the first manifest, and refused.

pyarrow reads object stores here, and does not upload: it has no conditional put, and it completes the half of an
object when writing ends with an error (decision 34).

    up to 16 MiB    one PutObject
    larger          parts of 16 MiB, one after the other; CompleteMultipartUpload is conditional

Parts of uploads that have died are not seen, but cost money. The next upload of the same name removes them.

Threads: safe for all. Processes: any number.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..errors import LogError
from ..log.copy_role import MANIFESTS
from ..system.process import PerProcess, fork_lock
from .manifest_log import OpenSlots
from .object_files import connect
from .storage import Storage
from .tier_store import Source

__all__ = ["S3Store"]

logger = logging.getLogger("loglib")

PART_BYTES = 16 << 20
_RANGE_BYTES = 8 << 20  # of one request that reads
MOST_PARTS = 10_000
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
ATTEMPTS = 5
_making = fork_lock()  # a session makes one client at a time
_IF_NEW = {"IfNoneMatch": "*"}
_TAKEN = ("PreconditionFailed", "NoSuchUpload")  # the second: a repeated completion, whose first try was answered late
_MISSING = ("NoSuchKey", "404", "NotFound")


class S3Store:
    """A place below a key of a bucket."""

    def __init__(self, storage: Storage, *, connections: int, manifests: str = MANIFESTS) -> None:
        """`manifests`: the directory of the place's manifests."""
        if not storage.uri.startswith("s3:"):
            raise ValueError(f"{storage.root}: uploading goes to s3://... or to a directory")
        _, inner = connect(storage.uri, storage.root)  # reading goes there, too
        self.path = storage.root
        self._bucket, _, prefix = inner.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client(storage.uri, connections)
        self.manifests: OpenSlots = _Manifests(self, manifests)

    def close(self) -> None:
        self._client.close()

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def size(self, name: str) -> int | None:
        try:
            with self._telling(name):
                return int(self._client.head_object(**self._at(name))["ContentLength"])
        except FileNotFoundError:
            return None

    def upload(self, name: str, size_bytes: int, source: Source) -> bool:
        if size_bytes > PART_BYTES:
            return self._upload_parts(name, size_bytes, source, **_IF_NEW)
        return self.put_new(name, source(size_bytes, 0))

    def upload_again(self, name: str, size_bytes: int, source: Source) -> None:
        if size_bytes > PART_BYTES:
            self._upload_parts(name, size_bytes, source)
        else:
            self.replace(name, source(size_bytes, 0))

    def put_new(self, name: str, content: bytes) -> bool:
        """Make an object; False if there is one of that name."""
        with self._telling(name):
            try:
                self._client.put_object(**self._at(name), Body=content, **_IF_NEW)
            except self._client.exceptions.ClientError as error:
                if _code(error) not in _TAKEN:
                    raise
                return False
        return True

    def _upload_parts(self, name: str, size_bytes: int, source: Source, **condition: str) -> bool:
        part_bytes = max(PART_BYTES, -(-size_bytes // MOST_PARTS))
        place = self._at(name)
        self._remove_parts(name)
        with self._telling(name):
            upload = place | {"UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
            try:
                parts = []
                for number, start in enumerate(range(0, size_bytes, part_bytes), 1):
                    content = source(min(part_bytes, size_bytes - start), start)
                    made = self._client.upload_part(**upload, PartNumber=number, Body=content)
                    parts.append({"PartNumber": number, "ETag": made["ETag"]})
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
            except self._client.exceptions.ClientError as error:
                self._abort(upload)
                if _code(error) not in _TAKEN:
                    raise
                return False
            except BaseException:
                self._abort(upload)
                raise
        return True

    def _abort(self, upload: dict[str, str]) -> None:
        with suppress(Exception):  # the next upload of the name tries it again
            self._client.abort_multipart_upload(**upload)

    def _remove_parts(self, name: str) -> None:
        """Remove the parts of uploads that have died."""
        place = self._at(name)
        try:
            with self._telling(name):
                found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=place["Key"])
        except OSError as error:  # such as the right to list them
            logger.info("%s: parts of uploads that have died may be left: %s", self.path_of(name), error)
            return
        for each in found.get("Uploads", ()):
            if each["Key"] == place["Key"]:
                self._abort(place | {"UploadId": each["UploadId"]})

    def blocks(self, name: str) -> Iterator[bytes]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.path_of(name))
        for start in range(0, size, _RANGE_BYTES):
            yield self._range(name, start, min(start + _RANGE_BYTES, size))

    def _range(self, name: str, start: int, end: int) -> bytes:
        """The bytes [start, end). An answer that breaks off is asked for again, which botocore leaves to its caller."""
        from botocore.exceptions import BotoCoreError

        asked = self._at(name) | {"Range": f"bytes={start}-{end - 1}"}
        with self._telling(name):
            for _ in range(ATTEMPTS - 1):
                with suppress(BotoCoreError):
                    return bytes(self._client.get_object(**asked)["Body"].read())
            return bytes(self._client.get_object(**asked)["Body"].read())

    def replace(self, name: str, content: bytes) -> None:
        with self._telling(name):
            self._client.put_object(**self._at(name), Body=content)

    def names_below(self, directory: str) -> list[str]:
        """The names of the objects in a directory."""
        prefix = f"{self._prefix}{directory}/"
        with self._telling(directory):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return [each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ())]

    def remove(self, name: str) -> None:
        with self._telling(name):
            self._client.delete_object(**self._at(name))

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Make errors of the store those of the system, with the path and without credentials."""
        from botocore.exceptions import BotoCoreError, ClientError

        path = self.path_of(name)
        try:
            yield
        except ClientError as error:
            if _code(error) in _MISSING:
                raise FileNotFoundError(errno.ENOENT, "no such object", path) from error
            raise OSError(errno.EIO, f"{_code(error)}: {error.response['Error'].get('Message', '')}", path) from error
        except BotoCoreError as error:
            raise OSError(errno.EIO, str(error), path) from error


class _Manifests:
    """The manifests of a place."""

    def __init__(self, store: S3Store, directory: str) -> None:
        self._store = store
        self._directory = directory
        self._is_conditional = False  # whether the store was seen to refuse a name that is taken

    def path_of(self, name: str) -> str:
        return self._store.path_of(self._name(name))

    def names(self) -> list[str]:
        return self._store.names_below(self._directory)

    def read(self, name: str) -> bytes:
        return b"".join(self._store.blocks(self._name(name)))

    def put_new(self, name: str, content: bytes) -> bool:
        name = self._name(name)
        if not self._store.put_new(name, content):
            self._is_conditional = True
            return False
        if not self._is_conditional and self._store.put_new(name, content):
            raise LogError(
                f"{self._store.path}: this store ignores If-None-Match, so two processes could both commit; "
                "use one that knows conditional writes"
            )
        self._is_conditional = True
        return True

    def remove(self, name: str) -> None:
        self._store.remove(self._name(name))

    def _name(self, name: str) -> str:
        return f"{self._directory}/{name}"


def _code(error: Any) -> str:
    return str(error.response["Error"]["Code"])


def _client(uri: str, connections: int) -> Any:
    """A client for what the URI says, with the names that pyarrow gives these things."""
    try:
        from botocore.config import Config
    except ImportError as error:
        raise ImportError('uploading to S3 needs the extra [s3]: pip install "loglib-segments[s3]"') from error

    parts = urlsplit(uri)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    endpoint = given.get("endpoint_override")
    if endpoint is not None:
        endpoint = f"{given.get('scheme', 'https')}://{endpoint}"
    user, secret = (unquote(each) if each else None for each in (parts.username, parts.password))
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        s3={"addressing_style": "auto" if endpoint is None else "path"},
    )  # fmt: skip
    with _making:
        return _session().client(
            "s3", region_name=given.get("region"), endpoint_url=endpoint, aws_access_key_id=user,
            aws_secret_access_key=secret, verify=given.get("tls_ca_file_path"), config=config,
        )  # fmt: skip


def _new_session() -> Any:
    import boto3

    return boto3.session.Session()


_session = PerProcess(_new_session)  # what this process knows of AWS: to read it takes 100 ms; a client more takes 3
