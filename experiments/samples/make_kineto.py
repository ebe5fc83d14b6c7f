"""The Kineto sample: profiler files of a small made-up data-parallel job, one a rank.

Four ranks run one program (forward, backward with overlapped all-reduces, update) for 24 steps.
What was put in: rank 2 is 15 % slow; steps vary by 2 %, all ranks together; each kernel by 3 %.
All-reduces take 0.6 of the generator's. Shorter ones leave the wait for the slow rank bare, for
which `prism fit` has no distribution from four ranks: at 0.3 its mean step is 3.2 % low, at 0.1 5.7
%, and it says so. The times are walked by the tests' own generator, the events written as PyTorch's
profiler does.

    python experiments/samples/make_kineto.py
"""

import gzip
import sys
from pathlib import Path

import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import kineto_synth as synth  # noqa: E402

N_STEPS, N_RANKS, SLOW_RANK, SLOWDOWN = 24, 4, 2, 1.15
STEP_CV, KERNEL_CV = 0.02, 0.03


def main() -> None:
    program = synth.training_step(n_layers=4, kernels=3, mean_us=400.0)
    duration, host = synth.draw(program, N_STEPS, N_RANKS, seed=1, cv=KERNEL_CV)
    of_step = np.exp(STEP_CV * np.random.default_rng(2).standard_normal(N_STEPS))
    own = np.array([call.do != "collective" for call in program])
    duration *= np.where(own, of_step[:, None, None], 0.6)
    duration[:, SLOW_RANK] *= np.where(own, SLOWDOWN, 1.0)
    times = synth.simulate(program, duration, host)
    folder = HERE / "kineto"
    folder.mkdir(exist_ok=True)
    for rank in range(N_RANKS):
        made = synth.events(program, times, rank, world=N_RANKS)
        data = gzip.compress(msgspec.json.encode(made), 9, mtime=0)
        (folder / f"rank{rank}.json.gz").write_bytes(data)
        print(f"{folder.name}/rank{rank}.json.gz: {len(data)} bytes")


if __name__ == "__main__":
    main()
