"""Results: all measurements of one run of the benchmarks, and the figures computed from them.

Invariant: a ratio compares two measurements of one repetition, which ran within seconds of each other. The
ratio that is reported is the median over the repetitions. So a machine that is busy for a while spoils no ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from measure import Measurement

Figure = Callable[[Measurement], float]


@dataclass(slots=True)
class Results:
    """By case and by run: one measurement per repetition, None where it failed."""

    cases: dict[str, dict[str, list[Measurement | None]]] = field(default_factory=dict)

    def add(self, case: str, label: str, measurement: Measurement | None) -> None:
        self.cases.setdefault(case, {}).setdefault(label, []).append(measurement)

    def all_of(self, case: str, label: str) -> list[Measurement]:
        """Return the measurements that succeeded."""
        return [one for one in self.cases.get(case, {}).get(label, []) if one is not None]

    def median(self, case: str, label: str, figure: Figure) -> float | None:
        """Return the median of a figure over the repetitions."""
        figures = [figure(one) for one in self.all_of(case, label)]
        return statistics.median(figures) if figures else None

    def least(self, case: str, label: str, figure: Figure) -> float | None:
        """Return the lowest of a figure over the repetitions: for times, the one that was disturbed least."""
        return min((figure(one) for one in self.all_of(case, label)), default=None)

    def ratio(self, case: str, label: str, other: str, figure: Figure = lambda one: one.rate) -> float | None:
        """Return the ratio of the run `label` to the run `other`: the median of the ratios in each repetition."""
        runs = self.cases.get(case, {})
        pairs = zip(runs.get(label, []), runs.get(other, []), strict=False)
        ratios = [figure(one) / figure(two) for one, two in pairs if one and two and figure(two)]
        return statistics.median(ratios) if ratios else None

    def best_ratio(self, case: str, label: str, other: str) -> float | None:
        """Return the same ratio between the best rounds of all repetitions, which a busy machine disturbed least."""
        best = [max((one.best_rate for one in self.all_of(case, name)), default=0.0) for name in (label, other)]
        return best[0] / best[1] if all(best) else None
