"""Serve: copy a topic to another machine over a socket, in raw flushed batches, from the end of the last copy on.

The sender hands segment bytes to the socket with sendfile, so they never pass through Python. The receiver checks every
batch and appends it at its original offset. One connection brings all partitions up to date. Whoever can connect reads
the topic: between hosts let ssh forward the port, or use `loglib serve`, which knows who is at the other end.

    python examples/serve.py send pageviews-out/hits --port 9900
    python examples/serve.py receive copy-of-hits --port 9900
"""

import argparse
import socket
import struct
import sys
from pathlib import Path

from loglib import LogError, Topic

NUMBER = struct.Struct("!Q")


def send(path: Path, host: str, port: int) -> None:
    with Topic.open(path, mode="r") as topic, socket.create_server((host, port)) as server:
        print(f"serving {topic.name} on port {server.getsockname()[1]}", flush=True)
        while True:
            connection, address = server.accept()
            with connection:
                try:
                    answer(topic, connection)
                except (LogError, OSError) as error:  # an error of one receiver must not end the server
                    print(f"{address[0]}: {error}", file=sys.stderr)


def answer(topic: Topic, connection: socket.socket) -> None:
    """Send the number of partitions. For each: receive the start offset, send the end offset, send the batches."""
    send_number(connection, len(topic.partitions))
    for partition in topic.partitions:
        offset, end = receive_number(connection), partition.high_watermark
        send_number(connection, end)
        while offset < end:
            offset = partition.transfer(connection, offset, max_bytes=end - offset)


def receive(path: Path, host: str, port: int) -> None:
    with (
        socket.create_connection((host, port)) as connection,
        Topic.open(path, create=True, partitions=receive_number(connection)) as topic,
    ):
        for partition in topic.partitions:
            start = partition.log_end_offset
            send_number(connection, start)
            end = receive_number(connection)
            while partition.log_end_offset < end:
                partition.receive(connection, preserve_offsets=True)
            print(f"partition {partition.id}: {end - start:,} bytes of log received")


def send_number(connection: socket.socket, number: int) -> None:
    connection.sendall(NUMBER.pack(number))


def receive_number(connection: socket.socket) -> int:
    raw = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    if len(raw) < NUMBER.size:
        raise ConnectionError("the other side has left")
    number: int = NUMBER.unpack(raw)[0]
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["send", "receive"])
    parser.add_argument("topic", type=Path, help="directory of the topic to send, or to receive into")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: any free one, for sending")
    args = parser.parse_args()
    (send if args.what == "send" else receive)(args.topic, args.host, args.port)


if __name__ == "__main__":
    try:
        main()
    except (LogError, OSError) as error:
        sys.exit(f"serve: {error}")
    except KeyboardInterrupt:
        pass
