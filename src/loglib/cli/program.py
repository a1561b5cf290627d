"""Program: all verbs of the command line, and how a command ends.

Invariant: a verb's module is imported only if the verb is run, or if all verbs are listed. No error of the library or
of the system reaches a person as a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

from ..errors import CorruptLogError, LogError
from .signals import Ended
from .streams import named, say

__all__ = ["run"]

_DAMAGED, _WRONG, _FAILED = 1, 2, 3
_NO_READER = 128 + signal.SIGPIPE
_CLICK = (click.ClickException, click.exceptions.Exit, click.Abort)
_COMPLETE = "_LOGLIB_COMPLETE"

_VERBS = {
    "alter": "topics",
    "append": "write",
    "archive": "offload",
    "audit": "audit",
    "bench": "bench",
    "cat": "read",
    "completion": "completion",
    "create": "topics",
    "delete": "topics",
    "dump": "dump",
    "groups": "groups",
    "heal": "care",
    "info": "topics",
    "lag": "groups",
    "ls": "topics",
    "mirror": "copies",
    "promote": "copies",
    "receive": "copies",
    "repair": "care",
    "reset": "groups",
    "retain": "care",
    "scrub": "care",
    "serve": "copies",
    "snapshot": "copies",
    "tail": "read",
    "tier": "offload",
    "verify": "care",
}


class _Verbs(click.Group):
    """Imports the module of a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = import_module(f".{_VERBS[cmd_name]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="loglib-segments", prog_name="loglib")
def _loglib() -> None:
    """Topics of loglib, from the command line.

    Data goes to standard output, everything else to standard error. With --json each line is a JSON object.

    Exit codes: 0 all is well, 1 damage or a gap was found, 2 the command was wrong, 3 it failed. A signal gives 128 and
    its number: 130 for Ctrl-C.
    """


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns the exit code."""
    try:
        if _COMPLETE in os.environ:  # a shell asks
            _loglib.main(prog_name="loglib", complete_var=_COMPLETE)
        # `main` itself would turn a closed pipe into exit code 1, which means damage here.
        with _loglib.make_context("loglib", list(arguments)) as context:
            code = _loglib.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (*_CLICK, KeyboardInterrupt, SystemExit, OSError, LogError, ValueError, MemoryError) as error:
        return _code_of(error)


def _code_of(error: BaseException) -> int:
    """The exit code of a command that an error has ended. The error is told in one line."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case Ended():
            return 128 + error.number  # as a shell says it
        case click.Abort() | KeyboardInterrupt():
            return 128 + signal.SIGINT
        case SystemExit():  # of the completion
            return _WRONG if error.code else 0
        case click.ClickException():
            with suppress(OSError):  # nobody can be told
                error.show()
            return _WRONG if isinstance(error, click.UsageError) else _FAILED
        case BrokenPipeError():
            return _NO_READER
        case CorruptLogError():
            return _failed(error, _DAMAGED)
        case LogError() | ValueError():
            return _failed(error, _FAILED)
        case OSError():
            error = named(error)
            return _failed(f"{error.filename}: {error.strerror}" if error.filename else error, _FAILED)
    return _failed("there is not enough memory", _FAILED)


def _failed(error: object, code: int) -> int:
    with suppress(OSError):  # what was printed before comes first
        sys.stdout.flush()
    say(f"loglib: {error}")
    return code
