"""Start: the command line's entry point.

Invariant: Click may be missing, and then a message names the extra to install. The three standard streams are open, so
no file of the library gets their descriptors. Exit code 1 means that something was found, and nothing else: not even a
fault of the program itself.

Exit codes: 0 success, 1 damage, a gap or what a check looks for was found, 2 the command was wrong, 3 it failed, 129,
130 and 143 a signal ended it (SIGHUP, Ctrl-C, SIGTERM), 141 no process reads its output any more.
"""

from __future__ import annotations

import sys
import traceback

from .signals import Ended, listen
from .streams import end_output, note, prepare

_FAILED = 3


def main() -> None:
    """Run the command that `sys.argv` has, and exit."""
    code = _FAILED
    try:
        listen()
        prepare()
        code = _run()
    except Ended as ended:  # while the modules were imported, or at the last moment
        code = 128 + ended.number
    except Exception:  # noqa: BLE001  A fault of this program. The interpreter would exit with 1, which means damage.
        note(traceback.format_exc().rstrip())
    end_output()
    sys.exit(code)


def _run() -> int:
    try:
        from .program import run
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        note(f"loglib: the command line needs {error.name}: pip install 'loglib-segments[cli]'")
        return _FAILED
    return run(sys.argv[1:])
