"""Write the samples of this folder: small recordings of made-up jobs, one of each format.

Run from anywhere: `python experiments/samples/make.py`. Nothing here was measured: times are drawn
from known distributions by the generators of the tests, so that what is read can be held against
them.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import chakra_synth  # noqa: E402
import kineto_synth  # noqa: E402
import nsys_synth  # noqa: E402
import tables_made  # noqa: E402


def main() -> None:
    program = kineto_synth.training_step(n_layers=2, kernels=2, mean_us=2_000.0)
    times = kineto_synth.simulate(program, *kineto_synth.draw(program, 6, 2, seed=7, cv=0.03))
    for name, write in (("nsys", nsys_synth.write), ("chakra", chakra_synth.write)):
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        write(folder, program, times)
    runs = [tables_made.nccl_tests(noise=0.01, seed=seed) for seed in range(3)]
    (HERE / "all_reduce.txt").write_text("\n".join(runs))
    kernels = tables_made.hta_table(tables_made.durations(seed=1), unit="ns")
    kernels.round(3).to_csv(HERE / "hta_kernels.csv", index=False)
    (HERE / "nodelist.txt").write_text("NodeList=node[001-003,7]\n")


if __name__ == "__main__":
    main()
