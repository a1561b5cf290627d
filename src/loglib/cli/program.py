"""Program: all verbs of the command line, and how a command ends.

Invariant: a verb's module is imported only if the verb is run, or if all verbs are listed. No error of the library or
of the system reaches a person as a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from ..errors import CorruptLogError, LogError

__all__ = ["run"]

_DAMAGED, _FAILED = 1, 3
_COMPLETE = "_LOGLIB_COMPLETE"
_INTERRUPTED, _NO_READER = 130, 141  # 128 and the number of the signal, as a shell says it

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

    Exit codes: 0 all is well, 1 damage or a gap was found, 2 the command was wrong, 3 it failed.
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
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        # The interpreter would try to write the rest at its end, and report the error once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except CorruptLogError as error:
        return _failed(error, _DAMAGED)
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else error, _FAILED)
    except (LogError, ValueError) as error:
        return _failed(error, _FAILED)


def _failed(error: object, code: int) -> int:
    click.echo(f"loglib: {error}", err=True)
    return code
