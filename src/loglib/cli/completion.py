"""Completion: the script with which a shell completes verbs, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands in your shell.

    \b
    For bash: loglib completion bash > ~/.local/share/bash-completion/completions/loglib
    """
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(context.find_root().command, {}, "loglib", "_LOGLIB_COMPLETE").source())
