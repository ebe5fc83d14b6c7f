"""What fixing one cause would bring: frozen or faster, with common random numbers.

An intervention changes the program and nothing else (`prism.analyses.rankings.freezing`); both
programs run under the same keys, on the same clusters.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prism import engine
from prism.analyses.rankings.freezing import freeze_effect, treat_ops
from prism.analyses.rankings.shares import NEGLIGIBLE
from prism.analyses.rankings.target import Case
from prism.common.attribution import (
    COMPARED,
    Array,
    Estimate,
    reduction,
    share_interval,
    spread_clusters,
)
from prism.simulation.causes import Input
from prism.simulation.draws import cluster_times
from prism.simulation.prepare import treat_classes
from prism.simulation.program import Program
from prism.simulation.variability import Treatment

COMPARED_BLOCKS = {"kernels": 8, "effects": 16}  # clusters of an intervention
NOTABLE_CLUSTERS = 0.1  # share between clusters from which those compared are spread
KERNEL_CONTROL = 128  # clusters that comparisons of a kernel class are spread over
SELDOM = 5e-5  # share of the critical path below which the answer shows no gain


class Changed(NamedTuple):
    """An intervention: where its figures go, on which input, how, and the program that it gives."""

    row: int
    column: int
    entry: Input
    what: str
    program: Program


def compare_interventions(
    case: Case, asked: Sequence[str], whole: dict[str, Any], speed_up: float
) -> dict[str, Any]:
    """Mean, spread and quantiles with each input frozen, or made faster.

    A class that is next to never on the critical path is taken to change nothing.
    """
    shape = (len(asked), len(case.inputs))
    out = {f"{n}_if": np.full(shape, np.nan) for n in COMPARED}
    for n in COMPARED:
        out[f"{n}_reduction"] = np.full(shape, np.nan)
        out[f"{n}_reduction_ci"] = np.full((*shape, 2), np.nan)
    quiet, sampler = _quiet_times(case), case.sampler
    seldom = whole["critical_path_share"][: sampler.bounds.size] < SELDOM
    seldom &= sampler.bounds <= NEGLIGIBLE * sampler.whole
    for kind in COMPARED_BLOCKS:
        changed: list[Changed] = []
        alike: list[Changed] = []
        for i, what in enumerate(asked):
            for j, entry in enumerate(case.inputs):
                if entry.kind != kind:
                    continue
                if j < seldom.size and seldom[j]:
                    alike.append(Changed(i, j, entry, what, case.step.program))
                elif (program := _intervene(case, entry, what, speed_up)) is not None:
                    changed.append(Changed(i, j, entry, what, program))
        before, *after = _compare(case, changed, kind, quiet)
        after += [before] * len(alike)
        for (i, j, entry, _, _), times in zip(changed + alike, after, strict=True):
            for name, (left, saved) in reduction(before, times, sampler.seed).items():
                if name in ("mean", "std"):
                    saved = _with_rare_stalls(case, entry, name, saved)
                if f"target_{name}" in whole:
                    left = whole[f"target_{name}"] * (1.0 - saved.value)
                out[f"{name}_if"][i, j] = left
                out[f"{name}_reduction"][i, j] = saved.value
                out[f"{name}_reduction_ci"][i, j] = saved.low, saved.high
    return out


def _with_rare_stalls(case: Case, entry: Input, name: str, saved: Estimate) -> Estimate:
    """Return what an intervention saves of mean or spread, from what it saves where none stalls.

    Notes
    -----
    With V the variance of steps without stalls and S what stalls add to it, the spread falls by
    1 - sqrt(((1 - r)^2 V + S) / (V + S)): r is the reduction without stalls. S goes where the
    stalls themselves are left out.
    """
    sampler = case.sampler
    if sampler.rare is None or case.target.name != "step_time":
        return saved
    is_stall = engine.STALL in entry.streams
    if name == "mean":
        if not is_stall:
            return saved
        part = sampler.rare.delay / (sampler.a.mean() + sampler.rare.mean)
        half = 2.0 * part.std(ddof=1) / part.size**0.5
        return Estimate(*(float(part.mean() + k * half) for k in (0, -1, 1)))
    added = sampler.rare.added
    stalls = share_interval(added, sampler.resample(added.size))
    if is_stall:
        kept = [(1.0 - saved.value) ** 2 * (1.0 - s) for s in stalls]
    else:
        kept = [(1.0 - r) ** 2 * (1.0 - stalls.value) + stalls.value for r in saved]
    return Estimate(*(1.0 - max(0.0, x) ** 0.5 for x in kept))


def _quiet_times(case: Case) -> dict[str, Array]:
    """Quiet times to spread the clusters of a comparison by; none where clusters matter little."""
    control, variance = case.sampler.control, case.sampler.variance
    if control is None or control.variance == 0.0:
        return {}
    if case.target.name == "step_time" and variance.between < NOTABLE_CLUSTERS * variance.total:
        return {}
    return {"kernels": control.times[0][:KERNEL_CONTROL], "effects": control.times[0]}


def _quiet_after(case: Case, change: Changed, quiet: dict[str, Array]) -> Array | None:
    """Quiet times under a change: a class's own; effects other than ranks leave them."""
    _, _, entry, what, program = change
    if entry.kind not in quiet:
        return None
    before = quiet[entry.kind]
    if entry.kind == "effects" and engine.RANK not in entry.streams:
        return before
    if entry.kind == "effects" and what == "freeze":
        return np.zeros_like(before)
    sampler = case.sampler
    times = cluster_times(program, range(before.size), sampler.seed, sampler.threads)
    return times.astype(np.float64)


def _compare(
    case: Case, changed: Sequence[Changed], kind: str, quiet: dict[str, Array]
) -> list[Array]:
    """Target of the program, then under each change [cluster, replicate], under the same keys."""
    sampler, blocks = case.sampler, range(COMPARED_BLOCKS[kind])
    programs, known = [case.step.program, *(change.program for change in changed)], sampler.first
    if sampler.rare is not None and case.target.name == "step_time":
        programs = [freeze_effect(p, "stall") for p in programs]  # what few bring is added apart
    has_first, found = len(known[0]) >= len(blocks), []
    runs = sampler.run([(p, blocks, sampler.seed) for p in programs[has_first:]])
    if has_first:
        runs.insert(0, (known[0][: len(blocks)], known[1][: len(blocks)]))
    for i, (steps, effects) in enumerate(runs):
        own, steady = quiet.get(kind), False
        if i > 0:
            change = changed[i - 1]
            own = _quiet_after(case, change, quiet)
            steady = change.what == "freeze" and change.entry.name == "step"
        if own is not None:
            steps = spread_clusters(steps, own)
            effects = np.tile(effects, steps.shape[1] // effects.shape[1])
        found.append(case.target.times(steps, effects, steady))
    return found


def _intervene(case: Case, entry: Input, what: str, speed_up: float) -> Program | None:
    """Return the program with one input treated; None where an effect is to be made faster."""
    step = case.step
    if entry.kind == "effects":
        if what == "speed":
            return None
        return freeze_effect(step.program, entry.name)
    treatment = Treatment(frozen=True) if what == "freeze" else Treatment(factor=1.0 - speed_up)
    if step.workload is None and what == "freeze":
        k = step.program.classes.index(entry.name)
        return treat_ops(step.program, step.program.shares[:, k] > 0.0, treatment)
    return treat_classes(step, {entry.name: treatment}, case.sampler.seed)
