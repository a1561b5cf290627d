"""`loglib serve --listen` outlives peers that are many or idle, and a process without descriptors.

Beyond its own host it serves those who have the shared key, unless it is told to serve all.
"""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import credentials
import pytest

from loglib import Topic
from loglib.cli import copies
from loglib.copies import SourceCredentials, receive_mirror
from loglib.copies import credentials as proofs
from loglib.errors import BrokenStreamError

clicks = commands.clicks
cli = commands.cli
Cli = commands.Cli


class Listener:
    """A listener whose first calls raise these errors."""

    def __init__(self, real: socket.socket, *errors: int) -> None:
        self._real = real
        self._errors = [OSError(each, "planted") for each in errors]

    def accept(self) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        return self._real.accept()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def serve(
    listener: Any, topic: Path, *, most: int, timeout_s: float = 60.0, wanted: SourceCredentials | None = None
) -> threading.Thread:
    options = {"most": most, "timeout_s": timeout_s, "credentials": wanted}
    serving = threading.Thread(target=copies.serve_all, args=(listener, str(topic)), kwargs=options)
    serving.start()
    return serving


def end(listener: socket.socket, serving: threading.Thread) -> None:
    listener.shutdown(socket.SHUT_RDWR)
    serving.join()


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname())


def mirrored(listener: socket.socket, to: Path) -> int:
    with connect(listener) as stream:
        return sum(receive_mirror(stream, to).ends)


def test_serving_goes_on_when_there_are_no_descriptors_for_a_while(
    listener: socket.socket, clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(copies, "_FULL_S", 0.0)
    serving = serve(Listener(listener, errno.EMFILE, errno.ENFILE, errno.ECONNABORTED), clicks, most=4)
    with Topic.open(clicks, mode="r") as topic:
        expected = sum(each.log_end_offset for each in topic.partitions)
    assert mirrored(listener, tmp_path / "copy") == expected
    end(listener, serving)
    assert capsys.readouterr().err.count("no more connections can be accepted for now") == 1


def test_peers_above_the_limit_are_turned_away_and_one_that_left_makes_room(
    listener: socket.socket, clicks: Path, tmp_path: Path, capsys: Any
) -> None:
    serving = serve(listener, clicks, most=2)
    idle = [connect(listener) for _ in range(2)]
    for _ in range(3):
        with connect(listener) as refused:
            refused.settimeout(30)
            assert refused.recv(1) == b""
    for each in idle:
        each.close()
    while True:
        with connect(listener) as again:  # it may come before the place of the others is free
            try:
                receive_mirror(again, tmp_path / "copy")
                break
            except (BrokenStreamError, OSError):
                continue
    end(listener, serving)
    assert capsys.readouterr().err.count("are turned away: 2 mirrors are served (see --mirrors)") >= 1


def test_peer_that_says_nothing_is_given_up(
    listener: socket.socket, clicks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(copies, "_HELLO_S", 0.01)
    serving = serve(listener, clicks, most=1)
    with connect(listener) as idle:
        idle.settimeout(30)
        assert idle.recv(1) == b""
    end(listener, serving)
    said = capsys.readouterr().err
    while "127.0.0.1: timed out" not in said:  # the peer's own thread says so after it has hung up
        time.sleep(0.002)
        said += capsys.readouterr().err


def test_peer_for_whom_there_is_no_thread_is_turned_away_and_serving_goes_on(
    listener: socket.socket, clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    source = credentials.made(tmp_path / "keys").source()
    for wanted in (None, source):
        serving = serve(listener, clicks, most=1, wanted=wanted)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", _no_thread)
            with connect(listener) as refused:
                refused.settimeout(30)
                assert refused.recv(1) == b""
        assert serving.is_alive()
        if wanted is None:
            assert mirrored(listener, tmp_path / "copy")
            end(listener, serving)
            listener.close()
            listener = socket.create_server(("127.0.0.1", 0))
    end(listener, serving)
    listener.close()
    assert capsys.readouterr().err.count("turned away: can't start new thread") == 2


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# --- with credentials --------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> credentials.Paths:
    monkeypatch.setattr(proofs, "_SLOW_S", 0.0)
    return credentials.made(tmp_path / "keys")


def address(listener: socket.socket) -> str:
    return f"localhost:{listener.getsockname()[1]}"


def test_copy_with_the_key_is_served_also_beside_idle_strangers(
    listener: socket.socket, clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    serving = serve(listener, clicks, most=1, wanted=keys.source())
    idle = [connect(listener) for _ in range(3)]  # strangers take no place of --mirrors
    options = ["--connect", address(listener), "--shared-key", keys.shared_key, "--authority", keys.certificate]
    done = cli("receive", tmp_path / "copy", *options)
    assert (done.code, done.errors) == (0, "")
    for each in idle:
        each.close()
    end(listener, serving)
    with Topic.open(tmp_path / "copy", mode="r") as copy:
        assert len(list(copy.read())) == 6


def test_copy_above_the_limit_is_turned_away_after_its_proof(
    listener: socket.socket, clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    serving = serve(listener, clicks, most=1, wanted=keys.source())
    options = ["--connect", address(listener), "--shared-key", keys.shared_key, "--authority", keys.certificate]
    with connect(listener) as first:
        stream = keys.copy().connect(first, "localhost")
        assert stream.wait(0) is False
        while True:  # the first one is being served as soon as it is answered
            second = cli("receive", tmp_path / "copy", *options)
            if second.code:
                break
        assert second.code == 3 and "turned away: as many mirrors as --mirrors allows" in second.errors
        stream.close()
    end(listener, serving)


def test_strangers_above_the_limit_are_turned_away(
    listener: socket.socket, clicks: Path, keys: credentials.Paths, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for limit in ("_MOST_STRANGERS", "_MOST_STRANGERS_OF_ONE"):
        with monkeypatch.context() as patched:
            patched.setattr(copies, limit, 1)
            serving = serve(listener, clicks, most=9, wanted=keys.source())
            with connect(listener), connect(listener) as second:
                second.settimeout(30)
                assert second.recv(1) == b""
            end(listener, serving)
        listener.close()
        listener = socket.create_server(("127.0.0.1", 0))
    listener.close()
    assert capsys.readouterr().err.count("are turned away: too many have not proved a key") == 2


def test_wrong_key_is_one_line_at_both_ends_and_is_counted(
    listener: socket.socket, clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    source = keys.source()
    serving = serve(listener, clicks, most=1, wanted=source)
    other = credentials.secret(tmp_path / "other.key", "another key" * 4)
    options = ["--connect", address(listener), "--shared-key", other, "--authority", keys.certificate]
    done = cli("receive", tmp_path / "copy", "--follow", *options)  # it would be wrong again and again
    assert done.code == 3 and not (tmp_path / "copy").exists()
    assert "the source has another shared key than this end\n" in done.errors
    end(listener, serving)
    assert source.refused_keys == 1


def test_another_topic_is_another_error_than_a_wrong_key(
    listener: socket.socket, clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    source, other = keys.source(), tmp_path / "other"
    Topic.open(other, create=True, partitions=2).close()
    assert cli("mirror", other, tmp_path / "copy").code == 0
    serving = serve(listener, clicks, most=1, wanted=source)
    options = ["--connect", address(listener), "--shared-key", keys.shared_key, "--authority", keys.certificate]
    done = cli("receive", tmp_path / "copy", *options)
    assert done.code == 3 and "is a mirror of" in done.errors and "key" not in done.errors.replace(str(tmp_path), "")
    end(listener, serving)
    assert source.refused_keys == 0


def test_copy_and_source_that_disagree_about_encryption_say_so(
    listener: socket.socket, clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    serving = serve(listener, clicks, most=9, wanted=keys.source())
    done = cli("receive", tmp_path / "copy", "--connect", address(listener), "--follow")
    assert done.code == 3 and "this source wants TLS and a shared key; give the copy both\n" in done.errors
    end(listener, serving)
    with socket.create_server(("127.0.0.1", 0)) as other:
        serving = serve(other, clicks, most=9)
        options = ["--connect", address(other), "--shared-key", keys.shared_key, "--authority", keys.certificate]
        done = cli("receive", tmp_path / "copy", *options)
        assert done.code == 3 and "the other end left during the TLS handshake: it has no TLS, or" in done.errors
        end(other, serving)


EVERYWHERE = ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "[::ffff:192.0.2.1]:0", "somewhere.example:0"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of this host and of others, as a name server would have them."""
    real = socket.getaddrinfo
    here, elsewhere = "127.0.0.1", "192.0.2.1"
    known = {"somewhere.example": [elsewhere], "here.example": [here], "both.example": [here, elsewhere]}

    def found(host: str, port: int, **options: Any) -> Any:
        return [each for name in known.get(host, [host]) for each in real(name, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("where", EVERYWHERE)
def test_serving_others_wants_a_key_or_a_word(where: str, clicks: Path, cli: Cli) -> None:
    """Everybody who could connect read the whole topic."""
    done = cli("serve", clicks, "--listen", where)
    assert done.code == 2 and "give --certificate and --shared-key" in done.errors and "--open" in done.errors


@pytest.mark.usefixtures("names")
def test_this_host_and_an_open_word_need_no_key(
    clicks: Path, cli: Cli, keys: credentials.Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[SourceCredentials | None] = []
    monkeypatch.setattr(copies, "serve_all", lambda *_, credentials, **__: served.append(credentials))
    for where in ("127.0.0.1:0", "127.9.9.9:0", "localhost:0", "here.example:0"):
        assert cli("serve", clicks, "--listen", where).code == 0
    assert cli("serve", clicks, "--listen", "0.0.0.0:0", "--open").code == 0
    assert served == [None] * 5
    secrets = ["--certificate", keys.certificate, "--private-key", keys.private_key, "--shared-key", keys.shared_key]
    assert cli("serve", clicks, "--listen", "0.0.0.0:0", *secrets).code == 0
    assert served[-1] is not None


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("where", ["192.0.2.1:9", "[2001:db8::1]:9", "somewhere.example:9", "both.example:9"])
def test_a_copy_believes_no_other_host_without_a_key_or_a_word(where: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("receive", tmp_path / "copy", "--connect", where, "--follow")
    assert done.code == 2 and "nothing proves who answers at" in done.errors and "--open" in done.errors


def test_options_that_contradict_each_other_are_refused(clicks: Path, tmp_path: Path, cli: Cli) -> None:
    def refused(words: str, *arguments: object) -> None:
        done = cli(*arguments)
        assert done.code == 2 and words in done.errors, done

    here = ["--listen", "127.0.0.1:0"]
    refused("--certificate without --shared-key", "serve", clicks, *here, "--certificate", "a")
    refused("--shared-key without --certificate", "serve", clicks, *here, "--shared-key", "a")
    refused("--private-key without --certificate", "serve", clicks, *here, "--private-key", "a")
    refused("contradict", "serve", clicks, *here, "--open", "--certificate", "a", "--shared-key", "b")
    refused("--open is for --listen", "serve", clicks, "--open")
    refused("--shared-key is for --listen", "serve", clicks, "--shared-key", "b")
    to = tmp_path / "copy"
    refused("--shared-key is for --connect", "receive", to, "--through", "cat", "--shared-key", "a")
    refused("--open is for --connect", "receive", to, "--open")
    refused("--authority without --shared-key", "receive", to, "--connect", "localhost:9", "--authority", "a")
    refused("contradict", "receive", to, "--connect", "localhost:9", "--open", "--shared-key", "a")


def test_files_of_credentials_that_are_wrong_are_one_line(
    clicks: Path, tmp_path: Path, keys: credentials.Paths, cli: Cli
) -> None:
    keys.shared_key.chmod(0o644)
    done = cli("receive", tmp_path / "copy", "--connect", "localhost:9", "--shared-key", keys.shared_key)
    assert done.code == 2 and done.errors.count("\n") == 1 and "chmod 600" in done.errors
    gone = ["--certificate", tmp_path / "gone", "--shared-key", keys.shared_key]
    keys.shared_key.chmod(0o600)
    done = cli("serve", clicks, "--listen", "0.0.0.0:0", *gone)
    assert done.code == 3 and done.errors.count("\n") == 1 and "No such file" in done.errors


def test_copy_tries_all_addresses_and_names_the_host_that_does_not_answer(tmp_path: Path, cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"localhost:{free.getsockname()[1]}"
    done = cli("receive", tmp_path / "copy", "--connect", where)
    assert done.code == 3 and f"{where}: " in done.errors
    done = cli("receive", tmp_path / "copy", "--connect", "no such name:9")
    assert done.code == 3 and "no such name:9: " in done.errors


def test_link_local_address_is_connected_to_through_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last part is the number of the interface: without it the system does not know where to look."""
    link_local, taken = ("fe80::1", 7, 0, 2), list[Any]()

    class Recorded(socket.socket):
        def connect(self, place: Any) -> None:
            taken.append(place)

    monkeypatch.setattr(socket, "socket", Recorded)
    monkeypatch.setattr(copies, "_resolved", lambda _: [(socket.AF_INET6, link_local)])
    copies._connection(("source%eth0", 7), 1.0, anywhere=True).close()
    assert taken == [link_local]
