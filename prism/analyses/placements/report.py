"""Figures of placements and alternatives, compared by their paired differences.

Programs have run on different numbers of clusters; every figure is that of the one with most of
them plus a paired difference, so that rows of a table can be subtracted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from prism.analyses.placements.problem import Problem
from prism.analyses.placements.selection import Arm, Objective, difference, pseudo_values
from prism.cluster.nodemap import NodeSlowdown

Array = NDArray[np.float64]
Int = NDArray[np.int64]
FIGURES: dict[str, float | None] = {"mean": None, "p50": 0.5, "p95": 0.95, "p99": 0.99}
LEVEL = 0.95


class Comparison:
    """Figures of arms [s] against a reference arm, which has run on most clusters.

    Savings are relative to the current one.
    """

    def __init__(self, objective: Objective, reference: Arm, current: Arm) -> None:
        self.objective, self.reference, self.current = objective, reference, current

    def figures(self, arm: Arm, work: float = 1.0) -> dict[str, Any]:
        """Return mean and quantiles of the step, the objective and what is saved."""
        out: dict[str, Any] = {}
        for name, q in FIGURES.items():
            out[name], error = self._value(arm, q)
            if name == "p95":
                out["p95_se"] = error
        out["objective"], out["objective_se"] = self._objective(arm)
        out["saved"], *out["saved_ci"] = self._saving(arm, work)
        if work != 1.0:
            out["work"] = work
            out |= {f"{name}_same_work": out[name] / work for name in (*FIGURES, "objective")}
        return out

    def _value(self, arm: Arm, q: float | None) -> tuple[float, float]:
        steps = self.objective.steps
        times = steps(self.reference, self.reference.n)
        whole, n = pseudo_values(times, q), min(arm.n, self.reference.n)
        apart = pseudo_values(steps(arm, n), q) - pseudo_values(steps(self.reference, n), q)
        error = np.hypot(_error(whole), _error(apart))
        value = times.mean() if q is None else np.quantile(times, q)
        return float(value + apart.mean()), float(error)

    def _objective(self, arm: Arm) -> tuple[float, float]:
        whole = self.objective.pseudo_values(self.reference, self.reference.n)
        apart = difference(self.objective, arm, self.reference)
        return float(whole.mean() + apart.mean), float(np.hypot(_error(whole), apart.error))

    def _saving(self, arm: Arm, work: float) -> tuple[float, float, float]:
        """Share of the current objective that is saved for the same work, and its interval."""
        n = min(arm.n, self.current.n)
        now = self.objective.pseudo_values(self.current, n)
        then = self.objective.pseudo_values(arm, n) / work
        saved = float(1.0 - then.mean() / now.mean())
        # of a ratio, to first order
        error = _error(then - (1.0 - saved) * now) / now.mean()
        wide = float(stats.t.ppf(0.5 + LEVEL / 2.0, n - 1)) * error
        return saved, float(saved - wide), float(saved + wide)


def _error(values: Array) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


def at_random(
    comparison: Comparison, arms: Sequence[Arm], nominal: Sequence[float], times: Array
) -> dict[str, Any]:
    """Figures over placements at random, from their deterministic times[placement].

    A figure is taken as linear in the deterministic time, as it is over the arms to within the
    residual, which is added to the spread.
    """
    rows = [comparison.figures(arm) for arm in arms]
    out: dict[str, Any] = {"n_placements": int(times.size)}
    x = np.asarray(nominal)
    for name in (*FIGURES, "objective"):
        y = np.array([row[name] for row in rows])
        spread = float(np.ptp(x))
        line = np.polyfit(x, y, 1) if spread > 1e-6 * x.max() else np.array([0.0, y.mean()])
        left = float(np.std(y - np.polyval(line, x)))
        found = np.polyval(line, times)
        out[name] = float(found.mean())
        out[f"std_of_{name}"] = float(np.hypot(found.std(), left))
        for q in (5, 95):
            out[f"p{q}_of_{name}"] = float(np.quantile(found, q / 100))
    now = comparison.figures(comparison.current)["objective"]
    out["saved"] = 1.0 - out["objective"] / now
    return out


def describe(problem: Problem, hosts: Int) -> dict[str, Any]:
    """Where a placement's slow nodes are: label, stages, replicas, slots that change.

    ``moved_between`` counts, by tier of the network, slots whose new node is in another unit.
    """
    held = [slot for slot, node in enumerate(hosts.tolist()) if node in problem.classes]
    pairs = sorted({pair for slot in held for pair in problem.layout.pairs[slot]})
    stages = [s for slot in held for s in sorted({s for _, s in problem.layout.pairs[slot]})]
    replicas = sorted({r for r, _ in pairs})
    return {
        "label": _label(sorted(stages), replicas),
        "stages": sorted(stages), "replicas": replicas,
        "hosts_changed": int((hosts != problem.hosts).sum()),
        "moved_between": _moved_between(problem, hosts),
    }  # fmt: skip


def _moved_between(problem: Problem, hosts: Int) -> dict[str, int]:
    block = problem.step.job.cluster
    gpu, before = hosts * block.gpus_per_node, problem.hosts * block.gpus_per_node
    counts = {
        name: int((gpu // tier.gpus != before // tier.gpus).sum())
        for name, tier in block.link_tiers()
    }
    return {name: n for name, n in counts.items() if n}


def _label(stages: Sequence[int], replicas: Sequence[int]) -> str:
    """Name stages and replicas in short."""
    if not stages:
        return "no slow node in the job"
    names = list(map(str, sorted(set(stages))))
    text = f"stage{'s' * (len(names) > 1)} {', '.join(names)}"
    if len(replicas) <= 4:
        return f"{text}; replica{'s' * (len(replicas) > 1)} {', '.join(map(str, replicas))}"
    return f"{text}; {len(replicas)} replicas"


def slow_nodes(
    problem: Problem, best: Int, slowdowns: Mapping[int, NodeSlowdown]
) -> list[dict[str, Any]]:
    """List the slow nodes, how slow they are, and where they are before and after."""
    return [
        {
            "node": node, **slowdowns[node]._asdict(),
            "before": _place(problem, problem.hosts, node), "after": _place(problem, best, node),
        }
        for node in problem.placed
    ]  # fmt: skip


def _place(problem: Problem, hosts: Int, node: int) -> dict[str, Any] | None:
    slots = np.flatnonzero(hosts == node)
    if slots.size == 0:
        return None
    pairs = problem.layout.pairs[int(slots[0])]
    return {
        "slot": int(slots[0]),
        "stages": sorted({s for _, s in pairs}), "replicas": sorted({r for r, _ in pairs}),
    }  # fmt: skip
