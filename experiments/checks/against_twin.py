"""prism against its twin, the whole simulation in plain NumPy (`tests/twin.py`), on small jobs.

Prints, for each job of `tests/twin_jobs.py`: the ideal step, mean, p95 and KS distance of both,
and the p-value of a KS distance as large where clusters were exchanged at random. Then the
controls, in which one of the two is changed on purpose.

    python experiments/checks/against_twin.py [--clusters 32] [-k NAME]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from twin_check import compare, prism_steps, twin_steps
from twin_jobs import JOBS

from prism.jobs.job import Job

LOOSE = {
    "hsdp": 5e-3,  # a shard group's ranks wait for each other at every op (lowering.py)
    "each op by itself": 1e-3,  # both draw of samples of what an op takes
}
"""Jobs of which means alone are compared, by how they begin, and to what they have to agree [1]."""
# What of a job is changed for prism alone, and has to show.
CONTROLS = {
    "1f1b": {"parallelism.microbatches": 9},
    "fsdp": {"parallelism.prefetch": 0},
    "zero1": {"parallelism.data_parallel": "ddp"},
    "slow node": {"cluster.node_slowdowns": {0: 1.2}},
    "fast and slow GPUs": {"variability.effects.rank.cv": 0.02},
    "content": {"variability.effects.microbatch.backward_loading": 1.0},
    "stalls": {"variability.effects.stall.duration_s": 0.03},
    "congested pipeline": {"variability.effects.regime.factor": 2.5},
    "own noise, fsdp": {"variability.effects.residual.scale": 0.8},
    "hsdp": {"parallelism.shard_size": 8},
}


def show(name: str, job: Job, changed: Job, given: argparse.Namespace) -> bool:
    """Print how far both are apart; tell whether they are the same as far as one can see."""
    ideal, plain = twin_steps(job, given.clusters, given.seed)
    own, fast = prism_steps(changed, 4 * given.clusters, given.seed)
    found = compare(plain, fast)
    apart = own / ideal - 1.0
    loose = next((most for begin, most in LOOSE.items() if name.startswith(begin)), None)
    alike = found.p_value > 0.01 if loose is None else abs(found.mean) < loose
    same = abs(apart) < 2e-6 and alike
    print(
        f"{name:32s} ideal {apart:+.0e}  mean {found.mean:+.3%} ± {1.96 * found.mean_se:.3%}  "
        f"p95 {found.p95:+.3%} ± {1.96 * found.p95_se:.3%}  KS {found.ks:.3f}, "
        f"p {found.p_value:.3f}  {'same' if same else 'differs'}",
        flush=True,
    )
    return same


def main() -> None:
    """Compare all jobs, then the controls; status 1 where one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-k", default="", help="jobs whose name holds this")
    given = parser.parse_args()
    wrong = []
    for name, job in JOBS.items():
        if given.k in name and not show(name, job, job, given):
            wrong.append(name)
    print("\nControls: another job for prism than for the twin")
    for name, change in CONTROLS.items():
        if given.k in name and show(name, JOBS[name], JOBS[name].replace(change), given):
            wrong.append(f"{name}, control")
    print(f"\nnot as they should be: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
