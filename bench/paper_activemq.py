"""Paper, ActiveMQ: a queue in KahaDB with persistent messages, over STOMP with stomp.py.

Invariant: the broker has its defaults and Debian's heap, but KahaDB syncs once a second, as the paper had it ("we
configured the broker in all systems to asynchronously flush messages"). A message counts as acknowledged when the
broker has sent the receipt for it or for its transaction.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paper_roles import PREFETCH, WINDOW, Values, Way, Work, in_batches
from paper_server import Server, free_port, listens, started

HOME = Path("/usr/share/activemq")
_QUEUE = "/queue/paper"
_ACKNOWLEDGED_TOGETHER = 100  # a queue hands out 200 messages, and no more before some are acknowledged (maxPageSize)
_WAIT_SECONDS = 60
_CONFIGURATION = """\
<beans xmlns="http://www.springframework.org/schema/beans" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="http://www.springframework.org/schema/beans
         http://www.springframework.org/schema/beans/spring-beans-2.0.xsd
         http://activemq.apache.org/schema/core http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" useJmx="false" brokerName="paper" dataDirectory="{data}">
    <persistenceAdapter>
      <kahaDB directory="{data}/kahadb" journalDiskSyncStrategy="periodic"/>
    </persistenceAdapter>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"""


@contextmanager
def running(directory: Path) -> Iterator[Server]:
    """A broker with its files in the directory."""
    port = free_port()
    configuration = directory / "activemq.xml"
    configuration.write_text(_CONFIGURATION.format(data=directory / "data", port=port))
    own = dict.fromkeys(("activemq.base", "activemq.conf", "java.io.tmpdir"), directory)
    places = own | {"activemq.home": HOME}
    command = [
        "java", "-Xms512M", "-Xmx512M", "-Dorg.apache.activemq.UseDedicatedTaskRunner=true",
        *(f"-D{name}={place}" for name, place in places.items()),
        "-jar", str(HOME / "bin" / "activemq.jar"), "start", f"xbean:file:{configuration}",
    ]  # fmt: skip
    with started(command, directory, port=port, ready=lambda: listens(port)) as server:
        yield server


def producer(work: Work) -> Way:
    """A receipt for each message, or for each transaction of 50."""
    return Transactions(work.port, 50) if work.way == "50" else Receipts(work.port, 1 if work.way == "1" else WINDOW)


def consume(work: Work) -> Iterator[Values]:
    """All messages of the queue. The connection is there before the clock starts."""
    came = Came()
    return _taken(_connected(work.port, came), came, work.messages)


class Receipts:
    """Each message asks for a receipt; so many may be missing."""

    def __init__(self, port: int, window: int) -> None:
        self._receipts = Awaited(window)
        self._connection = _connected(port, self._receipts)

    def send(self, values: list[bytes]) -> None:
        send, receipts = self._connection.send, self._receipts
        for value in values:
            receipts.begin()
            send(_QUEUE, value, persistent="true", receipt="r")
        receipts.wait()

    def close(self) -> None:
        self._connection.disconnect()


class Transactions:
    """So many messages are sent in a transaction, and the commit asks for the receipt."""

    def __init__(self, port: int, size: int) -> None:
        self._size = size
        self._receipts = Awaited(1)
        self._connection = _connected(port, self._receipts)

    def send(self, values: list[bytes]) -> None:
        connection = self._connection
        for batch in in_batches(values, self._size):
            name = connection.begin()
            for value in batch:
                connection.send(_QUEUE, value, persistent="true", transaction=name)
            self._receipts.begin()
            connection.commit(name, receipt="r")
            self._receipts.wait()

    def close(self) -> None:
        self._connection.disconnect()


class Awaited:
    """Receipts that are to come: at most so many. stomp.py calls `on_receipt` and `on_error` in its own thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = threading.Semaphore(most)
        self._error = ""

    def begin(self) -> None:
        """Wait until one more may be missing."""
        if not self._free.acquire(timeout=_WAIT_SECONDS) or self._error:
            raise OSError(f"ActiveMQ sent no receipt: {self._error}")

    def wait(self) -> None:
        """Until none is missing."""
        for _ in range(self._most):
            self.begin()
        self._free.release(self._most)

    def on_receipt(self, _frame: Any) -> None:
        self._free.release()

    def on_error(self, frame: Any) -> None:
        self._error = str(frame.body)
        self._free.release()


class Came:
    """Messages that came, in the thread of stomp.py."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def on_message(self, frame: Any) -> None:
        self.frames.put((frame.headers["ack"], frame.body))


def _taken(connection: Any, came: Came, messages: int) -> Iterator[list[bytes]]:
    """Subscribe, and acknowledge: an acknowledgement stands for all messages up to it."""
    connection.subscribe(_QUEUE, id="1", ack="client", headers={"activemq.prefetchSize": str(PREFETCH)})
    while messages:
        values: list[bytes] = []
        while len(values) < min(messages, _ACKNOWLEDGED_TOGETHER):
            name, body = came.frames.get(timeout=_WAIT_SECONDS)
            values.append(body)
        connection.ack(name)
        messages -= len(values)
        yield values


def _connected(port: int, listener: object) -> Any:
    import stomp

    connection = stomp.Connection12([("127.0.0.1", port)], auto_decode=False)
    connection.set_listener("", listener)
    connection.connect(wait=True)
    return connection
