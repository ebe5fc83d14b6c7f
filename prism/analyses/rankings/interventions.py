"""What fixing one cause would bring: at its median or faster, by paired differences.

An intervention changes the program and nothing else; all run under the same keys, on the same
clusters, until the order of what they gain in p95 is clear (`prism.analyses.differences`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.differences import (
    FIRST_BLOCKS,
    Candidate,
    Difference,
    Sampler,
    difference,
    fit_slope,
    standard_error,
)
from prism.analyses.rankings.shares import NEGLIGIBLE, stall_moments
from prism.analyses.rankings.target import RankingCase
from prism.common.arrays import Array
from prism.simulation.draws import cluster_times
from prism.simulation.effects import HeldTables, Treatment, hold_effect
from prism.simulation.prepare import Prepared, treat_classes
from prism.simulation.program import Program
from prism.simulation.variance_inputs import Input


def freeze(step: Prepared, entry: Input, seed: int) -> Program:
    """Return a step's program with one cause at its median; graph and keys stay.

    A kernel class stands for its kernels' own noise, as in its share of the variance.
    """
    if entry.kind == "effects":
        return hold_effect(step.program, entry.name)
    if step.workload is not None:
        return treat_classes(step, {entry.name: Treatment(frozen=True)}, seed)
    program, held = step.program, HeldTables(step.program)  # ops of a trace hold one class each
    own = program.shares[:, program.classes.index(entry.name)] > 0.0
    table = program.ops.table.copy()
    hit = (program.ops.kind == engine.DRAW) & own[program.ops.coef]
    table[hit] = held(table[hit])
    return replace(program, ops=program.ops._replace(table=table), tables=held.stack())


COMPARED = ("mean", "std", "p50", "p95", "p99")
MOST_BLOCKS = 32  # clusters of an intervention
BUDGET = 4_000_000_000  # op-samples beyond the first blocks of all
TOLERANCE = 1e-3  # of p95, by which an answer tells gains apart
SELDOM = 5e-5  # share of the critical path below which the answer shows no gain


@dataclass(eq=False, kw_only=True)
class Change(Candidate):
    """An intervention on one cause, and its target."""

    case: RankingCase
    entry: Input | None = None  # None: as it is
    what: str = ""
    _samples: dict[tuple[int, float], Array] = field(default_factory=dict, repr=False)

    @property
    def held(self) -> str:
        """Name of the effect that is at its median; empty where none is."""
        return self.entry.name if self.entry and self.what == "freeze" else ""

    def samples(self, measure: str, n: int | None = None) -> Array:
        """Return the target on the first n cluster draws [draw, sample], whatever the measure."""
        key = self.n if n is None else n, self.slope
        if key not in self._samples:
            steps = super().samples("mean", n)
            effects = np.tile(self.effects[:n], steps.shape[1] // self.effects.shape[1])
            times = self.case.target.times(steps, effects, steady=self.held == "step")
            self._samples = {key: times}
        return self._samples[key]


@dataclass
class _Runner(Sampler):
    """Runs changes; their quiet times follow from those of the step as it is."""

    quiet: Array = field(default_factory=lambda: np.empty(0))

    def _begin(self, candidate: Candidate, program: Program) -> None:
        assert isinstance(candidate, Change)
        candidate.cost, candidate.quiet = program.n_draws * engine.LANES, self.quiet
        if candidate.held == "rank":
            candidate.quiet = np.zeros_like(self.quiet)
        elif candidate.what == "speed" and self.quiet.size:
            clusters = range(self.quiet.size)
            quiet = cluster_times(program, clusters, self.context)
            candidate.quiet = quiet.astype(np.float64)


def compare_interventions(
    case: RankingCase,
    asked: Sequence[str],
    on_path: Array,
    figures: dict[str, float],
    speed_up: float,
) -> dict[str, dict[str, Any]]:
    """Figures by cause of the target with it at its median, or faster, and what that gains.

    A class that is next to never on the critical path, which `on_path` tells [class], is taken to
    change nothing. `figures` are those of the target that are known better.
    """
    sampler = case.sampler
    base = Change(program=sampler.step.program, case=case)
    changes = [
        Change(program=program, case=case, entry=entry, what=what)
        for what in asked
        for entry in case.inputs
        if (program := _program(case, entry, what, speed_up)) is not None
    ]
    seldom = (on_path < SELDOM) & (sampler.bounds <= NEGLIGIBLE * sampler.whole)
    idle = {entry.name for entry, none in zip(case.inputs, seldom, strict=False) if none}
    run = [base, *(c for c in changes if c.entry and c.entry.name not in idle)]
    _run_until_clear(case, run)
    out: dict[str, dict[str, Any]] = {entry.name: {} for entry in case.inputs}
    for change in changes:
        assert change.entry is not None
        row, compared = out[change.entry.name], change if change in run else base
        suffix, tail = ("frozen", "") if change.what == "freeze" else ("faster", "_faster")
        gains = {name: _gain(base, compared, name) for name in COMPARED}
        if sampler.stall_delays is not None and case.target.name == "step_time":
            gains |= _with_rare_stalls(case, change, gains)
        if case.per_step is not None:
            part = 1.0 if case.target.name == "time_to_train" else case.per_step
            gains["run"] = gains["mean"][0] * part, gains["mean"][1] * part
        for name, (gain, half) in gains.items():
            row[f"{name}_reduction{tail}"] = gain
            row[f"{name}_reduction{tail}_ci"] = [gain - half, gain + half]
            if name != "run":
                before = figures[name] if name in figures else _figure(base, name)
                row[f"{name}_if_{suffix}"] = before * (1.0 - gain)
    return out


def _program(case: RankingCase, entry: Input, what: str, speed_up: float) -> Program | None:
    """Return the program with one input treated; None where an effect is to be made faster."""
    if what == "freeze":
        program = freeze(case.step, entry, case.sampler.context.seed)
    elif entry.kind == "effects":
        return None
    else:
        faster = {entry.name: Treatment(factor=1.0 - speed_up)}
        program = treat_classes(case.step, faster, case.sampler.context.seed)
    return program if case.sampler.stall_delays is None else hold_effect(program, "stall")


def _run_until_clear(case: RankingCase, changes: Sequence[Change]) -> None:
    """Run changes, the first of which changes nothing, until the order of their p95 is clear."""
    sampler, control = case.sampler, case.sampler.control
    has_ranks = control is not None and control.variance > 0.0
    quiet = control.times[0] if control is not None and has_ranks else np.empty(0)
    before = sampler.done

    def tell(done: int, planned: int) -> None:
        sampler.done = before + done
        sampler.context.report(sampler.done, before + planned)

    runner = _Runner(replace(sampler.context, progress=tell), quiet=quiet)
    runner.planned, n, budget = FIRST_BLOCKS * len(changes), FIRST_BLOCKS, float(BUDGET)
    for change in changes:
        runner.extend(change, n)
    slope = fit_slope(changes)
    for change in changes:
        change.slope = slope
    while n < MOST_BLOCKS:
        unclear = _unclear(changes[1:])
        n = min(MOST_BLOCKS, n + max(n // 2, 4))
        budget -= sum((n - change.n) * change.cost for change in (changes[0], *unclear))
        if not unclear or budget < 0.0:
            return
        for change in (changes[0], *unclear):
            runner.extend(change, n)


def _unclear(changes: Sequence[Change]) -> list[Change]:
    """Find those whose p95 is not clearly apart from the next one's, by what an answer shows."""
    out: dict[int, Change] = {}
    for one, other in pairwise(sorted(changes, key=lambda c: c.figure("p95"))):
        apart = difference(one, other, "p95")
        if not apart.is_clear and apart.half_widths[1] > TOLERANCE:
            out |= {id(one): one, id(other): other}
    return list(out.values())


def _figure(base: Change, name: str) -> float:
    return float(base.samples(name).std()) if name == "std" else base.figure(name)


def _gain(base: Change, change: Change, name: str) -> tuple[float, float]:
    """Relative reduction of a figure, and half of its 95 % interval."""
    if change is base:
        return 0.0, 0.0
    if name != "std":
        found = difference(change, base, name)
        return -found.share, found.half_widths[1]
    n = min(base.n, change.n)
    square, less = (_squares(c.samples("std", n)) for c in (base, change))
    whole = float(square.mean()) or 1.0
    kept = float(less.mean()) / whole
    error = standard_error(less - kept * square) / whole
    half = Difference(0.0, error, kept, error, n).half_widths[0]
    kept_std = kept**0.5
    return 1.0 - kept_std, half / (2.0 * kept_std) if kept_std > 0.0 else 0.0


def _squares(samples: Array) -> Array:
    return np.asarray(((samples - samples.mean()) ** 2).mean(axis=1))


def _with_rare_stalls(
    case: RankingCase, change: Change, gains: dict[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Gains in mean and spread, of steps with stalls that no run meets.

    With s the share of the variance that stalls make, what else gains r of the spread without them
    leaves sqrt((1 - s) (1 - r)^2 + s).
    """
    sampler = case.sampler
    assert sampler.stall_delays is not None
    delay, added = stall_moments(sampler.program, sampler.stall_delays)
    share = float(added.mean()) / (sampler.variance.total or 1.0)
    mean = float(sampler.step.a.mean() + delay.mean())
    if sampler.is_rare(change.entry) if change.entry else False:
        kept = (1.0 - share) ** 0.5
        error = standard_error(added) / (sampler.variance.total or 1.0) * (1.0 - share)
        return {
            "mean": (float(delay.mean()) / mean, 2.0 * standard_error(delay) / mean),
            "std": (1.0 - kept, error / kept if kept > 0.0 else math.nan),
        }
    gain, half = gains["std"]
    kept = ((1.0 - share) * (1.0 - gain) ** 2 + share) ** 0.5
    return {"std": (1.0 - kept, half * (1.0 - share) * (1.0 - gain) / (kept or 1.0))}
