"""From a question of placement to its answer: candidates, the best of them, and all beside it.

Deterministic times choose which placements are simulated; where noise adds unequally much to them,
more are taken in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from prism import engine
from prism.analyses.differences import (
    FIRST_BLOCKS,
    LEAST_COST,
    Candidate,
    Sampler,
    difference,
    probability_best,
    select,
    standard_error,
)
from prism.analyses.placements.alternatives import list_alternatives
from prism.analyses.placements.problem import Problem, slowest_of, slowness, worst_factor
from prism.analyses.placements.search import SearchResult, exchange, find_placements, random_hosts
from prism.analyses.placements.slack import level, slot_cost, stage_slack
from prism.analyses.placements.slots import Pattern
from prism.analyses.rankings.target import Target
from prism.common.arrays import Index
from prism.simulation.program import Program

SAMPLES = 8_000_000_000  # op-samples of a selection, about 10 s on two cores
ROW_SAMPLES, MOST_BLOCKS = 800_000_000, 64  # op-samples, cluster draws that a row is based on
LEAST_ARMS, MOST_ARMS = 6, 40
MARGIN = 0.003  # of the deterministic step, within which noise may bring a placement to the front
RANDOM_PLACEMENTS = 256
FIGURES = ("mean", "p50", "p95", "p99")
SAVED = {"saved": "", "p50_saved": "p50", "p95_saved": "p95"}  # of which measure; the objective's
METHOD = "all placements up to symmetry"


@dataclass(eq=False, kw_only=True)
class Placed(Candidate):
    """A placement that is simulated: its hosts, its deterministic time [s], its steps."""

    hosts: Index
    nominal: float


@dataclass
class PlacementCase:
    """A question and what answering it shares."""

    problem: Problem
    objective: str
    tolerance: float
    sampler: Sampler
    target: Target
    slope: float = 0.0  # see `Candidate`

    def placed(self, hosts: Index) -> Placed:
        """Make a placement ready to be simulated."""
        nominal = float(self.problem.times([hosts])[0])
        program = self.problem.program(hosts)
        return Placed(
            hosts=hosts, nominal=nominal, program=program, runs=self.target.times, slope=self.slope
        )

    def other(self, program: Program, work: float = 1.0) -> Candidate:
        """Make another program ready to be simulated."""
        return Candidate(program=program, work=work, runs=self.target.times, slope=self.slope)


def make_case(
    problem: Problem, objective: str, tolerance: float, sampler: Sampler
) -> PlacementCase:
    """Pose a question of placement with what answering it shares."""
    job = problem.step.job
    v = problem.step.effects
    target = Target(
        "time_to_train",
        job.n_steps,
        v.step.distribution.std,
        v.step.correlation_time_s,
        sampler.context.quiet,
    )
    return PlacementCase(problem, objective, tolerance, sampler, target)


def answer(case: PlacementCase) -> dict[str, Any]:
    """Find the best placement and compare it with everything else; times in seconds."""
    problem, sampler = case.problem, case.sampler
    found = find_placements(problem, sampler.context.seed)
    n = int(np.clip(ROW_SAMPLES // _block_cost(problem), FIRST_BLOCKS, MOST_BLOCKS))
    sampler.planned = LEAST_ARMS * FIRST_BLOCKS + 8 * n  # about as many rows are there
    candidates, best, p_correct = choose(case, found)
    case.slope = candidates[0].slope
    worst = max(candidates, key=lambda c: c.values(case.objective, FIRST_BLOCKS).mean())
    named = {"current": candidates[0], "best": best, "worst": worst}
    packed = problem.realise(min(found.patterns, key=len))  # in as few blocks as hold them
    together = _known(case, candidates, packed)
    most = max(n, best.n, candidates[0].n)
    for candidate, draws in ((best, most), (candidates[0], most), (worst, n), (together, n)):
        sampler.extend(candidate, draws)
    healthy = case.other(level(problem, problem.slow).program(problem.hosts))
    sampler.extend(healthy, n)
    comparison = Comparison(case.objective, problem.step.job.n_steps, best, candidates[0])
    placements = _names(named, candidates)
    names = {which: next(n for n, c in placements.items() if c is named[which]) for which in named}
    rows = [
        {"name": name, **describe(problem, c.hosts), "nominal": c.nominal,
         **comparison.figures(c)}
        for name, c in placements.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["name"] != names["best"], row["objective"]))
    figures = {row["name"]: row for row in rows}
    first, last = figures[names["best"]], figures[names["worst"]]
    return {
        **names, "objective": case.objective, "tolerance": case.tolerance,
        "p_correct": p_correct, "placements": rows, "healthy": comparison.figures(healthy),
        "worst_over_best_p50": last["p50"] / first["p50"],
        "worst_over_best_p95": last["p95"] / first["p95"],
        "alternatives": {
            **({} if problem.offered else {
                "all_in_one_replica": comparison.figures(together),
                "random": _at_random(case, [*candidates, together], comparison),
            }),
            **_alternatives(case, comparison, found, n),
        },
        **_explain(problem), "steps": problem.step.job.n_steps,
        **({"keep_segments": problem.segment} if problem.segment else {}),
        "slow_nodes": _slow_nodes(problem, best.hosts),
        "n_candidates": len(candidates), "n_screened": len(found.patterns),
        "method": METHOD if found.complete else "rules" if problem.offered else "search",
        "replicates": most * engine.LANES,
        "hosts": np.stack([placements[row["name"]].hosts for row in rows]),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- selecting
def _block_cost(problem: Problem) -> int:
    """Op-samples of a block."""
    return max(LEAST_COST, problem.step.program.n_draws * engine.LANES)


def choose(case: PlacementCase, found: SearchResult) -> tuple[list[Placed], Placed, float]:
    """Simulate what may be best until one is left; the current placement is the first.

    The longest deterministic step is among them: it tells how unequally noise adds to steps.
    Returns the candidates, the chosen one, and the probability that none of them is better by more
    than the tolerance.
    """
    problem, sampler = case.problem, case.sampler
    most = int(np.clip(SAMPLES // _block_cost(problem) // 20, LEAST_ARMS, MOST_ARMS))
    candidates, seen = [case.placed(problem.hosts)], {problem.pattern(problem.hosts)}
    if problem.differ:
        start = problem.realise(found.patterns[0])
        candidates.append(case.placed(exchange(problem, start, sampler.context.seed)))
    margin, more = MARGIN, [p for p in found.patterns[-1:] if p not in seen]
    while True:
        more += promising(found, margin, most - len(candidates) - len(more), {*seen, *more})
        seen.update(more)
        candidates += [case.placed(problem.realise(pattern)) for pattern in more]
        chosen = _choose(case, candidates)
        draws = [c.values(case.objective, FIRST_BLOCKS).mean() for c in candidates]
        excess = np.array(draws) / [c.nominal for c in candidates]
        spread = float(np.ptp(excess) / min(excess))
        if spread <= margin or len(candidates) >= most or margin > MARGIN:
            return candidates, *chosen
        margin, more = spread, []


def _choose(case: PlacementCase, candidates: Sequence[Placed]) -> tuple[Placed, float]:
    """Select the best; nodes stay where they are where moving them gains next to nothing."""
    measure = case.objective
    budget = SAMPLES - sum(c.n * c.cost for c in candidates)
    best = select(candidates, [measure], case.tolerance, case.sampler, budget=budget)[0]
    gain = difference(candidates[0], best, measure)
    if gain.mean <= 0.5 * case.tolerance * best.figure(measure):
        best = candidates[0]
    return best, probability_best(best, candidates, measure, case.tolerance)


def promising(found: SearchResult, margin: float, most: int, seen: set[Pattern]) -> list[Pattern]:
    """Patterns within a margin of the shortest deterministic step, at most `most`.

    Where there are more, those come first that differ in what noise sees: how many blocks have slow
    nodes, in turn, and at which positions.
    """
    near = found.times <= found.times[0] * (1.0 + margin)
    patterns = [p for p, close in zip(found.patterns, near, strict=True) if close and p not in seen]
    if len(patterns) <= most:
        return patterns
    by_blocks: dict[int, dict[object, Pattern]] = {}
    for pattern in patterns:
        places = tuple(sorted({entry for _, content in pattern for entry in content}))
        by_blocks.setdefault(len(pattern), {}).setdefault(places, pattern)
    turns = zip_longest(*(kinds.values() for kinds in by_blocks.values()))
    first = dict.fromkeys(p for turn in turns for p in turn if p is not None)
    return list(dict.fromkeys([*first, *patterns]))[: max(0, most)]


def _known(case: PlacementCase, candidates: Sequence[Placed], hosts: Index) -> Placed:
    """Return the candidate of that pattern, or a new one."""
    pattern = case.problem.pattern(hosts)
    same = (c for c in candidates if case.problem.pattern(c.hosts) == pattern)
    return next(same, None) or case.placed(hosts)


# ---------------------------------------------------------------------------------------- comparing
@dataclass(frozen=True)
class Comparison:
    """Figures of candidates [s]: those of a reference, which ran longest, plus a difference.

    So rows of a table can be subtracted. Savings are relative to the current placement.
    """

    objective: str
    n_steps: int
    reference: Candidate
    current: Candidate

    def figures(self, one: Candidate) -> dict[str, Any]:
        """Return mean and quantiles of the step, the objective and what is saved."""
        out: dict[str, Any] = {}
        for name in (*FIGURES, "objective"):
            measure = self.objective if name == "objective" else name
            apart = difference(one, self.reference, measure)
            out[name] = (self.reference.figure(measure) + apart.mean) * one.work
            if name in ("p95", "objective"):
                error = standard_error(self.reference.values(measure))
                out[f"{name}_se"] = float(np.hypot(error, apart.error)) * one.work
        for name, measure in SAVED.items():
            apart = difference(one, self.current, measure or self.objective)
            saved, half = 0.0 - apart.share, apart.half_widths[1]
            out |= {name: saved, f"{name}_ci": [saved - half, saved + half]}
        apart = difference(one, self.current, "mean")
        run, half = 0.0 - self.n_steps * apart.mean, self.n_steps * apart.half_widths[0]
        out |= {"run_saved": run, "run_saved_ci": [run - half, run + half]}
        if one.work != 1.0:
            out["work"] = one.work
            out |= {f"{name}_same_work": out[name] / one.work for name in (*FIGURES, "objective")}
        return out


def _names(named: dict[str, Placed], candidates: list[Placed]) -> dict[str, Placed]:
    """Give every placement one name, though it may be current, best and worst at once."""
    out: dict[str, Placed] = {}
    for name, c in [*named.items(), *(("", c) for c in candidates)]:
        if c not in out.values():
            out[name or f"candidate_{len(out)}"] = c
    return out


def _at_random(
    case: PlacementCase, known: Sequence[Placed], comparison: Comparison
) -> dict[str, Any]:
    """Figures of slow nodes at random, by the deterministic times of the simulated placements."""
    rng, problem = np.random.default_rng([case.sampler.context.seed, 9]), case.problem
    drawn = [problem.pattern(random_hosts(problem, rng)) for _ in range(RANDOM_PLACEMENTS)]
    times = problem.pattern_times(drawn)
    times = times[np.isfinite(times)]
    known = sorted(known, key=lambda c: c.nominal)
    rows = [comparison.figures(c) for c in known]
    out: dict[str, Any] = {"n_placements": int(times.size)}
    for name in (*FIGURES, "objective"):
        found = np.interp(times, [c.nominal for c in known], [row[name] for row in rows])
        out[name] = float(found.mean())
    out["p5_of_objective"], out["p95_of_objective"] = np.quantile(found, [0.05, 0.95]).tolist()
    now = comparison.figures(comparison.current)
    for name, measure in SAVED.items():
        out[name] = 1.0 - out[measure or "objective"] / now[measure or "objective"]
    return out | {"run_saved": comparison.n_steps * (now["mean"] - out["mean"])}


def _alternatives(
    case: PlacementCase, comparison: Comparison, found: SearchResult, n: int
) -> dict[str, Any]:
    """Figures of what else could be done, or why it cannot."""
    problem, out = case.problem, {}
    at_one = (p for p in found.patterns if len({at for _, held in p for at, _ in held}) == 1)
    one_stage = problem.realise(next(at_one, found.patterns[0]))
    for other in list_alternatives(problem, one_stage, case.sampler.context.seed):
        if other.program is None:
            out[other.name] = {"label": other.label, "impossible": other.impossible}
            continue
        candidate = case.other(other.program, other.work)
        case.sampler.extend(candidate, n)
        out[other.name] = {"label": other.label, **comparison.figures(candidate)}
    return out


# --------------------------------------------------------------------------------------- describing
def describe(problem: Problem, hosts: Index) -> dict[str, Any]:
    """Where a placement's slow nodes are, and how many slots get another node.

    ``moved_between`` counts, by tier of the network, slots whose new node is in another unit.
    """
    held = [slot for slot, node in enumerate(hosts.tolist()) if node in problem.classes]
    pairs = [problem.layout.pairs[slot] for slot in held]
    block, old = problem.step.job.cluster, problem.hosts
    moved = {
        name: int((hosts * block.gpus_per_node // tier.gpus
                   != old * block.gpus_per_node // tier.gpus).sum())
        for name, tier in block.link_tiers()
    }  # fmt: skip
    return {
        "stages": sorted(stage for own in pairs for stage in {s for _, s in own}),
        "replicas": sorted({r for own in pairs for r, _ in own}),
        "hosts_changed": int((hosts != old).sum()),
        "moved_between": {name: n for name, n in moved.items() if n},
    }


def _slow_nodes(problem: Problem, best: Index) -> list[dict[str, Any]]:
    """List the slow nodes, how slow they are, and where they are before and after."""

    def place(hosts: Index, node: int) -> dict[str, Any] | None:
        slots = np.flatnonzero(hosts == node).tolist()
        if not slots:
            return None
        stages, replicas = ({pair[i] for pair in problem.layout.pairs[slots[0]]} for i in (1, 0))
        return {"slot": slots[0], "stages": sorted(stages), "replicas": sorted(replicas)}

    return [
        {"node": node, **slowness(problem, node)._asdict(),
         "before": place(problem.hosts, node), "after": place(best, node)}
        for node in problem.placed
    ]  # fmt: skip


def _explain(problem: Problem) -> dict[str, Any]:
    """Slack of every stage and cost of every place, for the slowest node's kind of slowness."""
    worst = slowest_of(problem)
    alike = level(problem)
    if worst_factor(worst) <= 1.0:
        return {"stage_slack": [], "slot_cost": []}
    slack = [row._asdict() for row in stage_slack(alike, worst)]
    return {
        "stage_slack": slack, "slot_cost": slot_cost(alike, worst).tolist(),
        "alike_step": float(alike.times([alike.hosts])[0]),
    }  # fmt: skip
