"""The same seed on other instruction sets: step times to the bit, run times and fits to 1e-10.

``python experiments/checks/instruction_sets.py`` estimates two jobs and fits step times and a
pipeline's trace in a process for each set: Numba compiles for other processors
(NUMBA_CPU_NAME, NUMBA_CPU_FEATURES), NumPy leaves out what newer ones have
(NPY_DISABLE_CPU_FEATURES), OpenBLAS takes another kernel (OPENBLAS_CORETYPE). It prints a table and
exits with 1 where a bound is broken. Processors of other makers than this one are compiled for, not
run on; about 30 s for each on one core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

BOUND = 1e-10  # relative, of run times and the figures of fits
HALF, OLD = "X86_V4 AVX512_SPR", "X86_V3 X86_V4 AVX512_SPR"
SETS = {
    "this processor": {},
    "x86-64": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""},
    "x86-64, SSE 4.2": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse4.2"},
    "Haswell": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    "Skylake, AVX-512": {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""},
    "Zen 3": {"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": ""},
    "NumPy and OpenBLAS with AVX2": {
        "NPY_DISABLE_CPU_FEATURES": HALF, "OPENBLAS_CORETYPE": "Haswell",
    },
    "NumPy and OpenBLAS with SSE": {
        "NPY_DISABLE_CPU_FEATURES": OLD, "OPENBLAS_CORETYPE": "Nehalem",
    },
}  # fmt: skip
JOBS = "pipeline-8x32", "llama31-405b-h100-512"


def figures(folder):
    """Bits of two estimates' steps, their run times, and the figures of two fits."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    import pipeline_synth
    import steps_made

    import prism

    bits, runs, fits = {}, {}, {}
    for job in JOBS:
        found = prism.estimate(job, replicates=128, run_replicates=64, seed=7, threads=1, steps=200)
        bits[job] = np.ascontiguousarray(found.step_time.values).tobytes().hex()
        runs[job] = found.time_to_train.values.ravel().tolist()
    seconds = steps_made.made(shape=(60, 3), stalls=0.05)
    rows = [f"{r},{s},{seconds[s, r]}" for r in range(3) for s in range(60)]
    (folder / "steps.csv").write_text("\n".join(["run,step,step_s", *rows]))
    layout = pipeline_synth.Layout(replicas=4, stages=2, microbatches=4, steps=20)
    frame, _ = pipeline_synth.make_trace(layout, pipeline_synth.Effects(rank_sd=0.02, step_sd=0.01))
    pipeline_synth.as_production(frame).to_csv(folder / "trace.csv", index=False)
    for name in ("steps.csv", "trace.csv"):
        model = prism.fit(folder / name, seed=7)
        for key in model.data_vars:
            if model[key].dtype.kind == "f":
                fits[f"{name} {key}"] = model[key].values.ravel().tolist()
    return {"bits": bits, "runs": runs, "fits": fits}


def deviation(ours, others):
    """Largest relative deviation over all arrays, each over its own largest value."""
    worst = 0.0
    for key, values in ours.items():
        a, b = np.array(values, float), np.array(others[key], float)
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            return np.inf
        largest = np.nanmax(np.abs(a), initial=0.0)
        worst = max(worst, np.nanmax(np.abs(a - b), initial=0.0) / largest if largest else 0.0)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="figures into this folder, of this process")
    asked = parser.parse_args()
    if asked.folder is not None:
        (asked.folder / "figures.json").write_text(json.dumps(figures(asked.folder)))
        return 0
    found, broken = {}, False
    print(
        "| instruction set | step times | run times differ by | fits differ by |\n|---|---|---|---|"
    )
    for name, settings in SETS.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | settings | {"NUMBA_CACHE_DIR": folder}
            words = [sys.executable, __file__, "--folder", folder]
            subprocess.run(words, env=environment, check=True)
            found[name] = json.loads((Path(folder) / "figures.json").read_text())
        first = found["this processor"]
        same = found[name]["bits"] == first["bits"]
        worst = [deviation(first[kind], found[name][kind]) for kind in ("runs", "fits")]
        broken |= not same or max(worst) > BOUND
        cells = [name, "same bits" if same else "other bits", *(f"{x:.1e}" for x in worst)]
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
