"""Program: all verbs of the command line, and how a command ends.

Invariant: a verb's module is imported only if the verb is run. No error of the library or of the system reaches a
person as a traceback.
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

# The module of each verb, and what the list of all verbs says of it, which so needs no module of a verb.
_VERBS = {
    "alter": ("topics", "Change the policies of a topic."),
    "append": ("write", "Append the lines of files, or of standard input, as records."),
    "archive": ("offload", "Write sealed segments as Parquet files."),
    "audit": ("audit", "Compare what was produced, copied and consumed, by time window."),
    "bench": ("bench", "Measure writing and reading on a disk."),
    "cat": ("read", "Print the values of a topic, one per line."),
    "completion": ("completion", "Print a script that completes commands in your shell."),
    "create": ("topics", "Create a topic."),
    "delete": ("topics", "Delete a topic with all its records and groups."),
    "dump": ("dump", "Print the stored form of segments and batches."),
    "groups": ("groups", "List consumer groups."),
    "heal": ("care", "Replace damaged bytes of a topic with those of other copies."),
    "info": ("topics", "Describe a topic: policies, partitions, times and groups."),
    "lag": ("groups", "Show the lag of groups."),
    "ls": ("topics", "List topics, or the segments of a topic."),
    "mirror": ("copies", "Copy a topic, or update an earlier copy."),
    "promote": ("copies", "Turn a copy into a topic that can be written."),
    "receive": ("copies", "Copy a topic from another host, or update an earlier copy."),
    "repair": ("care", "Repair a damaged topic, so that it can be opened and read."),
    "reset": ("groups", "Move the commits of a group that has no members."),
    "retain": ("care", "Drop the segments that the retention policy does not keep."),
    "scrub": ("care", "Check a topic at a limited rate, and heal it from other copies."),
    "serve": ("copies", "Let other hosts copy a topic: the other end of `loglib receive`."),
    "snapshot": ("copies", "Copy the state of a topic at one moment."),
    "tail": ("read", "Print the last records of a topic, and follow it."),
    "tier": ("offload", "Upload sealed segments to a directory or an object store."),
    "verify": ("care", "Check all of a topic: every header, batch and link."),
}


class _Verbs(click.Group):
    """Imports the module of a verb when the verb is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, _ = _VERBS[cmd_name]
        command: click.Command = getattr(import_module(f".{module}", __package__), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, text) for verb, (_, text) in _VERBS.items()])


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="loglib-segments", prog_name="loglib")
def _loglib() -> None:
    """Create, write, read and look after topics of loglib.

    Data goes to standard output, messages to standard error. With --json each line is a JSON object.

    Exit codes: 0 success, 1 damage or a gap was found, 2 the command was wrong, 3 it failed. A signal gives 128 plus
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
    """The exit code of a command that an error has ended. Prints the error in one line."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case Ended():
            return 128 + error.number  # as shells do
        case click.Abort() | KeyboardInterrupt():
            return 128 + signal.SIGINT
        case SystemExit():  # of the completion
            return _WRONG if error.code else 0
        case click.ClickException():
            with suppress(OSError):  # standard error may fail, too
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
