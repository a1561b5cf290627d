"""system/clock.py: both clocks at one instant, on systems with a boot id and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from counts import need

from conftest import NOW, SOURCE, Clock, needs_root, run_python
from loglib.system import clock as module
from loglib.system.clock import SYSTEM, PlainClock, clock_of
from loglib.system.files import REAL


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    module._boot.cache_clear()
    yield
    module._boot.cache_clear()


def test_moment_is_what_the_system_says() -> None:
    before, moment, after = time.time_ns() // 1000, SYSTEM.moment(), time.time_ns() // 1000
    assert before <= moment.wall_us <= after
    assert before <= SYSTEM() <= time.time_ns() // 1000
    later = SYSTEM.moment()
    assert later.boottime_us >= moment.boottime_us > 0 and later.boot_id == moment.boot_id


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs Linux")
def test_processes_of_one_boot_agree() -> None:
    program = "from loglib.system.clock import SYSTEM; m = SYSTEM.moment(); print(m.boot_id.hex(), m.boottime_us)"
    boot_id, boottime = run_python(program).split()
    moment = SYSTEM.moment()
    assert moment.boot_id.hex() == boot_id and any(moment.boot_id)
    assert 0 <= moment.boottime_us - int(boottime) < 60_000_000


@pytest.mark.parametrize(
    "content", [None, b"", b"no boot id\n", b"\xff\xfe", b"12345678", b"00000000-0000-0000-0000-000000000000\n"]
)
def test_without_a_boot_id_each_process_is_a_boot(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "boot_id"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(module, "_read_boot_id", lambda files, read=module._read_boot_id: read(files, str(path)))
    moment = SYSTEM.moment()
    assert any(moment.boot_id) and moment.boottime_us >= 0
    assert SYSTEM.moment().boot_id == moment.boot_id
    module._boot.cache_clear()
    assert SYSTEM.moment().boot_id != moment.boot_id


def test_boot_id_that_is_no_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert module._read_boot_id(REAL, str(tmp_path / "pipe")) is None


def test_process_that_is_stopped_between_the_clocks_reads_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else the distance of the two clocks would be that of the stop, and look like a jump."""
    second = 1_000_000_000
    boottimes = iter([0, 600 * second, 601 * second, 601 * second + 1_000_000])
    walls = iter([600 * second, 601 * second])
    boot = module._Boot(b"b" * 16, lambda: next(boottimes), 0, 0)
    monkeypatch.setattr(module, "_boot", lambda: boot)
    monkeypatch.setattr(time, "time_ns", lambda: next(walls))
    assert SYSTEM.moment() == (601_000_000, 601_000_000, b"b" * 16)


def test_nearest_pair_counts_where_every_reading_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    second = 1_000_000_000
    gaps = [5, 4, 3, 1, 2, 6, 7, 8]
    pairs = [(number * 100 * second, (number * 100 + gap) * second) for number, gap in enumerate(gaps)]
    boottimes = iter([each for pair in pairs for each in pair])
    walls = iter(range(len(gaps)))
    boot = module._Boot(b"b" * 16, lambda: next(boottimes), 0, -297 * second)
    monkeypatch.setattr(module, "_boot", lambda: boot)
    monkeypatch.setattr(time, "time_ns", lambda: next(walls) * second)
    assert SYSTEM.moment() == (3_000_000, 300_000_000, b"b" * 16)


# A program's own time, and what it says of the boot and of the time since then.
SAY = """
    import time
    from loglib.system.clock import SYSTEM

    moment = SYSTEM.moment()
    print(moment.boot_id.hex(), moment.boottime_us, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)
"""


@needs_root
def test_processes_in_two_time_namespaces_of_one_boot_agree(tmp_path: Path) -> None:
    need(shutil.which("unshare"), "unshare")
    program = tmp_path / "say.py"
    program.write_text(textwrap.dedent(SAY), "utf-8")
    days = 30 * 86_400
    command = ["unshare", "-T", f"--boottime={days}", "--monotonic=5", "--fork", sys.executable, str(program)]
    environment = {"PYTHONPATH": str(SOURCE)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    need(ran.returncode == 0, "time namespaces")
    boot_id, boottime, own = ran.stdout.split()
    moment = SYSTEM.moment()
    assert moment.boot_id.hex() == boot_id
    assert 0 <= moment.boottime_us - int(boottime) < 60_000_000
    assert int(own) - int(boottime) >= days * 1_000_000


def test_a_process_that_comes_to_another_namespace_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child of one that has left its namespace, or a process that was restored from a checkpoint."""
    here = SYSTEM.moment()
    hour, look = 3_600_000_000, module._boot

    class Before:
        """What was found in a namespace that is an hour ahead, until the process looks again."""

        found = look()._replace(added_ns=hour * 1000, lead_ns=(here.wall_us - here.boottime_us) * 1000)

        def __call__(self) -> module._Boot:
            return self.found

        def cache_clear(self) -> None:
            look.cache_clear()
            self.found = look()

    monkeypatch.setattr(module, "_boot", Before())
    after = SYSTEM.moment()
    assert after.boot_id == here.boot_id and 0 <= after.boottime_us - here.boottime_us < 60_000_000


@pytest.mark.parametrize(
    ("content", "added"),
    [
        (b"monotonic           5         0\nboottime      2592000         7\n", 2_592_000_000_000_007),
        (b"boottime -86400 500000000\n", -86_399_500_000_000),
        (b"monotonic 0 0\n", None),
        (b"boottime\n", None),
        (b"\xff boottime a b\n", None),
        (None, None),
    ],
)
def test_what_a_namespace_adds_is_read_from_the_system(
    content: bytes | None, added: int | None, tmp_path: Path
) -> None:
    path, own, other = tmp_path / "offsets", tmp_path / "own", tmp_path / "other"
    own.touch()
    other.touch()
    if content is not None:
        path.write_bytes(content)
    assert module._read_added(REAL, str(path), (str(own), str(own))) == added
    assert module._read_added(REAL, str(path), (str(own), str(other))) is None, "the offsets of its children only"
    assert module._read_added(REAL, str(path), (str(tmp_path / "no"), str(own))) == 0, "a system without namespaces"


def test_a_process_between_two_namespaces_is_a_boot_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SYSTEM.moment().boot_id
    module._boot.cache_clear()
    monkeypatch.setattr(module, "_read_added", lambda files: None)
    assert SYSTEM.moment().boot_id not in (known, bytes(16))


def test_plain_function_stands_for_time_itself() -> None:
    function = Clock()
    clock = clock_of(function)
    assert isinstance(clock, PlainClock) and clock() == NOW
    first = clock.moment()
    function.now += 5
    second = clock.moment()
    assert (second.wall_us - first.wall_us, second.boottime_us - first.boottime_us) == (5, 5)
    assert first.boot_id == second.boot_id
    assert clock_of(clock) is clock and clock_of(SYSTEM) is SYSTEM
