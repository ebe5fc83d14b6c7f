"""Find one slow GPU among 48 nodes in a noisy benchmark, and predict what it costs.

A node's benchmark is slower by 2.5 %, each measurement has 1 % noise. Tables of some repeats, by
node and by GPU, are read as `prism place --measured-nodes` does. The cost is the mean step of an
FSDP job over all 48 nodes as they were read, over that without any, against the truth; with all
other GPUs alike, and with the differences that the job draws (the rank effect). Controls: no slow
node; the nodes' medians taken as they are.

    python experiments/checks/shrinkage.py [--seeds 200] [--only flags|alike|drawn]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

import prism
from prism.cluster.nodes.inventory import read_inventory
from prism.cluster.nodes.shrinkage import LIKELY, separate

N_NODES, GPUS, SLOW, BY, NOISE = 48, 8, 20, 1.025, 0.01
JOB = ("llama3-70b-fsdp-512", [f"cluster.nodes={N_NODES}", f"parallelism.dp={N_NODES * GPUS}"])
NO_RANK = "variability.effects.rank={cv: 0, lemon_fraction: 0}"
LEAST_FOUND, MOST_FALSE, NEAR = 0.8, 0.05, 1 / 3


def measure(seed: int, repeats: int, by: float, per_node: int = 1) -> pd.DataFrame:
    """Benchmark every node, or each of its GPUs, several times [row]."""
    unit = np.repeat(np.arange(N_NODES * per_node), repeats)
    times = np.where(unit == SLOW * per_node + per_node // 2, by, 1.0)
    noise = NOISE * np.random.default_rng([seed, repeats, per_node]).standard_normal(unit.size)
    columns = {"node": unit // per_node, "gpu_id": unit, "gemm_ms": 10.0 * times * (1.0 + noise)}
    return pd.DataFrame(columns).drop(columns=[] if per_node > 1 else ["gpu_id"])


def flags(seed: int, repeats: int, by: float = BY, per_node: int = 1) -> tuple[bool, int]:
    """Whether the slow node is flagged, and how many others are."""
    table = measure(seed, repeats, by, per_node)
    unit = table["gpu_id"] if per_node > 1 else table["node"]
    share = 1 if per_node > 1 else GPUS
    found = separate(np.log(table["gemm_ms"].to_numpy()), unit.to_numpy(), share)
    slow = {int(k) // per_node for k in np.flatnonzero(found.p_slow >= LIKELY)}
    return SLOW in slow, len(slow - {SLOW})


def mean_step(slowdowns: dict[int, float], *more: str) -> float:
    """Mean step of the job with some slow nodes [s]; the same draws each time."""
    given = "{" + ", ".join(f"{node}: {factor:.6f}" for node, factor in slowdowns.items()) + "}"
    job = prism.load_job(JOB[0], [*JOB[1], *more, f"cluster.node_slowdowns={given}"])
    return float(prism.simulate(job, replicates=320, seed=1)["step_time"].mean())


def costs(repeats: int, by: float, seeds: int, raw: bool, *more: str) -> np.ndarray:
    """Predicted cost of every seed, share of the step; of an inventory, or of raw medians."""
    base, out = mean_step({}, *more), []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            table = measure(seed, repeats, by)
            table.to_csv(Path(folder, "burnin.csv"), index=False)
            found = read_inventory(Path(folder, "burnin.csv"), N_NODES, GPUS)
            nodes = {node: slow.compute for node, slow in found.items()}
            if raw:
                medians = table.groupby("node")["gemm_ms"].median()
                nodes = dict((medians / medians.median()).items())
            out.append(mean_step(nodes, *more) / base - 1.0)
    return np.array(out)


def show_flags(seeds: int) -> bool:
    """Print how often nodes are flagged; whether a bound is broken."""
    print(
        "| repeats | unit | found | others flagged | clusters with one | of none slow, with one |"
    )
    print("|---|---|---|---|---|---|")
    broken = False
    for repeats, per_node in ((1, 1), (3, 1), (4, 1), (5, 1), (8, 1), (1, GPUS), (5, GPUS)):
        hit, wrong = np.array([flags(seed, repeats, BY, per_node) for seed in range(seeds)]).T
        none = [sum(flags(seed, repeats, 1.0, per_node)) > 0 for seed in range(seeds)]
        print(
            f"| {repeats} | {'GPU' if per_node > 1 else 'node'} | {hit.mean():.1%} | "
            f"{wrong.mean() / (N_NODES - 1):.2%} | {(wrong > 0).mean():.1%} | {np.mean(none):.1%} |"
        )
        broken |= wrong.mean() / (N_NODES - 1) >= MOST_FALSE
        if (repeats, per_node) == (5, 1):
            broken |= hit.mean() < LEAST_FOUND or (wrong > 0).mean() >= MOST_FALSE
    return bool(broken)


def show_costs(seeds: int, *more: str) -> bool:
    """Print what the node is predicted to cost; whether a bound is broken."""
    broken, few = False, max(1, seeds // 10)
    true = mean_step({SLOW: BY}, *more) / mean_step({}, *more) - 1.0
    print(f"the node costs {true:.2%} of the step")
    cases = ((5, BY, seeds, False), (8, BY, few * 5, False), (5, BY, few, True),
             (1, 1.0, few, False), (1, 1.0, few, True))  # fmt: skip
    for repeats, by, n, raw in cases:
        found = costs(repeats, by, n, raw, *more)
        how = f"  {repeats} repeats, {n} seeds{', medians as they are' if raw else ''}:"
        if by == 1.0:
            print(f"{how} {found.mean():.2%} of the step, with no slow node")
            broken |= not raw and found.mean() > true / 10
            continue
        near = np.mean(np.abs(found / true - 1.0) < NEAR)
        print(f"{how} {found.mean() / true:.2f} of it, within a third in {near:.0%}")
        broken |= not raw and abs(found.mean() / true - 1.0) >= NEAR
    return bool(broken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--only", choices=("flags", "alike", "drawn"))
    asked = parser.parse_args()
    broken = asked.only in (None, "flags") and show_flags(asked.seeds)
    for name, more in (("alike", (NO_RANK,)), ("drawn", ())):
        if asked.only in (None, name):
            print(f"other GPUs {name}: ", end="")
            broken |= show_costs(asked.seeds, *more)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
