"""Files wrapper: each system call reaches the inner files as it was made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from loglib.system.files import Files
from loglib.system.files_wrapper import FilesWrapper
from loglib.system.system_calls import SYSTEM_CALLS


class Inner(Files):
    """Notes each system call, and makes none."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattribute__(self, name: str) -> Any:
        def call(*arguments: Any, **directories: Any) -> str:
            self.calls.append((name, arguments, directories))
            return name

        return call if name in SYSTEM_CALLS else super().__getattribute__(name)

    def random_bytes(self, count: int) -> bytes:
        return b"r" * count


@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_call_is_forwarded_with_its_arguments(name: str) -> None:
    inner = Inner()
    call = getattr(FilesWrapper(inner), name)
    parameters = inspect.signature(call).parameters.values()
    given = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
    directories = {each.name: number for number, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY}
    assert call(*given, **directories) in (name, None)
    assert inner.calls == [(name, given, directories)]


def test_subclass_sees_every_call() -> None:
    class Seeing(FilesWrapper):
        def forward(self, name: str, *arguments: Any, **directories: int | None) -> Any:
            seen.append((name, *arguments, *directories.values()))
            return super().forward(name, *arguments, **directories)

    seen: list[Any] = []
    files = Seeing(Inner())
    files.unlink("path", dir_fd=7)
    files.ftruncate(3, 0)
    assert seen == [("unlink", "path", 7), ("ftruncate", 3, 0)]
    assert files.random_bytes(2) == b"rr" and files.real


def test_every_system_call_is_written_out() -> None:
    assert set(SYSTEM_CALLS) <= set(vars(FilesWrapper))
