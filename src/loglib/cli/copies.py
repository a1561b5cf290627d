"""Copies: snapshots and mirrors of a topic, also to another host by standard streams, a command such as ssh, or TCP."""

from __future__ import annotations

import errno
import ipaddress
import shlex
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import click

from ..config.quantities import parse_duration
from ..copies.credentials import CopyCredentials, SourceCredentials
from ..copies.mirror_server import serve_mirror
from ..copies.mirrors import Mirror, MirrorReport
from ..copies.promotion import promote as make_leader
from ..copies.remote_source import TIMEOUT_S
from ..copies.snapshots import snapshot as take_snapshot
from ..errors import BrokenStreamError, LogError, UntrustedPeerError
from ..system.clock import monotonic
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .arguments import ADDRESS, DIRECTORY, TOPIC, Parsed, add_options, as_json, rate_option
from .output import bar, note, print_json, sized
from .topics import log_bytes


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@click.option("--no-links", is_flag=True, help="Copy all bytes, without hard links to files of the topic.")
@as_json
def snapshot(topic: str, to: str, no_links: bool, as_json: bool) -> None:
    """Copy a topic to a new directory, also while it is being written.

    The copy contains what was flushed at one moment, with the groups and their commits.
    """
    with bar(to) as progress:
        made = take_snapshot(topic, to, links=not no_links, progress=progress)
    if as_json:
        print_json(made._asdict())
        return
    sizes = f"{sized(made.size_bytes)} in {len(made.ends)} partitions, {sized(made.copied_bytes)} copied"
    click.echo(f"{made.path}: {sizes}")
    if not made.at_once:
        note("the partitions were copied at different moments: there was no moment at which none was written")


_mirror_options = add_options(
    click.option("--follow", is_flag=True, help="Keep the copy up to date, until Ctrl-C."),
    click.option("--restart", "on_divergence", flag_value="restart", default="raise",
                 help="Copy again from the start if retention has dropped records that the copy does not have."),
    click.option("--demote", is_flag=True, help="Let TO follow the source although a forced promotion has made it a "
                 "topic of its own."),
    rate_option("--limit", help="Copy at most this many megabytes per second."),
    as_json,
)  # fmt: skip


@click.command()
@click.argument("topic", type=TOPIC)
@click.argument("to", type=DIRECTORY)
@_mirror_options
def mirror(topic: str, to: str, follow: bool, as_json: bool, **options: Any) -> None:
    """Copy a topic, or update an earlier copy: the same bytes at the same offsets, and the groups' commits.

    Damage is not copied: it stops the mirror. `loglib promote` lets the copy take the topic's place.
    """
    report = _run(Mirror(topic, to, **options), topic, to, follow=follow)
    _print_report(report, as_json=as_json)


def _run(made: Mirror, source: str, to: str, *, follow: bool) -> MirrorReport:
    """Copy, and follow the source until Ctrl-C if that is asked for."""
    with made:
        with bar(to) as progress:
            made.copy(progress=progress)
        if follow:
            with suppress(KeyboardInterrupt):
                note(f"{to}: up to {source}; following")
                made.follow()
        return made.report()


def _print_report(report: MirrorReport, *, as_json: bool, to_stderr: bool = False) -> None:
    if as_json and not to_stderr:
        print_json(report._asdict())
        return
    with Topic.open(report.path, mode="r") as copy:
        sizes = f"{sized(log_bytes(copy))} in {len(report.ends)} partitions, {sized(report.copied_bytes)} copied"
    (note if to_stderr else click.echo)(f"{report.path}: {sizes}")
    for each in report.set_aside:
        note(f"the topic does not have what is now in {each}")


@click.command()
@click.argument("copy", type=TOPIC)
@click.option("--force", is_flag=True, help="Also if the source of a mirror cannot be reached, or is being written.")
def promote(copy: str, force: bool) -> None:
    """Turn a copy into a topic of its own, which can be written.

    A mirror takes the place of its source, which can then not be written any more. The source of a snapshot stays
    unchanged: stop its writers first if the copy takes its place.
    """
    make_leader(copy, force=force)


_STANDARD = (0, 1)  # standard input and output
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


_FILE = click.Path(dir_okay=False)
_SECONDS = Parsed("duration", lambda text: parse_duration(text).total_seconds())
_timeout = click.option("--timeout", "timeout_s", type=_SECONDS, default=TIMEOUT_S,
                        help=f"Give up the other end after this time of silence.  [default: {TIMEOUT_S:g}s]")
_shared_key = click.option("--shared-key", type=_FILE, help="The file with the key that both ends have.")
_open = click.option("--open", "is_open", is_flag=True, help="Allow other hosts without TLS and a key.")


def _resolved(address: tuple[str, int], *, passive: bool = False) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host, IPv4 first: each with its family, as a socket takes it."""
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)
    except OSError as error:  # no such name yet
        raise ConnectionError(f"{address[0]}:{address[1]}: {error}") from error
    return sorted(((each[0], each[4]) for each in found), key=lambda each: each[0] != socket.AF_INET)


def _is_loopback(place: Any) -> bool:
    """True if only this host can reach the address."""
    found = ipaddress.ip_address(str(place[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _check_options(where: str, address: object, files: dict[str, str | None], *, is_open: bool) -> None:
    """Refuse options that contradict each other. `files` are given together or not at all, and only with `where`."""
    given = [name for name, path in files.items() if path is not None]
    if address is None and (given or is_open):
        raise click.UsageError(f"{given[0] if given else '--open'} is for {where}; ssh knows who is at the other end")
    if is_open and given:
        raise click.UsageError(f"--open and {given[0]} contradict each other")
    missing = [name for name, path in files.items() if path is None]
    if given and missing:
        raise click.UsageError(f"{given[0]} without {missing[0]}; both ends prove themselves, or none")


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("--listen", type=ADDRESS, help="Accept TCP connections at this address.")
@click.option("--certificate", type=_FILE, help="A PEM file with the certificate of this host.")
@click.option("--private-key", type=_FILE, help="A PEM file with its private key.  [default: in --certificate]")
@_shared_key
@_open
@click.option("--mirrors", type=click.IntRange(1), metavar="N", default=32, show_default=True,
              help="With --listen: serve at most N mirrors at the same time; others may try again later.")
@_timeout
def serve(
    topic: str, listen: tuple[str, int] | None, certificate: str | None, private_key: str | None,
    shared_key: str | None, is_open: bool, mirrors: int, timeout_s: float,
) -> None:  # fmt: skip
    """Let mirrors on other hosts copy a topic: the other end of `loglib receive`.

    Without --listen it serves one mirror over standard input and output, until the mirror leaves. The other host runs
    `loglib receive copies/orders --through "ssh HOST loglib serve data/orders"`.

    With --listen it serves each mirror that proves by TLS that it has the shared key. Without --certificate and
    --shared-key, everyone who connects may read all of the topic: so only on this host (127.0.0.1), or with --open.
    """
    files = {"--certificate": certificate, "--shared-key": shared_key}
    _check_options("--listen", listen, files, is_open=is_open)
    if private_key is not None and certificate is None:
        raise click.UsageError("--private-key without --certificate")
    if listen is None:
        serve_mirror(topic, _STANDARD, timeout=timeout_s)
        return
    credentials = None
    if certificate is not None and shared_key is not None:
        credentials = SourceCredentials(certificate=certificate, private_key=private_key, shared_key=shared_key)
    family, place = _resolved(listen, passive=True)[0]
    if credentials is None and not is_open and not _is_loopback(place):
        raise click.UsageError(
            f"everyone who can connect to {place[0]} could read all of {topic}: give --certificate and --shared-key, "
            'or let ssh carry the stream (loglib receive --through "ssh ..."), or give --open'
        )
    with socket.create_server(place, family=family) as listener:
        note(f"serving {topic} on port {listener.getsockname()[1]}")
        serve_all(listener, topic, most=mirrors, timeout_s=timeout_s, credentials=credentials)


_HELLO_S = 10.0  # a mirror sends its first bytes when it connects
_FULL_S = 0.2  # until a connection is accepted again, when there are no descriptors
_MOST_STRANGERS = 64  # connections that have not yet proved that they have the key
_MOST_STRANGERS_OF_ONE = 8  # from one address, so that one host does not take all slots
_LISTENER_ENDS = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}


class _Slots(NotCopyable):
    """Counts connections, up to `most` in total and `most_of_one` from one address.

    Threads: safe for all.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._lock = threading.Lock()
        self._most, self._most_of_one = most, most_of_one
        self._taken: Counter[str] = Counter()  # by address

    def take(self, who: str) -> bool:
        """Count one more connection from this address; False if there is no slot."""
        with self._lock:
            is_free = self._taken.total() < self._most and self._taken[who] < self._most_of_one
            self._taken[who] += is_free
            return is_free

    def leave(self, who: str) -> None:
        """Count one connection less from this address."""
        with self._lock:
            self._taken[who] -= 1
            self._taken += Counter()  # without those that are 0


def serve_all(
    listener: socket.socket, topic: str, *, most: int, timeout_s: float, credentials: SourceCredentials | None = None
) -> None:
    """Serve all mirrors that connect, at most `most` at the same time, until the listener is closed.

    With `credentials`, a mirror must first prove that it has the key; until then it does not count. A connection that
    cannot be accepted, because there are no more descriptors, waits until one is free.
    """
    mirrors, strangers = _Slots(most, most), _Slots(_MOST_STRANGERS, _MOST_STRANGERS_OF_ONE)
    entry, is_reported = mirrors if credentials is None else strangers, False
    while True:
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _LISTENER_ENDS:
                return
            if not is_reported:
                note(f"no more connections can be accepted for now: {error}")
            is_reported = True
            time.sleep(_FULL_S)
            continue
        who = str(address[0])
        busy = f"{most} mirrors are served (see --mirrors)" if credentials is None else "too many have not proved a key"
        if entry.take(who):
            serving = (topic, connection, who, timeout_s, mirrors, strangers, credentials)
            try:
                threading.Thread(target=_serve, args=serving, daemon=True).start()
                is_reported = False
                continue
            except RuntimeError as error:  # the system has no more threads for now
                busy = str(error)
                entry.leave(who)
        connection.close()
        if not is_reported:
            note(f"{who} and all that connect now are turned away: {busy}")
        is_reported = True


def _serve(
    topic: str, connection: socket.socket, who: str, timeout_s: float, mirrors: _Slots, strangers: _Slots,
    credentials: SourceCredentials | None,
) -> None:  # fmt: skip
    """Serve one mirror. An error ends its connection, and no other."""
    hello_s = min(_HELLO_S, timeout_s)
    try:
        with connection, ExitStack() as at_end:
            stream: Any = connection
            if credentials is None:
                at_end.callback(mirrors.leave, who)
                connection.settimeout(hello_s)
                connection.recv(1, socket.MSG_PEEK)  # a silent connection costs no more than its descriptor
                connection.settimeout(None)
            else:
                try:
                    stream = credentials.accept(connection, timeout=hello_s)
                finally:
                    strangers.leave(who)
                if not mirrors.take(who):
                    stream.close()
                    note(f"{who} is turned away: as many mirrors as --mirrors allows are served")
                    return
                at_end.callback(mirrors.leave, who)
            serve_mirror(topic, stream, timeout=timeout_s)
    except UntrustedPeerError as error:
        note(f"{who}: {error} ({credentials.refused_keys if credentials else 0} wrong keys so far)")
    except (LogError, OSError) as error:
        note(f"{who}: {error}")


@click.command()
@click.argument("to", type=DIRECTORY)
@click.option("--through", metavar="COMMAND", help='Runs the other end, such as "ssh HOST loglib serve TOPIC".')
@click.option("--connect", type=ADDRESS, help="The address of `loglib serve --listen`.")
@_shared_key
@click.option("--authority", type=_FILE,
              help="A PEM file with the certificates that are trusted.  [default: those of the system]")
@_open
@_timeout
@_mirror_options
def receive(
    to: str, through: str | None, connect: tuple[str, int] | None, shared_key: str | None, authority: str | None,
    is_open: bool, follow: bool, timeout_s: float, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Copy a topic from another host, or update an earlier copy: `loglib mirror` over a stream.

    Without --through and --connect the stream is standard input and output. If another stream breaks, --follow opens a
    new one. With --connect the source must prove its identity: give --shared-key. Without a key, only a source on this
    host (127.0.0.1) is accepted, or any with --open.
    """
    _check_options("--connect", connect, {"--shared-key": shared_key}, is_open=is_open)
    if authority is not None and shared_key is None:
        raise click.UsageError("--authority without --shared-key; both ends prove themselves, or none")
    if through is not None and connect is not None:
        raise click.UsageError("give --through or --connect, not both")
    credentials = None if shared_key is None else CopyCredentials(shared_key=shared_key, authority=authority)
    is_standard = through is None and connect is None
    pause_s = _FIRST_PAUSE_S
    while True:
        began = monotonic()
        try:
            with _stream(through, connect, timeout_s, credentials, is_open=is_open) as stream:
                made = Mirror.over(stream, to, timeout=timeout_s, **options)
                report = _run(made, made.source, to, follow=follow)
            break
        except (BrokenStreamError, ConnectionError) as error:
            if not follow or is_standard:
                raise
            if monotonic() - began > pause_s:  # the stream worked for a while
                pause_s = _FIRST_PAUSE_S
            note(f"{error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    _print_report(report, as_json=as_json, to_stderr=is_standard)  # standard output is the stream


@contextmanager
def _stream(
    through: str | None, connect: tuple[str, int] | None, timeout_s: float, credentials: CopyCredentials | None,
    *, is_open: bool,
) -> Iterator[Any]:  # fmt: skip
    """The stream to the source."""
    if connect is not None:
        with _connection(connect, timeout_s, anywhere=is_open or credentials is not None) as connection:
            if credentials is None:
                yield connection
            else:
                yield credentials.connect(connection, connect[0], timeout=timeout_s)
    elif through is not None:
        command = shlex.split(through)
        if not command:
            raise click.UsageError("--through needs a command")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            try:
                yield other.stdout, other.stdin
            finally:
                other.terminate()
    else:
        yield _STANDARD


def _connection(address: tuple[str, int], timeout_s: float, *, anywhere: bool) -> socket.socket:
    """Connect to the source: on any host with `anywhere`, otherwise on this host only."""
    places = _resolved(address)
    elsewhere = [place[0] for _, place in places if not _is_loopback(place)]
    if elsewhere and not anywhere:
        raise click.UsageError(
            f"nothing proves who answers at {elsewhere[0]}: give --shared-key (and --authority), or let ssh carry the "
            'stream (--through "ssh ..."), or give --open'
        )
    failure: OSError | None = None
    for family, place in places:  # whole, with the interface of a link-local address
        connection = socket.socket(family)
        try:
            connection.settimeout(timeout_s)
            connection.connect(place)
            return connection
        except OSError as error:  # no route yet
            failure = error
            connection.close()
        except BaseException:
            connection.close()
            raise
    raise ConnectionError(f"{address[0]}:{address[1]}: {failure}") from failure
