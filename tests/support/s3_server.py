"""An S3 API server on the loopback interface, with a list of the requests that came."""

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
_ANSWERS = {"busy": ("503 Slow Down", b"SlowDown"), "denied": ("403 Forbidden", b"AccessDenied")}


class Request(NamedTuple):
    """A request to the server."""

    method: str
    path: str  # with the query
    range: str | None

    @property
    def is_listing(self) -> bool:
        return "list-type=" in self.path


class Fault(NamedTuple):
    """What happens to a request instead of an answer."""

    applied: bool  # whether the server does what it is asked first
    how: Literal["reset", "busy", "denied", "silence", "half"]  # the connection, 503, 403, no answer, half a body


class S3Server:
    """A running server with one empty bucket."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[Request] = []
        self.faults: list[Callable[[Request], Fault | None]] = []  # the first one judges each request
        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._backend.create_bucket(BUCKET, "us-east-1")

    def uri(self, key: str) -> str:
        """The URI of a topic, or of a directory of topics."""
        where = f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{self.port}"
        return f"s3://key:secret@{BUCKET}/{key}?{where}"

    def uri_of_policy(self, key: str, patch: pytest.MonkeyPatch) -> str:
        """The same without credentials, which stand in the environment then."""
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        return self.uri(key).replace("key:secret@", "")

    @contextmanager
    def failing(self, fault: Callable[[Request], Fault | None]) -> Iterator[None]:
        """Let requests fail as the function says; it returns None for a request that is answered as ever."""
        self.faults[0] = fault
        try:
            yield
        finally:
            self.faults[0] = lambda _: None

    def sync(self, source: Path, key: str, *, without: str = "$") -> None:
        """Copy a directory, as `aws s3 sync` does; `without` is a regular expression of names to leave out."""
        for path in sorted(source.rglob("*")):
            if path.is_file() and not re.fullmatch(without, path.name):
                self.put(f"{key}/{path.relative_to(source)}", path.read_bytes())

    def put(self, key: str, content: bytes) -> None:
        """Put an object past the API, which is slow."""
        self._backend.put_object(BUCKET, key, content)

    def get(self, key: str) -> bytes:
        found = self._backend.get_object(BUCKET, key)
        assert found is not None
        return bytes(found.value)

    def remove(self, key: str) -> None:
        self._backend.delete_object(BUCKET, key)

    def segments(self, key: str) -> list[str]:
        """The keys of a partition's segments."""
        return [each for each in self.keys(key) if each.endswith(".log")]

    def keys(self, key: str) -> list[str]:
        """The keys below a key."""
        return sorted(each for each in list(self._backend.buckets[BUCKET].keys) if each.startswith(f"{key}/"))


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    """A server for the tests of a module."""
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, store: S3Server) -> None:
    """Nothing is repeated after a pause; a test that wants another attempt says so."""
    monkeypatch.setattr("loglib.offload.s3.ATTEMPTS", 1)
    del store.requests[:]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that runs in threads of this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    requests: list[Request] = []

    def record(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        path = environ["PATH_INFO"] + (f"?{query}" if query else "")
        request = Request(environ["REQUEST_METHOD"], path, environ.get("HTTP_RANGE"))
        requests.append(request)
        fault = faults[0](request)
        if fault is None:
            answer: Iterable[bytes] = application(environ, start_response)
            return answer
        return fail(fault, environ, start_response)

    def fail(fault: Fault, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Fail as the fault says. What the client had sent is read first, as far as it is applied."""
        answered: list[Any] = []
        body = b""
        if fault.applied:
            body = b"".join(application(environ, lambda *facts: answered.append(facts)))
        if fault.how in _ANSWERS:
            status, code = _ANSWERS[fault.how]
            start_response(status, [("Content-Type", "application/xml")])
            return [b"<Error><Code>%s</Code><Message>injected</Message></Error>" % code]
        if fault.how == "half":
            start_response(*answered[0][:2])
            return [body[: len(body) // 2]]  # fewer than its length says, and then the connection ends
        if fault.how == "silence":
            silence.wait(30)
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    faults: list[Callable[[Request], Fault | None]] = [lambda _: None]
    silence = threading.Event()
    web = make_server("127.0.0.1", 0, record, threaded=True)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    try:
        server = S3Server(web.server_port)
        server.requests, server.faults = requests, faults
        yield server
    finally:
        silence.set()
        web.shutdown()
        thread.join()
        web.server_close()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()  # the next server of this process begins empty
