"""Paper, RabbitMQ: a durable queue with persistent messages, publisher confirms, and pika.

Invariant: the server has its defaults, but for ports and directories. A message counts as acknowledged when the server
has confirmed it. The consumer acknowledges, up to and including the last of some hundred messages at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paper_roles import PREFETCH, WINDOW, Values, Way, Work, in_batches
from paper_server import Server, free_port, listens, started

SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # not /usr/sbin/rabbitmq-server, which runs the system's own
_QUEUE = "paper"
_ACKNOWLEDGED_TOGETHER = 500


@contextmanager
def running(directory: Path) -> Iterator[Server]:
    """A node with its files in the directory, and the port mapper that every node needs."""
    port, mapper = free_port(), free_port()
    config = directory / "rabbitmq.conf"
    config.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    environment = {
        "ERL_EPMD_PORT": str(mapper),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": "paper@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    mapping = ["epmd", "-port", str(mapper), "-address", "127.0.0.1"]
    with (
        started(mapping, directory, port=mapper, ready=lambda: listens(mapper)),
        started([SERVER], directory, port=port, ready=lambda: _answers(port), environment=environment) as server,
    ):
        yield server


def producer(work: Work) -> Way:
    """One message a round trip on a blocking connection, or more on one with callbacks."""
    if work.way == "1":
        return Single(work.port)
    return Confirmed(work.port, batch=50) if work.way == "50" else Confirmed(work.port, window=WINDOW)


def consume(work: Work) -> Iterator[Values]:
    """All messages of the queue. The connection is there before the clock starts."""
    return _taken(*_opened(work.port), work.messages)


class Single:
    """Each message waits for its confirmation, as pika's blocking channel does."""

    def __init__(self, port: int) -> None:
        import pika

        self._connection: Any = pika.BlockingConnection(_parameters(port))
        self._channel = self._connection.channel()
        self._channel.queue_declare(_QUEUE, durable=True)
        self._channel.confirm_delivery()
        self._persistent = _persistent()

    def send(self, values: list[bytes]) -> None:
        publish, persistent = self._channel.basic_publish, self._persistent
        for value in values:
            publish("", _QUEUE, value, persistent)

    def close(self) -> None:
        self._connection.close()


class Confirmed:
    """Messages whose confirmations come as callbacks: wait for all of a batch, or keep a window open."""

    def __init__(self, port: int, *, batch: int = 1, window: int = 0) -> None:
        self._connection, self._channel = _opened(port)
        self._sent = self._confirmed = self._below = 0
        self._singly: set[int] = set()  # confirmed, above `_below`
        self._batch, self._open = batch, max(0, window - batch)
        declared: list[object] = []
        self._channel.queue_declare(_QUEUE, durable=True, callback=declared.append)
        self._channel.confirm_delivery(self._on_confirmation, callback=declared.append)
        while len(declared) < 2:
            _poll(self._connection)
        self._persistent = _persistent()

    def send(self, values: list[bytes]) -> None:
        publish, persistent = self._channel.basic_publish, self._persistent
        for batch in in_batches(values, self._batch):
            for value in batch:
                publish("", _QUEUE, value, persistent)
            self._sent += len(batch)
            self._wait(self._open)
        self._wait(0)

    def close(self) -> None:
        self._connection.close()
        while not self._connection.is_closed:
            _poll(self._connection)

    def _wait(self, most: int) -> None:
        """Until at most so many messages are not confirmed."""
        while self._sent - self._confirmed > most:
            _poll(self._connection)

    def _on_confirmation(self, frame: Any) -> None:
        if frame.method.NAME != "Basic.Ack":
            raise OSError(f"RabbitMQ refused a message: {frame.method!r}")
        # Tags count from 1. A single confirmation may overtake earlier ones; each of those comes, too.
        tag = frame.method.delivery_tag
        if frame.method.multiple:
            self._singly = {one for one in self._singly if one > tag}
            self._below = tag
        else:
            self._singly.add(tag)
        self._confirmed = self._below + len(self._singly)


def _taken(connection: Any, channel: Any, messages: int) -> Iterator[list[bytes]]:
    values: list[bytes] = []
    handled = 0  # tags count from 1, so this is the tag of the last message that was handled
    channel.basic_qos(prefetch_count=PREFETCH)
    channel.basic_consume(_QUEUE, lambda _channel, _delivery, _properties, body: values.append(body))
    while handled < messages:
        while len(values) < min(_ACKNOWLEDGED_TOGETHER, messages - handled):
            _poll(connection)
        taken, values[:] = values[:], []
        handled += len(taken)
        channel.basic_ack(handled, multiple=True)
        yield taken


def _opened(port: int) -> tuple[Any, Any]:
    """A connection with callbacks, and its channel."""
    import pika

    channels: list[Any] = []
    failures: list[object] = []
    connection = pika.SelectConnection(
        _parameters(port),
        on_open_callback=lambda opened: opened.channel(on_open_callback=channels.append),
        on_open_error_callback=lambda _, error: failures.append(error),
        on_close_callback=lambda _, reason: failures.append(reason),
    )
    connection.ioloop.activate_poller()
    while not channels:
        _poll(connection)
        if failures:
            raise OSError(f"no connection to RabbitMQ: {failures[0]}")
    return connection, channels[0]


def _poll(connection: Any) -> None:
    """Handle what has come from the server, or wait for something to come."""
    connection.ioloop.poll()
    connection.ioloop.process_timeouts()


def _answers(port: int) -> bool:
    import pika

    pika.BlockingConnection(_parameters(port)).close()
    return True


def _parameters(port: int) -> Any:
    import pika

    return pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)


def _persistent() -> Any:
    import pika

    return pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent.value)
