"""pytest_loglib.py: the fixtures that pytest finds where loglib is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The plugin of this checkout, whatever is installed.
PLUGIN = ("-p", "no:loglib", "-p", "pytest_loglib")
TESTS = '''
import sys

import pytest


def test_plugin_imports_nothing_of_loglib_by_itself():
    assert not [name for name in sys.modules if name.partition(".")[0] == "loglib"]


def test_topic_and_group(loglib_topic, loglib_group):
    loglib_topic.append(b"1", sync=True)
    assert [record.value for record in loglib_group.follow(timeout=0)] == [b"1"]


def test_next_topic_is_another_one(loglib_topic):
    assert list(loglib_topic.read()) == []


def test_acknowledged_record_survives_a_power_cut(loglib_disk):
    from loglib.testing import open_topic

    with open_topic("/log", files=loglib_disk) as topic:
        topic.append(b"kept", sync=True)
    done = len(loglib_disk.operations)
    for state in loglib_disk.crash_states(since=done):
        with open_topic("/log", files=state.files) as topic:
            assert [record.value for record in topic.read()] == [b"kept"]


def test_full_disk_is_told(loglib_full_disk):
    from loglib import StorageFullError
    from loglib.testing import open_topic

    with open_topic("/log", files=loglib_full_disk) as topic:
        topic.append(b"kept", sync=True)
        loglib_full_disk.room = 0
        with pytest.raises(StorageFullError):
            topic.append(b"lost", sync=True)
        loglib_full_disk.room = 1 << 20
        assert [record.value for record in topic.read()] == [b"kept"]
'''


def test_fixtures_work_in_a_project_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", *PLUGIN, "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "5 passed" in ran.stdout, ran.stdout + ran.stderr


def test_page_shows_the_fixtures_that_there_are(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text("utf-8")
    command = [sys.executable, "-m", "pytest", "-q", *PLUGIN, "--fixtures", str(tmp_path)]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    there = {word for line in listed.splitlines() for word in line.split()[:1] if word.startswith("loglib_")}
    assert len(there) == 4 and all(f"`{name}`" in page for name in there), there
