"""The arithmetic of docs/spark.md against a simulation of each task."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from conftest import SOURCE


@pytest.fixture(scope="module")
def sizing() -> ModuleType:
    path = SOURCE.parent / "scripts" / "spark_sizing.py"
    spec = importlib.util.spec_from_file_location("spark_sizing", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["spark_sizing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_of_the_page_is_what_the_simulation_prints(sizing: ModuleType) -> None:
    page = (SOURCE.parent / "docs" / "spark.md").read_text("utf-8")
    assert sizing.table() in page
    example = sizing.EXAMPLE
    assert f"`maxBytesPerTrigger` is {example.trigger_bytes / 2**30:.0f}g" in page
    assert f"a host receives {sizing.network_bytes_s(example) / 1e6:.0f} MB/s" in page
    assert f"{sizing.requests(86400 * 1e9) / 1e6:.0f} million of them" in page
    assert f"the largest of them {sizing.shares(example)[0] * 1000:.0f} times" in page


@pytest.mark.parametrize(("hosts", "skew"), [(1, 0), (4, 0.8), (25, 1.3)])
def test_formulas_agree_with_a_simulation_of_a_thousand_partitions(sizing: ModuleType, hosts: int, skew: float) -> None:
    plan = replace(sizing.EXAMPLE, hosts=hosts, skew=skew, bytes_s=250e6 * hosts)
    plan = replace(plan, trigger_bytes=sizing.trigger_bytes(plan, 10))
    for seconds in (1, 10, 60):
        size = sizing.trigger_bytes(plan, seconds)
        simulated, tasks = sizing.run_batch(plan, [size * share for share in sizing.shares(plan)])
        assert simulated == pytest.approx(seconds, rel=0.3 if seconds == 1 else 0.1)  # few tasks are a matter of luck
        assert size / plan.task_bytes <= tasks <= 2 * size / plan.task_bytes + 1
    batches = sizing.simulate(plan, outage_s=600, until_s=400)
    expected = sizing.catch_up_seconds(plan, 600)
    assert sizing.caught_up_at(plan, batches) == pytest.approx(expected, rel=0.1, abs=plan.trigger_s)
    assert all(each.seconds < plan.trigger_s for each in batches[-5:])  # it keeps up


def test_query_that_cannot_keep_up_falls_behind_for_ever(sizing: ModuleType) -> None:
    plan = replace(sizing.EXAMPLE, bytes_s=1.1 * sizing.capacity(sizing.EXAMPLE))
    batches = sizing.simulate(plan, outage_s=60, until_s=200)
    assert all(each.size >= plan.trigger_bytes * 0.999 for each in batches)
    assert sizing.catch_up_seconds(plan, 60) < 0  # never
