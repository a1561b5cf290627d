"""examples/jobs.py: one command starts all, one worker is killed and one hangs, and the counts add up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from conftest import ROOT, SOURCE
from loglib import Topic

PATIENCE_S = 200


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "jobs.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_demonstration_ends_with_counts_that_add_up(tmp_path: Path) -> None:
    with start("--directory", tmp_path, "--uploads", 20) as process:
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output + errors
    assert "Traceback" not in errors
    assert re.search(r"photo-5 +1  worker-\d+ +its worker was ended by signal 9\n", output)
    assert re.search(r"photo-10 +1  worker-\d+ +taken away when its lease was over\n", output)
    (counts,) = re.findall(r"(\d+) attempts = (\d+) \+ (\d+) .*\+ (\d+)", output)
    attempts, handled, died, taken = map(int, counts)
    assert (handled, died) == (20, 1) and taken >= 1 and attempts == handled + died + taken
    with Topic.open(tmp_path / "uploads", mode="r") as topic:
        info = topic.share_info("handle")
        assert sum(each.counts.accepted for each in info.partitions.values()) == 20
        assert info.members == {}
    with Topic.open(tmp_path / "events", mode="r") as topic:
        events = [json.loads(record.value or b"") for record in topic.read()]
    assert sum(each["what"] == "begun" for each in events) == attempts


@pytest.mark.slow
def test_service_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    with start("--directory", tmp_path, "--uploads", 4, "--workers", 2, "--serve", "--port", 0) as process:
        try:
            assert process.stdout is not None
            url = next(found[1] for line in process.stdout if (found := re.match("serving (.*)/, until", line)))
            with urllib.request.urlopen(f"{url}/uploads?name=late", b"data", timeout=PATIENCE_S) as answer:
                assert answer.status == 202
            while True:
                with urllib.request.urlopen(f"{url}/counts", timeout=PATIENCE_S) as answer:
                    if json.load(answer)["accepted"] == 5:
                        break
            with urllib.request.urlopen(f"{url}/", timeout=PATIENCE_S) as answer:
                assert b"<tr><td>accepted<td>5" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output + errors
    with Topic.open(tmp_path / "uploads") as topic:
        assert topic.share_info("handle").members == {}, "nothing that it started is left"
