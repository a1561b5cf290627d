"""Fixed order: which process runs a test, and after which others, follows from the list of the tests alone.

pytest-xdist gives the next tests to the process that is free first. Then a test runs after other ones each time, and
one that fails because of what ran before it fails by chance. Here each process has its whole list before it begins.
"""

from __future__ import annotations

from xdist.scheduler import LoadScheduling  # type: ignore[import-untyped]


class FixedOrder(LoadScheduling):  # type: ignore[misc]
    """For `--dist load`, where tests go round the processes, and for `loadfile`, where files stay whole."""

    collection: list[str] | None

    def schedule(self) -> None:
        if self.collection is not None:  # a process has died, and another one takes what it has left
            super().schedule()
        elif self._check_nodes_have_same_collection():
            self.collection = tests = list(next(iter(self.node2collection.values())))
            self.maxschedchunk = len(tests)
            nodes = sorted(self.nodes, key=lambda node: int(node.gateway.id.removeprefix("gw")))
            whole_files = self.config.getoption("dist") == "loadfile"
            for node, places in zip(nodes, deal(tests, len(nodes), whole_files=whole_files), strict=True):
                self.node2pending[node].extend(places)
                node.send_runtest_some(places)
                node.shutdown()  # when it has run them


def deal(tests: list[str], processes: int, *, whole_files: bool = False) -> list[list[int]]:
    """The places in the list of the tests that each process runs, in their order.

    Of whole files, those with most tests are dealt first, each to the process that has the fewest so far.
    """
    if not whole_files:
        return [list(range(number, len(tests), processes)) for number in range(processes)]
    files: dict[str, list[int]] = {}
    for place, test in enumerate(tests):
        files.setdefault(test.partition("::")[0], []).append(place)
    dealt: list[list[int]] = [[] for _ in range(processes)]
    for places in sorted(files.values(), key=len, reverse=True):
        min(dealt, key=len).extend(places)
    return dealt
