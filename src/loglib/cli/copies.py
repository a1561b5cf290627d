"""Copies: snapshots and mirrors of a topic, also to another host by standard streams, a command such as ssh, or TCP."""

from __future__ import annotations

import errno
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import click

from ..copies.mirror import Mirror, Mirrored
from ..copies.mirror_server import MirrorServer
from ..copies.promote import promote as make_leader
from ..copies.remote_source import TIMEOUT_S
from ..copies.snapshot import snapshot as take_snapshot
from ..errors import BrokenStreamError, LogError
from .arguments import DIRECTORY, DURATION, TOPIC, as_json
from .output import note, print_json, sized

__all__ = ["mirror", "promote", "receive", "serve", "serve_all", "show", "snapshot"]


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@click.option("--no-links", is_flag=True, help="Copy all bytes: no file of the copy is a file of the topic.")
@as_json
def snapshot(topic: str, to: str, no_links: bool, as_json: bool) -> None:
    """Copy a topic to a new directory, also while it is being written.

    The copy has what was flushed at one moment, with the groups and their commits.
    """
    made = take_snapshot(topic, to, links=not no_links)
    if as_json:
        print_json(made._asdict())
        return
    sizes = f"{sized(made.size_bytes)} in {len(made.ends)} partitions, {sized(made.copied_bytes)} copied"
    click.echo(f"{made.path}: {sizes}")
    if not made.at_once:
        note("the partitions are from moments that follow each other: none at which all stood still was found")


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@click.option("--follow", is_flag=True, help="Go on, and keep the copy up to the topic, until Ctrl-C.")
@click.option("--restart", is_flag=True, help="Begin anew if retention has dropped what the copy does not have yet.")
@click.option("--demote", is_flag=True, help="Let a topic that a forced promotion has split from this one follow it.")
@click.option("--limit", type=float, metavar="MB/S", help="Copy at most so many megabytes a second.")
@as_json
def mirror(topic: str, to: str, follow: bool, restart: bool, demote: bool, limit: float | None, as_json: bool) -> None:
    """Copy a topic, or bring an earlier copy up to it: the same bytes at the same offsets, and the groups' commits.

    Damage is not copied: it stops the mirror. `loglib promote` lets the copy take the topic's place.
    """
    speed = None if limit is None else limit * 1e6
    on_gap: Literal["error", "restart"] = "restart" if restart else "error"
    with Mirror(topic, to, on_gap=on_gap, bytes_per_second=speed, demote=demote) as made:
        try:
            made.copy()
            if follow:
                note(f"{to}: up to {topic}; following")
                made.follow()
        except KeyboardInterrupt:
            if not follow:
                raise
        report = made.report()
    show(report, as_json=as_json)


def show(report: Mirrored, *, as_json: bool, to_stderr: bool = False) -> None:
    """Print what a mirror has done."""
    if as_json and not to_stderr:
        print_json(report._asdict())
        return
    sizes = f"{sized(sum(report.ends))} in {len(report.ends)} partitions, {sized(report.copied_bytes)} copied"
    (note if to_stderr else click.echo)(f"{report.path}: {sizes}")
    for each in report.set_aside:
        note(f"the topic does not have what is now in {each}")


@click.command()
@click.argument("copy", type=TOPIC)
@click.option("--force", is_flag=True, help="Also if the source of a mirror cannot be reached, or is being written.")
def promote(copy: str, force: bool) -> None:
    """Make a copy a topic of its own, which can be written.

    A mirror takes the place of its source, which is not written any more. The topic that a snapshot was copied from
    stays what it is: stop its writers first if the copy takes its place.
    """
    make_leader(copy, force=force)


_STANDARD = (0, 1)  # standard input and output
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_silence = click.option("--timeout", type=DURATION, default=timedelta(seconds=TIMEOUT_S), show_default="60s",
                        help="Give up the other end when it is silent for so long.")  # fmt: skip


class _Address(click.ParamType[tuple[str, int]]):
    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        host, colon, port = str(value).rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            self.fail(f"{value!r} is no address; write HOST:PORT, such as 10.0.0.5:9900 or [::1]:9900", param, ctx)
        return host.strip("[]"), int(port)


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--listen", type=_Address(), help="Serve all who connect there. They may read all of the topic.")
@click.option("--mirrors", type=click.IntRange(1), default=32, show_default=True,
              help="With --listen: serve at most so many at the same time. Others are turned away, and may come again.")
@_silence
def serve(topic: str, listen: tuple[str, int] | None, mirrors: int, timeout: timedelta) -> None:
    """Let mirrors on other hosts copy a topic: the other end of `loglib receive`.

    Without --listen one mirror is served over standard input and output, until it leaves:
    `loglib receive copies/orders --through "ssh HOST loglib serve data/orders"` on the other host.
    """
    seconds = timeout.total_seconds()
    if listen is None:
        with MirrorServer(topic, _STANDARD, timeout=seconds) as server:
            server.serve()
        return
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    with socket.create_server(listen, family=family) as listener:
        note(f"serving {topic} on port {listener.getsockname()[1]}")
        serve_all(listener, topic, most=mirrors, timeout_s=seconds)


_HELLO_S = 10.0  # a mirror speaks as soon as it is connected
_FULL_S = 0.2  # until a connection is accepted again, when there are no descriptors
_LISTENER_ENDS = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}


def serve_all(listener: socket.socket, topic: str, *, most: int, timeout_s: float) -> None:
    """Serve all who connect, at most so many at the same time, until the listener is closed.

    A connection that cannot be accepted, because there are no more descriptors, waits until one is free.
    """
    room, is_told = threading.BoundedSemaphore(most), False
    while True:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _LISTENER_ENDS:
                return
            if not is_told:
                note(f"nobody else can be served for now: {error}")
            is_told = True
            time.sleep(_FULL_S)
            continue
        if room.acquire(blocking=False):
            is_told = False
            serving = (topic, connection, address[0], timeout_s, room)
            threading.Thread(target=_serve, args=serving, daemon=True).start()
            continue
        connection.close()
        if not is_told:
            note(f"{address[0]} and all who come now are turned away: {most} are being served (see --mirrors)")
        is_told = True


def _serve(
    topic: str, connection: socket.socket, who: str, timeout_s: float, room: threading.BoundedSemaphore
) -> None:
    """Serve one mirror. Its error ends its connection, and no other."""
    try:
        with connection:
            connection.settimeout(min(_HELLO_S, timeout_s))
            connection.recv(1, socket.MSG_PEEK)  # who says nothing costs no more than this descriptor
            connection.settimeout(None)
            with MirrorServer(topic, connection, timeout=timeout_s) as server:
                server.serve()
    except (LogError, OSError) as error:
        note(f"{who}: {error}")
    finally:
        room.release()


@click.command()
@click.argument("to", type=DIRECTORY)
@click.option("--through", metavar="COMMAND", help='What runs the other end, such as "ssh HOST loglib serve TOPIC".')
@click.option("--connect", type=_Address(), help="Where `loglib serve --listen` runs.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C. If the stream breaks, open another one.")
@click.option("--restart", is_flag=True, help="Begin anew if retention has dropped what the copy does not have yet.")
@click.option("--demote", is_flag=True, help="Let a topic that a forced promotion has split from this one follow it.")
@click.option("--limit", type=float, metavar="MB/S", help="Copy at most so many megabytes a second.")
@_silence
@as_json
def receive(
    to: str, through: str | None, connect: tuple[str, int] | None, follow: bool, timeout: timedelta, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Copy a topic from another host, or bring an earlier copy up to it: `loglib mirror` over a stream.

    Without --through and --connect the stream is standard input and output.
    """
    if through is not None and connect is not None:
        raise click.UsageError("give --through or --connect, not both")
    pause_s = _FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        try:
            with _stream(through, connect, timeout.total_seconds()) as stream:
                report = _receive(to, stream, follow=follow, timeout=timeout, **options)
            break
        except (BrokenStreamError, ConnectionError) as error:
            if not follow or (through is None and connect is None):
                raise
            if time.monotonic() - began > pause_s:  # it was well for a while
                pause_s = _FIRST_PAUSE_S
            note(f"{error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    show(report, as_json=as_json, to_stderr=through is None and connect is None)  # standard output is the stream


def _receive(
    to: str, stream: Any, *, follow: bool, restart: bool, demote: bool, limit: float | None, timeout: timedelta
) -> Mirrored:
    """Copy over one stream."""
    speed = None if limit is None else limit * 1e6
    on_gap: Literal["error", "restart"] = "restart" if restart else "error"
    with Mirror.over(
        stream, to, on_gap=on_gap, bytes_per_second=speed, demote=demote, timeout=timeout.total_seconds()
    ) as made:  # fmt: skip
        try:
            made.copy()
            if follow:
                note(f"{to}: up to {made.source}; following")
                made.follow()
        except KeyboardInterrupt:
            if not follow:
                raise
        return made.report()


@contextmanager
def _stream(through: str | None, connect: tuple[str, int] | None, timeout_s: float) -> Iterator[Any]:
    """The stream to the source."""
    if connect is not None:
        try:
            connection = socket.create_connection(connect, timeout=timeout_s)
        except OSError as error:  # no route, no such name: later there may be one
            raise ConnectionError(f"{connect[0]}:{connect[1]}: {error}") from error
        with connection:
            yield connection
    elif through is not None:
        with subprocess.Popen(shlex.split(through), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            try:
                yield other.stdout, other.stdin
            finally:
                other.terminate()
    else:
        yield _STANDARD
