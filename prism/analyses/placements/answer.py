"""From a question of placement to its answer: candidates, the best of them, and all beside it.

Deterministic times choose which placements are simulated; where noise adds unequally much to them,
more are taken in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism import engine
from prism.analyses.placements.alternatives import list_alternatives
from prism.analyses.placements.clusters import QuietClusters
from prism.analyses.placements.problem import (
    Problem,
    near_units,
    slowest_of,
    slowness,
    worst_factor,
)
from prism.analyses.placements.report import Comparison, at_random, describe, slow_nodes
from prism.analyses.placements.search import Found, exchange, find_placements, packed, random_hosts
from prism.analyses.placements.selection import (
    FIRST_BLOCKS,
    Arm,
    Objective,
    Runner,
    Selection,
    difference,
    probability_within,
    select,
)
from prism.analyses.placements.slack import level, slot_cost, stage_slack
from prism.analyses.placements.slots import Pattern
from prism.analyses.rankings.target import Target
from prism.simulation.program import Program

Int = NDArray[np.int64]
SAMPLES = 8_000_000_000  # op-samples of a selection, about 10 s on two cores
ROW_SAMPLES = 800_000_000  # op-samples that a row of the table rests on
MAX_BLOCKS = 20_000  # clusters of a selection, over all arms, where steps are small
MOST_BLOCKS = 64  # clusters that a row rests on, where steps are small
LEAST_ARMS, MOST_ARMS = 6, 40
MARGIN = 0.003  # of the deterministic step, within which noise may bring a placement to the front
QUIET_SAMPLES = 140_000_000  # op-samples of the quiet times of one program
QUIET_BATCHES = 1, 8  # of 64 clusters each
RANDOM_ARMS, RANDOM_PLACEMENTS = 2, 256
METHOD = "all placements up to symmetry"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement that is simulated: its hosts, its deterministic time [s], its steps."""

    hosts: Int
    nominal: float
    arm: Arm


@dataclass
class Case:
    """A question and what answering it shares."""

    problem: Problem
    objective: Objective
    tolerance: float
    runner: Runner
    clusters: QuietClusters

    def candidate(self, hosts: Int) -> Candidate:
        """Make a placement ready to be simulated."""
        nominal = float(self.problem.times([hosts])[0])
        return Candidate(hosts, nominal, self.arm(self.problem.program(hosts)))

    def arm(self, program: Program) -> Arm:
        """Make a program ready to be simulated."""
        return Arm(program, self.clusters.times(program))


def block_cost(problem: Problem) -> int:
    """Op-samples of a block."""
    return max(1, problem.step.program.n_draws) * engine.LANES


def make_case(problem: Problem, objective: str, tolerance: float, runner: Runner) -> Case:
    """Pose a question of placement with what answering it shares."""
    job = problem.step.job
    v, ratio = problem.step.effects, problem.step.period_ratio
    target = Target(
        "time_to_train", job.n_steps, v.step.std, v.correlation_time_s, runner.seed, ratio
    )
    n = engine.LANES * int(np.clip(QUIET_SAMPLES // block_cost(problem), *QUIET_BATCHES))
    clusters = QuietClusters(problem.program(problem.hosts), n, runner.seed, runner.threads)
    return Case(problem, Objective(objective, target), tolerance, runner, clusters)


def answer(case: Case) -> dict[str, Any]:
    """Find the best placement and compare it with everything else; times in seconds."""
    problem, runner = case.problem, case.runner
    found = find_placements(problem, runner.seed)
    candidates, chosen = choose(case, found)
    named = {"current": candidates[0], "best": candidates[chosen.best]}
    figure = case.objective.pseudo_values
    named["worst"] = max(candidates, key=lambda c: float(figure(c.arm, FIRST_BLOCKS).mean()))
    together = _known(case, candidates, problem.realise(packed(problem, found)))
    n = int(np.clip(ROW_SAMPLES // block_cost(problem), FIRST_BLOCKS, MOST_BLOCKS))
    most = max(n, named["best"].arm.n, named["current"].arm.n)
    for which in ("best", "current"):
        runner.extend(named[which].arm, most)
    for other in (named["worst"], together):
        runner.extend(other.arm, n)
    comparison = Comparison(case.objective, named["best"].arm, named["current"].arm)
    placements = _names(named, candidates)
    names = {which: next(n for n, c in placements.items() if c is named[which]) for which in named}
    rows = [_row(case, comparison, name, c) for name, c in placements.items()]
    rows.sort(key=lambda row: (row["name"] != names["best"], row["objective"]))
    figures = {row["name"]: row for row in rows}
    first, last = figures[names["best"]], figures[names["worst"]]
    alternatives: dict[str, Any] = {
        "all_in_one_replica": {
            "label": describe(problem, together.hosts)["label"], **comparison.figures(together.arm)
        },
        "random": _at_random(case, comparison, [*candidates, together], n),
        **_alternatives(case, comparison, together.hosts, found, n),
    }  # fmt: skip
    slow = {node: slowness(problem, node) for node in problem.placed}
    return {
        **names, "objective": case.objective.name, "tolerance": case.tolerance,
        "p_correct": chosen.p_correct, "placements": rows,
        "worst_over_best_p50": last["p50"] / first["p50"],
        "worst_over_best_p95": last["p95"] / first["p95"],
        "alternatives": alternatives, **_explain(problem),
        "slow_nodes": slow_nodes(problem, named["best"].hosts, slow),
        "n_candidates": len(candidates), "n_screened": len(found.patterns),
        "method": _method(problem, found),
        "replicates": most * engine.LANES,
        "hosts": np.stack([placements[row["name"]].hosts for row in rows]),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- selecting
def choose(case: Case, found: Found) -> tuple[list[Candidate], Selection]:
    """Simulate what may be best until one is left; the current placement is the first.

    The longest deterministic step is among them: it tells how unequally noise adds to steps.
    """
    problem, runner = case.problem, case.runner
    budget = int(min(SAMPLES // block_cost(problem), MAX_BLOCKS))
    most = int(np.clip(budget // (2 * FIRST_BLOCKS), LEAST_ARMS, MOST_ARMS))
    candidates, seen = [case.candidate(problem.hosts)], {problem.pattern(problem.hosts)}
    if problem.differ:
        start = problem.realise(found.patterns[0])
        candidates.append(case.candidate(exchange(problem, start, runner.seed)))
    margin, last = MARGIN, found.patterns[-1]
    if last not in seen:
        seen.add(last)
        candidates.append(case.candidate(problem.realise(last)))
    while True:
        for pattern in promising(found, margin, most - len(candidates), seen):
            seen.add(pattern)
            candidates.append(case.candidate(problem.realise(pattern)))
        before = runner.done
        chosen = _choose(case, candidates, budget)
        budget -= runner.done - before
        excess = [
            case.objective.pseudo_values(c.arm, FIRST_BLOCKS).mean() / c.nominal for c in candidates
        ]
        spread = float(np.ptp(excess) / min(excess))
        if spread <= margin or len(candidates) >= most or margin > MARGIN:
            return candidates, chosen
        margin = spread


def _choose(case: Case, candidates: Sequence[Candidate], budget: int) -> Selection:
    """Select the best; nodes stay where they are where moving them gains next to nothing."""
    arms = [c.arm for c in candidates]
    chosen = select(arms, case.objective, case.tolerance, budget, case.runner)
    if chosen.best == 0:
        return chosen
    gain = difference(case.objective, arms[0], arms[chosen.best])
    value = case.objective.pseudo_values(arms[chosen.best], gain.n).mean()
    delta = case.tolerance * float(value)
    if gain.mean > 0.5 * delta:
        return chosen
    p = probability_within(case.objective, arms, 0, delta)
    return chosen._replace(best=0, p_correct=p)


def promising(found: Found, margin: float, most: int, seen: set[Pattern]) -> list[Pattern]:
    """Patterns within a margin of the shortest deterministic step, at most so many.

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


def _known(case: Case, candidates: Sequence[Candidate], hosts: Int) -> Candidate:
    """Return the candidate of that pattern, or a new one."""
    pattern = case.problem.pattern(hosts)
    same = (c for c in candidates if case.problem.pattern(c.hosts) == pattern)
    return next(same, None) or case.candidate(hosts)


# ---------------------------------------------------------------------------------------- reporting
def _names(named: dict[str, Candidate], candidates: list[Candidate]) -> dict[str, Candidate]:
    """Give every placement one name, though it may be current, best and worst at once."""
    out: dict[str, Candidate] = {}
    for name, c in [*named.items(), *(("", c) for c in candidates)]:
        if c not in out.values():
            out[name or f"candidate_{len(out)}"] = c
    return out


def _row(case: Case, comparison: Comparison, name: str, c: Candidate) -> dict[str, Any]:
    """Where a placement's slow nodes are, and its figures."""
    where = describe(case.problem, c.hosts)
    return {"name": name, **where, "nominal": c.nominal, **comparison.figures(c.arm)}


def _at_random(
    case: Case, comparison: Comparison, known: Sequence[Candidate], n: int
) -> dict[str, Any]:
    """Figures of slow nodes at random places, each as near as there is one of its kind."""
    rng, problem = np.random.default_rng([case.runner.seed, 9]), case.problem
    drawn = [problem.pattern(random_hosts(problem, rng)) for _ in range(RANDOM_PLACEMENTS)]
    hosts = [problem.realise(pattern) for pattern in drawn]
    times = problem.times(hosts)
    arms, nominal = [c.arm for c in known], [c.nominal for c in known]
    for i in range(RANDOM_ARMS):
        arm = case.arm(problem.program(hosts[i]))
        case.runner.extend(arm, min(n, FIRST_BLOCKS))
        arms.append(arm)
        nominal.append(float(times[i]))
    return {"label": "placed at random", **at_random(comparison, arms, nominal, times)}


def _alternatives(
    case: Case, comparison: Comparison, together: Int, found: Found, n: int
) -> dict[str, Any]:
    """Figures of what else could be done, or why it cannot."""
    problem, out = case.problem, {}
    at_one = (p for p in found.patterns if len({at for _, held in p for at, _ in held}) == 1)
    one_stage = problem.realise(next(at_one, found.patterns[0]))
    for other in list_alternatives(problem, together, one_stage, case.runner.seed):
        if other.program is None:
            out[other.name] = {"label": other.label, "impossible": other.impossible}
            continue
        arm = case.arm(other.program)
        case.runner.extend(arm, n)
        out[other.name] = {"label": other.label, **comparison.figures(arm, other.work)}
    return out


def _method(problem: Problem, found: Found) -> str:
    """Say how placements were found; of a pattern one choice of pods (sites) is looked at."""
    if not found.complete:
        return "search"
    far = bool(problem.layout.zone.any())
    return METHOD + f", one choice of {near_units(problem.step.job)[0]}s for each" * far


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
