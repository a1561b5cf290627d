"""A forked child that does one thing and ends."""

import os

from processes import end_with


def in_child(action) -> int:  # type: ignore[no-untyped-def]
    """Fork, run the action in the child, and return its exit status: 0 if it went well."""
    pid = os.fork()
    if pid == 0:
        end_with(action)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
