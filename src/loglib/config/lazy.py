"""Lazy: the names of a package that are loaded when they are first used.

Invariant: `import loglib` loads no module of a room that the program does not use (PEP 562).

Threads: safe for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def called_later(module: str, name: str) -> Callable[..., Any]:
    """A function that loads `module` when it is called, and calls the function of this name there."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module(module), name)(*given, **named)

    return call


def lazily(
    package: str, names_of: Mapping[str, str], *, rooms: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The functions `__getattr__` and `__dir__` of a package, and its `__all__`.

    `names_of` has, for each module, the names that it gives to the package, with spaces between them. Modules are
    relative to the package. `rooms` are modules that are names themselves.
    """
    module_of = {name: module for module, names in names_of.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in rooms.split():
            return import_module(f".{name}", package)
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of, *rooms.split()})

    return load, names, sorted(module_of)
