"""UI: show a page for a directory of topics in a browser, until a signal ends it.

Invariant: it serves this host alone, and only to who knows the token in the address. It changes and locks nothing.
"""

from __future__ import annotations

import os

import click

from ..config.extras import how_to_install
from ..config.uri import is_remote
from .output import note, safe


@click.command()
@click.argument("path", type=click.Path(readable=False), default=".")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="a free one",
              help="The port on 127.0.0.1.")  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Only print the address.")
def ui(path: str, port: int, no_browser: bool) -> None:
    """Show topics in a browser: what is wrong, rates and lag, records, groups, and why segments stay.

    PATH is a topic, or a directory of topics. The page only reads. It is for this host, and the address has a token:
    who knows it can read all records. Needs the extra [ui].
    """
    if is_remote(path):
        raise click.UsageError("an object store has no page; name a topic, or a directory of topics")
    if not os.path.isdir(path):
        raise click.UsageError(f"{safe(path)}: no such directory")
    try:
        from ..ui.server import serve
    except ModuleNotFoundError as error:
        message = how_to_install(error, what="the page")
        if message is None:
            raise
        raise click.ClickException(message) from error
    try:
        serve(path, port=port, browser=not no_browser, report=lambda address: note(f"serving {address}"))
    except OSError as error:
        raise click.ClickException(f"127.0.0.1:{port}: {error.strerror or error}") from error
