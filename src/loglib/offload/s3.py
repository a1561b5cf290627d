"""S3: a store below a key of a bucket, in an object store that speaks the S3 API.

Invariant: whatever is made under a new name is made by a conditional put (`If-None-Match: *`), so the store refuses a
name that is taken. An object appears when all its bytes are there: a small one with its request, a large one when its
parts are completed. A store that ignores the condition is noticed at the first manifest, and refused.

pyarrow reads object stores here, and does not upload: it has no conditional put, and it completes the half of an
object when writing ends with an error (decision 34).

    up to 16 MiB    one PutObject
    larger          parts of 16 MiB, one after the other; CompleteMultipartUpload is conditional

Parts of uploads that have died are not visible, but cost money. The next upload of the same name removes them.

Threads: safe for all. Processes: any number.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..errors import CorruptLogError, LogError
from ..system.files import REAL
from ..system.process import PerProcess, fork_lock, importing
from ..system.system_calls import nameless_file
from .object_files import connect
from .storage import Storage
from .store import NewFile, Source, compare, put_content

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
    """A store below a key of a bucket."""

    def __init__(self, storage: Storage, *, connections: int) -> None:
        if not storage.uri.startswith("s3:"):
            raise ValueError(f"{storage.root}: uploading goes to s3://... or to a directory")
        _, inner = connect(storage.uri, storage.root)  # reading goes there, too
        self.path = storage.root
        self._bucket, _, prefix = inner.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client(storage.uri, connections)
        self._is_conditional = False  # True after the store has refused a name that is taken

    def close(self) -> None:
        self._client.close()

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _system_errors(self, name: str) -> Iterator[None]:
        """Turn errors of the store into those of the system, with the path and without credentials."""
        from botocore.exceptions import BotoCoreError, ClientError

        path = self.path_of(name)
        try:
            yield
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in _MISSING:
                raise FileNotFoundError(errno.ENOENT, "no such object", path) from error
            if code in _TAKEN:
                raise FileExistsError(errno.EEXIST, "there is an object of this name", path) from error
            raise OSError(errno.EIO, f"{code}: {error.response['Error'].get('Message', '')}", path) from error
        except BotoCoreError as error:
            raise OSError(errno.EIO, str(error), path) from error

    # --- reading -------------------------------------------------------------------------------------

    def size(self, name: str) -> int | None:
        try:
            with self._system_errors(name):
                return int(self._client.head_object(**self._at(name))["ContentLength"])
        except FileNotFoundError:
            return None

    def blocks(self, name: str) -> Iterator[bytes]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", self.path_of(name))
        for start in range(0, size, _RANGE_BYTES):
            yield self._range(name, start, min(start + _RANGE_BYTES, size))

    def _range(self, name: str, start: int, end: int) -> bytes:
        """The bytes [start, end). An answer that breaks off is requested again, which botocore leaves to its caller."""
        from botocore.exceptions import BotoCoreError

        request = self._at(name) | {"Range": f"bytes={start}-{end - 1}"}
        with self._system_errors(name):
            for _ in range(ATTEMPTS - 1):
                with suppress(BotoCoreError):
                    return bytes(self._client.get_object(**request)["Body"].read())
            return bytes(self._client.get_object(**request)["Body"].read())

    def read(self, name: str) -> bytes:
        return b"".join(self.blocks(name))

    def names_in(self, directory: str) -> list[str]:
        prefix = f"{self._prefix}{directory}/"
        with self._system_errors(directory):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            return [each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ())]

    # --- writing -------------------------------------------------------------------------------------

    def put(self, name: str, size_bytes: int, source: Source, *, replace: bool = False) -> bool:
        condition = {} if replace else _IF_NEW
        try:
            with self._system_errors(name):
                if size_bytes > PART_BYTES:
                    self._put_parts(name, size_bytes, source, condition)
                else:
                    self._client.put_object(**self._at(name), Body=source(size_bytes, 0), **condition)
        except FileExistsError:
            return False
        return True

    def _put_parts(self, name: str, size_bytes: int, source: Source, condition: dict[str, str]) -> None:
        part_bytes = max(PART_BYTES, -(-size_bytes // MOST_PARTS))
        self._remove_parts(name)
        place = self._at(name)
        upload = place | {"UploadId": self._client.create_multipart_upload(**place)["UploadId"]}
        try:
            parts = []
            for number, start in enumerate(range(0, size_bytes, part_bytes), 1):
                content = source(min(part_bytes, size_bytes - start), start)
                answer = self._client.upload_part(**upload, PartNumber=number, Body=content)
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)
        except BaseException:
            self._abort(upload)
            raise

    def _abort(self, upload: dict[str, str]) -> None:
        with suppress(Exception):  # the next upload of the name tries it again
            self._client.abort_multipart_upload(**upload)

    def _remove_parts(self, name: str) -> None:
        """Remove the parts of uploads that have died."""
        place = self._at(name)
        try:
            with self._system_errors(name):
                listing = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=place["Key"])
        except OSError as error:  # such as the right to list them
            logger.info("%s: parts of uploads that have died may be left: %s", self.path_of(name), error)
            return
        for each in listing.get("Uploads", ()):
            if each["Key"] == place["Key"]:
                self._abort(place | {"UploadId": each["UploadId"]})

    def put_manifest(self, name: str, content: bytes) -> bool:
        if not put_content(self, name, content):
            self._is_conditional = True
            return False
        if not self._is_conditional and put_content(self, name, content):
            raise LogError(
                f"{self.path}: this store ignores If-None-Match, so two processes could both commit; "
                "use one that knows conditional writes"
            )
        self._is_conditional = True
        return True

    @contextmanager
    def new_file(self, name: str) -> Iterator[NewFile]:
        """A local file. At the end of the block it is uploaded and compared; an object that differs is removed."""
        path = self.path_of(name)
        with REAL.closing(nameless_file()) as fd:
            yield NewFile(REAL, fd, path)
            size_bytes = REAL.size(fd)
            if not self.put(name, size_bytes, lambda size, position: REAL.read_at(fd, size, position)):
                raise LogError(f"{path} is there already, and nobody but this call knows its name")
            try:
                compare(self, name, REAL, fd, size_bytes, expected="the bytes that were uploaded")
            except CorruptLogError as error:
                self.remove(name)
                found = "an object that differs from what was uploaded"
                raise CorruptLogError(path, 0, found, "the same bytes") from error

    def remove(self, name: str) -> None:
        with self._system_errors(name):
            self._client.delete_object(**self._at(name))


def _client(uri: str, connections: int) -> Any:
    """A client for the URI, whose parameters have the names that pyarrow gives them."""
    try:
        from botocore.config import Config
    except ImportError as error:
        said = 'uploading to S3 needs the extra [s3]: pip install "loglib-segments[s3]"'
        raise ImportError(said, name="boto3") from error

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
    with importing:
        import boto3

    return boto3.session.Session()


_session = PerProcess(_new_session)  # what this process knows of AWS: to read it takes 100 ms; a client more takes 3
