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

from ..config.extras import how_to_install
from ..errors import LogError
from .ending import FAILED, WRONG, fail, fail_by
from .signals import Ended

_NO_READER = 128 + signal.SIGPIPE
_CLICK = (click.ClickException, click.exceptions.Exit, click.Abort)
_COMPLETE = "_LOGLIB_COMPLETE"

# By what one wants to do: the module of each verb, and what the list of all verbs says of it, which so needs no module
# of a verb.
_PURPOSES = {
    "Write and read records": {
        "append": ("write", "Append the lines of files, or of standard input, as records."),
        "cat": ("read", "Print the values of a topic, one per line."),
        "tail": ("read", "Print the last records of a topic, and follow it."),
        "sql": ("sql", "Query topics with SQL, by DuckDB."),
        "consume": ("consume", "Read a topic as a member of a consumer group: print records, and commit them."),
    },
    "Make and change topics": {
        "create": ("topics", "Create a topic."),
        "alter": ("topics", "Change the policies of a topic."),
        "rename": ("topics", "Give a topic another name. Its groups stay with it."),
        "copy": ("duplicate", "Copy the records of a topic to a new one, also with other partitions or policies."),
        "delete": ("topics", "Delete a topic with all its records, groups and shares."),
    },
    "Look at topics and groups": {
        "ls": ("topics", "List topics, or the segments of a topic."),
        "info": ("topics", "Describe a topic: policies, partitions, times, groups and shares."),
        "groups": ("groups", "List consumer groups."),
        "lag": ("groups", "Show the lag of groups."),
        "ui": ("ui", "Show topics in a browser."),
        "top": ("top", "Show how fast topics grow, and how late their groups and shares are."),
        "du": ("sizes", "Show how many bytes a topic takes, and for what."),
    },
    "Watch and measure": {
        "check": ("check", "Compare topics with limits, for cron, Nagios and health probes."),
        "exporter": ("exporter", "Serve the figures of topics for Prometheus."),
        "audit": ("audit", "Compare what was produced, copied and consumed, by time window."),
        "bench": ("bench", "Measure writing and reading on a disk."),
    },
    "Change consumer groups": {
        "reset": ("groups", "Move the commits of a group that has no members."),
        "evict": ("groups", "Take its partitions away from a member of a group that hangs."),
        "delete-group": ("groups", "Delete a consumer group that has no members."),
    },
    "Jobs": {
        "share": ("shares", "Look at shares, by which workers take jobs; reset, alter, evict, delete."),
        "redrive": ("redrive", "Send dead letters back to the topics that they came from."),
    },
    "Drop or offload old records": {
        "retain": ("upkeep", "Drop the segments that the retention policy does not keep."),
        "delete-before": ("upkeep", "Drop the segments of a topic before an offset or a time."),
        "seal": ("upkeep", "Seal the open segments of a topic."),
        "archive": ("offload", "Write sealed segments as Parquet files."),
        "tier": ("offload", "Upload sealed segments to a directory or an object store."),
    },
    "Copies, backups and other hosts": {
        "snapshot": ("copies", "Copy the state of a topic at one moment."),
        "mirror": ("copies", "Copy a topic, or update an earlier copy."),
        "serve": ("copies", "Let other hosts copy a topic: the other end of `loglib receive`."),
        "receive": ("copies", "Copy a topic from another host, or update an earlier copy."),
        "promote": ("copies", "Turn a copy into a topic that can be written."),
    },
    "Find and mend damage": {
        "verify": ("care", "Check all of a topic: every header, batch and link."),
        "scrub": ("care", "Check a topic at a limited rate, and heal it from other copies."),
        "heal": ("care", "Replace damaged bytes of a topic with those of other copies."),
        "repair": ("care", "Repair a damaged topic, so that it can be opened and read."),
        "dump": ("dump", "Print the stored form of segments and batches."),
    },
    "The shell": {
        "completion": ("program", "Print a script that completes commands in your shell."),
    },
}
_VERBS = {verb: facts for verbs in _PURPOSES.values() for verb, facts in verbs.items()}

# The words of other tools, and the verb that does it here.
_ELSEWHERE = {
    "add-partitions": "alter --add-partitions", "backup": "snapshot", "copy-to": "copy", "consumer": "consume",
    "consumer-groups": "groups", "cp": "copy", "describe": "info", "dump-log": "dump", "export": "cat --format",
    "follow": "tail -f", "fsck": "verify", "get": "cat", "grep": "cat --grep", "head": "cat -n 10", "import": "append",
    "insert": "append", "jobs": "share ls", "list": "ls", "mv": "rename", "produce": "append", "producer": "append",
    "publish": "append", "query": "sql", "queues": "share ls", "read": "cat", "replicate": "mirror", "rm": "delete",
    "send": "append", "share-groups": "share ls", "shares": "share ls", "show": "info", "stats": "info",
    "status": "info", "subscribe": "tail -f", "topics": "ls", "watch": "tail -f", "write": "append",
    "xadd": "append", "xinfo": "info", "xrange": "cat", "xread": "tail -f",
}  # fmt: skip
# The options of other tools, and how a verb does it here.
_OPTIONS_ELSEWHERE = {
    ("append", "--csv"): "`--format csv`", ("append", "--json"): "`--format jsonl`",
    ("archive", "--to"): "the second argument", ("cat", "--csv"): "`--format csv`",
    ("cat", "--follow"): "`loglib tail -f`", ("cat", "-f"): "`loglib tail -f`",
    ("cat", "--from-beginning"): "the default", ("cat", "--group"): "`loglib consume --group`",
    ("cat", "--limit"): "`-n`", ("cat", "--output"): "`> FILE`", ("cat", "-o"): "`> FILE`",
    ("consume", "--follow"): "the default; `--timeout 0` ends it", ("consume", "--from-beginning"): "the default",
    ("consume", "--limit"): "`-n`", ("consume", "-f"): "the default; `--timeout 0` ends it",
    ("create", "--partition"): "`--partitions`", ("create", "-p"): "`--partitions`",
    ("tail", "--from-beginning"): "`--from begin`", ("tail", "--group"): "`loglib consume --group`",
    ("tail", "--limit"): "`-n`", ("tail", "--no-follow"): "the default, without `-f`",
}  # fmt: skip


class _Verbs(click.Group):
    """Imports the module of a verb when the verb is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, _ = _VERBS[cmd_name]
        command: click.Command = getattr(import_module(f".{module}", __package__), cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand:
            verb = args[0]
            if verb.lower() in _ELSEWHERE:
                message = f"No such command {verb!r}. Here it is `loglib {_ELSEWHERE[verb.lower()]}`."
                raise click.UsageError(message, ctx) from None
            raise click.exceptions.NoSuchCommand(verb, possibilities=_VERBS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _VERBS))
        for purpose, verbs in _PURPOSES.items():
            with formatter.section(purpose):
                formatter.write_dl([(verb.ljust(width), text) for verb, (_, text) in verbs.items()])


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="loglib-segments", prog_name="loglib")
def _loglib() -> None:
    """Create, write, read and look after topics of loglib.

    Data goes to standard output, messages to standard error. With --json each line is a JSON object.

    Exit codes: 0 success, 1 damage or a gap was found, 2 the command was wrong, 3 it failed. A signal gives 128 plus
    its number: 130 for Ctrl-C.
    """


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands in your shell.

    \b
    For bash: loglib completion bash > ~/.local/share/bash-completion/completions/loglib
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(_loglib, {}, "loglib", _COMPLETE).source())


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
    except ImportError as error:
        message = how_to_install(error)
        if message is None:
            raise
        return fail(message, FAILED)
    except (*_CLICK, KeyboardInterrupt, SystemExit, OSError, LogError, ValueError, MemoryError) as error:
        return _code_of(error)


def _hinted(error: click.ClickException) -> click.ClickException:
    """The error; for an option that has another name here, one that says it."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        here = _OPTIONS_ELSEWHERE.get((error.ctx.info_name or "", error.option_name))
        if here is not None:
            return click.UsageError(f"No such option {error.option_name!r}. Here it is {here}.", error.ctx)
    return error


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
            return WRONG if error.code else 0
        case click.ClickException():
            with suppress(OSError):  # standard error may fail, too
                _hinted(error).show()
            return WRONG if isinstance(error, click.UsageError) else FAILED
        case BrokenPipeError():
            return _NO_READER
        case LogError() | OSError() | ValueError():
            return fail_by(error)
    return fail("there is not enough memory", FAILED)
