"""Facts about a file without its times: those of the system, with its errors; and systems that have no such call."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from unittest import mock

import pytest

from loglib.system import statx

look = statx.call()


@pytest.mark.skipif(look is None, reason="this system has no statx")
def test_facts_are_those_of_the_system_with_its_errors(tmp_path: Path) -> None:
    assert look is not None
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    wanted = os.stat(file)
    with file.open() as opened:
        for facts in statx.of_name(look, str(file), None), statx.of_open_file(look, opened.fileno()):
            assert {name: getattr(wanted, name) for name in facts._fields} == facts._asdict()
    with pytest.raises(FileNotFoundError, match="missing"):
        statx.of_name(look, str(tmp_path / "missing"), None)


def test_system_that_refuses_the_call_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = mock.Mock(statx=mock.Mock(return_value=-1))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: refusing)
    assert statx.call.__wrapped__() is None
