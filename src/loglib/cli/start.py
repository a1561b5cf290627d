"""Start: the command line's entry point.

Invariant: nothing of Click is imported before it is known to be installed, so that a missing extra is named in words.

Exit codes: 0 all is well, 1 damage or a gap was found, 2 the command was wrong, 3 it failed, 130 it was interrupted
(Ctrl-C), 141 nobody reads its output any more.
"""

from __future__ import annotations

import sys

from ..system.descriptors import fill_standard

__all__ = ["main"]


def main() -> None:
    """Run the command that `sys.argv` has, and exit."""
    fill_standard()  # else a socket or a pipe may get the number of standard error
    try:
        from .program import run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write(f"loglib: the command line needs {error.name}: pip install 'loglib-segments[cli]'\n")
        sys.exit(3)
    sys.exit(run(sys.argv[1:]))
