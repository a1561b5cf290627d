"""Exporter: serve the figures of topics for Prometheus, until a signal ends it.

Invariant: it listens on this host alone unless it is told otherwise. Between two requests no topic is open. A request
is answered in a thread that ends with the process.
"""

from __future__ import annotations

import os
import signal

import click

from ..config.uri import is_remote
from ..log import catalog, topic_file
from ..system.files import REAL
from .arguments import ADDRESS
from .output import note, safe

_DEFAULT = "127.0.0.1:9797"


@click.command()
@click.argument("topics", type=click.Path(readable=False), nargs=-1, required=True)
@click.option("--listen", type=ADDRESS, default=_DEFAULT, show_default=True,
              help="The address; port 0 is a free one. Who can connect reads the names and sizes of topics and groups.")
def exporter(topics: tuple[str, ...], listen: tuple[str, int]) -> None:
    """Serve the figures of topics in the text format of Prometheus, at /metrics.

    TOPICS are topics, or directories of topics. Each request looks at those that are there at that moment, and changes
    and locks nothing. Needs the extra [prometheus].
    """
    for each in topics:
        if is_remote(each):
            raise click.UsageError("an object store has no figures; name directories of topics")
        if not (topic_file.exists(REAL, each) or catalog.names(REAL, each)):
            note(f"{safe(each)}: no topic is there yet")
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from ..metrics.exporter import PathCollector
    except ModuleNotFoundError as error:
        needed = "the exporter needs prometheus_client: pip install 'loglib-segments[prometheus]'"
        raise click.ClickException(needed) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector(os.path.abspath(each) for each in topics))
    host, port = listen
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        raise click.ClickException(f"{host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    address = f"[{host}]" if ":" in host else host
    note(f"serving http://{address}:{server.server_address[1]}/metrics")
    while True:
        signal.pause()  # a signal that ends the command raises here
