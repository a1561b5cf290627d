"""examples/monitoring: alerts and a dashboard whose figures are those that the exporter really gives.

What needs Prometheus itself is skipped without it. The names and labels of all queries are compared with those of the
exporter in any case.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import monitored
import pytest
from prometheus_client import CollectorRegistry

from conftest import ROOT, start_python
from loglib import Topic
from loglib.metrics.exporter import PathCollector
from loglib.metrics.prometheus import TopicCollector

yaml: Any = importlib.import_module("yaml")  # published without types

EXAMPLES = ROOT / "examples" / "monitoring"
RULES: list[dict[str, Any]] = yaml.safe_load((EXAMPLES / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((EXAMPLES / "dashboard.json").read_text("utf-8"))
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"] for target in panel["targets"]
]  # fmt: skip
NAME = re.compile(r"\bloglib_\w+")
OF_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample that the exporter, or the collector of a process, gives."""
    place = tmp_path_factory.mktemp("monitored")
    found: dict[str, set[str]] = {}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PathCollector([monitored.healthy(place / "well"), monitored.troubled(place / "bad" / "topics")]))
    own = CollectorRegistry(auto_describe=False)
    with Topic.open(place / "own", create=True) as topic:
        topic.append(b"x", sync=True)
        own.register(TopicCollector([topic]))
        for each in (registry, own):
            for sample in (sample for metric in each.collect() for sample in metric.samples):
                found[sample.name] = found.get(sample.name, set()) | set(sample.labels)
    return found


def names_in(query: str) -> set[str]:
    return set(NAME.findall(query))


def labels_in(query: str) -> set[str]:
    """The labels by which a query chooses, groups and matches."""
    listed = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right) \(([^)]*)\)", query)
    chosen = re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", query)
    return {each.strip() for text in listed for each in text.split(",") if each.strip()} | set(chosen)


def check_query(query: str, given: dict[str, set[str]]) -> None:
    names = names_in(query)
    assert names, query
    assert names <= set(given), f"{query}: the exporter gives no {sorted(names - set(given))}"
    known = set.union(*(given[each] for each in names)) | OF_PROMETHEUS
    assert labels_in(query) <= known, f"{query}: no label {sorted(labels_in(query) - known)}"


# --- without Prometheus ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_is_about_figures_that_are_given(rule: dict[str, Any], given: dict[str, set[str]]) -> None:
    check_query(rule["expr"], given)
    assert rule["labels"]["severity"] in ("warning", "critical") and rule["for"]
    assert rule["annotations"]["summary"]
    known = set.union(*(given[each] for each in names_in(rule["expr"]))) | OF_PROMETHEUS
    by = re.search(r"(?:max|min|sum)(?: by)? ?(?:by )?\(([^)]*)\)", rule["expr"])
    known &= ({each.strip() for each in by[1].split(",")} if by else known)
    for text in rule["annotations"].values():
        named = set(re.findall(r"\$labels\.(\w+)", text))
        assert named <= known, f"{rule['alert']} has no {sorted(named - known)} in {sorted(known)}"


@pytest.mark.parametrize("query", QUERIES)
def test_query_of_the_dashboard_is_about_figures_that_are_given(query: str, given: dict[str, set[str]]) -> None:
    check_query(query, given)


def test_each_figure_of_the_exporter_is_on_the_page_and_in_a_query(given: dict[str, set[str]]) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    asked = "\n".join([rule["expr"] for rule in RULES] + [str(each.values[0]) for each in QUERIES])
    exported = {name for name, labels in given.items() if "directory" in labels}
    assert len(exported) >= 15
    for name in exported:
        assert f"`{name}`" in page
        assert name in names_in(asked) | {"loglib_log_start_offset", "loglib_copy_lag_bytes"}, f"nobody asks for {name}"


def test_alerts_are_on_the_page() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    assert [rule["alert"] for rule in RULES if f"`{rule['alert']}`" not in page] == []


def test_dashboard_has_the_structure_that_grafana_imports() -> None:
    """Only Grafana itself can tell how it looks: this is what its JSON model asks for."""
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert {each["type"] for each in DASHBOARD["templating"]["list"]} == {"datasource", "query"}
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries") and panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
            assert target["legendFormat"]
    for each in DASHBOARD["templating"]["list"]:
        if each["type"] == "query":
            assert re.fullmatch(r"label_values\(loglib_up(\{.*\})?, \w+\)", each["query"]["query"])
    places = [panel["gridPos"] for panel in panels]
    assert all(each["x"] >= 0 and each["x"] + each["w"] <= 24 and each["h"] > 0 for each in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)


# --- with the real Prometheus ---------------------------------------------------------------------------

# The disk of the one is half full and stays so; that of the other has 5% free, and less at each scrape.
EXPORT = """
    import sys
    from loglib.cli.program import run
    from loglib.system.files import Files
    step = int(sys.argv.pop(1))
    free = iter(range(500 if not step else 50, -1000, -step) if step else iter(int, 1))
    Files.free_space = lambda *_: (next(free) if step else 500, 1000)
    sys.exit(run(["exporter", *sys.argv[1:], "--listen", "127.0.0.1:0"]))
"""
# A writer whose disk takes more than a second for each flush, and which reports that itself.
SLOW = """
    import sys, threading, time
    from prometheus_client import REGISTRY, start_http_server
    from loglib import Topic
    from loglib.metrics.prometheus import TopicCollector
    from loglib.system.files import Files
    topic = Topic.open(sys.argv[1], create=True)
    REGISTRY.register(TopicCollector([topic]))
    server, _ = start_http_server(0, addr="127.0.0.1")
    print(f"serving http://127.0.0.1:{server.server_address[1]}/metrics", file=sys.stderr, flush=True)
    datasync = Files.datasync
    Files.datasync = lambda files, fd: (time.sleep(1.2), datasync(fd))[1]
    def write():
        while True:
            topic.append(b"x", sync=True)
    threading.Thread(target=write, daemon=True).start()
    sys.stdin.readline()
"""


@pytest.fixture
def tools() -> dict[str, str]:
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if not all(found.values()):
        pytest.skip("NOT PROVED: this machine lacks prometheus and promtool (Debian's prometheus)")
    return {name: str(path) for name, path in found.items()}


def test_promtool_accepts_the_rules_and_they_fire_when_they_should(tools: dict[str, str]) -> None:
    for arguments in (
        ["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"],
    ):  # fmt: skip
        done = subprocess.run(
            [tools["promtool"], *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def exporting(program: str, *arguments: object) -> Iterator[str]:
    """A program that serves figures, and its address."""
    with start_python(program, *arguments) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.match(r"serving http://(.*)/metrics\n", line):
                    yield found[1]
                    return
            raise AssertionError("it serves nothing")
        finally:
            process.kill()


@contextmanager
def prometheus(tool: str, directory: Path, targets: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """A Prometheus that scrapes these targets every two seconds, and a function that asks its API."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()
    ]  # fmt: skip
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "1s"}
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config | {"scrape_configs": jobs}))
    shutil.copy(EXAMPLES / "alerts.yml", directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        tool, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def ask(path: str, **parameters: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            try:
                with urllib.request.urlopen(url, timeout=60) as answer:
                    return json.load(answer)["data"]
            except urllib.error.HTTPError as error:
                if error.code == 503:  # it listens, and is not ready yet
                    raise
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

        try:
            yield ask
        finally:
            process.kill()


def eventually(look: Callable[[], object], what: str) -> None:
    """Ask again until the answer is not empty: a server needs time to begin, and some scrapes for a rate."""
    deadline = time.monotonic() + 120
    while True:
        with suppress(urllib.error.URLError):  # it does not listen yet
            if look():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def soon_empty(missing: Callable[[], set[str]]) -> None:
    """Ask again until nothing is missing."""
    deadline = time.monotonic() + 120
    while left := missing():
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_real_prometheus_raises_each_alert_for_its_fault_alone_and_answers_each_query(
    tools: dict[str, str], tmp_path: Path
) -> None:
    well, bad = monitored.healthy(tmp_path / "well"), monitored.troubled(tmp_path / "bad" / "topics")
    with ExitStack() as at_end:
        writing = at_end.enter_context(Topic.open(bad / "stopped"))
        at_end.enter_context(Topic.open(well / "orders", replicas=[well / "copy" / "orders"]))
        targets = {
            "well": at_end.enter_context(exporting(EXPORT, 0, well)),
            "bad": at_end.enter_context(exporting(EXPORT, 1, bad)),
            "slow": at_end.enter_context(exporting(SLOW, tmp_path / "slow")),
        }
        ask = at_end.enter_context(prometheus(tools["prometheus"], tmp_path, targets))

        def results(query: str) -> list[Any]:
            found: list[Any] = ask("query", query=query)["result"]
            return found

        eventually(lambda: results('loglib_writer{topic="stopped"} == 1'), "the writer is not seen")
        writing.close()
        worker = at_end.enter_context(at_end.enter_context(Topic.open(bad / "jobs", mode="r")).share("mail"))
        kept = worker.take(0.0)
        assert kept is not None and kept.attempt == 2, "the record that was begun long ago is in hand again"
        expected = {rule["alert"] for rule in RULES} - {"LoglibNoFigures"}

        def alerts(job: str) -> set[str]:
            found = [each["labels"] for each in ask("alerts")["alerts"]]
            return {each["alertname"] for each in found if each.get("instance") == targets[job]}

        def missing() -> set[str]:
            left = expected - alerts("bad") - alerts("slow")
            if "LoglibJobsFail" in left and (job := worker.take(0.0)) is not None:
                job.reject()  # a counter must grow for its alert
            return left

        soon_empty(missing)
        assert alerts("slow") == {"LoglibSlowFlushes"}
        assert alerts("well") == set()
        assert all(rule["health"] == "ok" for group in ask("rules")["groups"] for rule in group["rules"])
        for query in (str(each.values[0]) for each in QUERIES):
            asked = query.replace("$__rate_interval", "1m")
            asked = re.sub(r"\$(instance|directory|topic)", ".*", asked)
            eventually(lambda asked=asked: results(asked), f"no answer to {asked}")  # type: ignore[misc]


def test_prometheus_is_not_needed_for_the_names(given: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError, match="the exporter gives no"):
        check_query("loglib_nonsense > 0", given)
    with pytest.raises(AssertionError, match="no label"):
        check_query("max by (nonsense) (loglib_up)", given)
    assert labels_in('a{x="1", y=~"2"} / on (p, q) group_left (r) b') == {"x", "y", "p", "q", "r"}
    assert os.path.exists(EXAMPLES / "alerts_test.yml")
