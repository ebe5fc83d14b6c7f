"""Memory and time of large jobs: what `prism.common.sizes` says before, and what it took.

``python experiments/checks/sizes.py [NAME ...]`` runs each case, or those named, in a process
of its own, and prints the estimates that `prism.common.sizes.check_size` was asked for beside the
peak of memory above that of a small job, and the processor time until it is built, after which
progress is shown (a schedule: the whole). It exits with 1 where memory is above twice the estimate
and a quarter of a GB more (half of the free memory is given to a command, so that such a job still
fits), or a case ends otherwise than with 0.
"""

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ALLOWED = 2.0, 0.25e9  # times the estimate, and bytes more

MANY = "--replicates 64"
CASES = {
    "128 microbatches": f"estimate gpt3-175b-512 {MANY} --set parallelism.microbatches=128",
    "512 microbatches": f"estimate gpt3-175b-512 {MANY} --set parallelism.microbatches=512",
    "2048 microbatches": f"estimate gpt3-175b-512 {MANY} --set parallelism.microbatches=2048",
    "kernels": f"estimate gpt3-175b-512 {MANY} --set variability.resolution=kernel",
    "256 stages": f"estimate pipeline-8x32 {MANY} --set parallelism.pp=256 "
    "--set model.durations.forward_s=1 --set cluster.nodes=32",
    "20,000 layers": f"estimate llama3-70b-fsdp-512 {MANY} --set model.n_layers=20000",
    "20,000 layers on 2 stages": f"estimate gpt3-175b-512 {MANY} --set model.n_layers=20000 "
    "--set parallelism.pp=2 --set parallelism.vpp=1 --set parallelism.schedule=1f1b "
    "--set parallelism.dp=64",
    "8 thousand FSDP ranks": f"estimate llama3-70b-fsdp-512 {MANY} --set parallelism.dp=8192 "
    "--set cluster.nodes=1024",
    "64 thousand FSDP ranks": f"estimate llama3-70b-fsdp-512 {MANY} --set parallelism.dp=65536 "
    "--set cluster.nodes=8192",
    "1 million GPUs": f"estimate llama3-405b-1m {MANY}",
    "4 million GPUs": f"estimate llama3-405b-1m {MANY} --set parallelism.dp=32768 "
    "--set cluster.nodes=524288",
    "10,000 replicates of 1 million": "estimate llama3-405b-1m --replicates 10000",
    "4 million replicates": "estimate pipeline-8x32 --replicates 4000000",
    "1 million runs": "estimate pipeline-8x32 --replicates 640 --steps 1000 "
    "--run-replicates 1000000",
    "500 settings": "sweep pipeline-8x32 --vary run.steps=1:500 --replicates 64",
    "164,000 actions": "schedule zb-v --stages 64 --microbatches 428",
}


def memory(name):
    """Read a figure of this process from the system [byte]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def run_case(words):
    """Run a command in this process: estimates, seconds, peak memory above the start, status."""
    from prism import __main__ as entry
    from prism.common import sizes

    simulate = importlib.import_module("prism.simulation.steps")
    prepare, asked = importlib.import_module("prism.simulation.prepare"), {}
    check, warm_up, ready = sizes.check_size, simulate.warm_up, []

    def watched(source, counts, lower):
        need = np.array([[n * cost.n_bytes, n * cost.seconds] for n, cost in counts.values()])
        kind = tuple(counts)  # settings of a sweep ask for the same, one after the other
        asked[kind] = np.maximum(asked.get(kind, 0.0), need.sum(axis=0))
        check(source, counts, lower)

    def built(*arguments):
        ready.append(time.process_time())
        warm_up(*arguments)

    for module in (sizes, simulate, prepare):
        module.check_size = watched
    simulate.warm_up = built
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        entry.main(["estimate", "pipeline-8x32", "--replicates", "64", "--json", "-q"])
        asked.clear(), ready.clear()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        begin = time.process_time()
        seed = () if words[0] == "schedule" else ("--seed", "1")
        status = entry.main([*words, *seed, "--json", "-q"])
    return {
        "status": status, "said": err.getvalue()[-300:],
        "bytes": sum(n_bytes for n_bytes, _ in asked.values()),
        "seconds": sum(seconds for _, seconds in asked.values()),
        "peak": memory("VmHWM") - before,
        "took": min([*ready, time.process_time()]) - begin,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(run_case(asked.one.split())))
        return 0
    bad = 0
    print("| case | memory, estimated | taken | time, estimated | taken |\n|---|---|---|---|---|")
    for name in asked.names:
        done = subprocess.run(
            [sys.executable, __file__, "--one", CASES[name]], capture_output=True, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        if found.get("status") != 0:
            print(f"| {name} | {found.get('said') or done.stderr[-300:]} |")
            bad += 1
            continue
        over = found["peak"] > ALLOWED[0] * found["bytes"] + ALLOWED[1]
        bad += over
        print(f"| {name} | {found['bytes'] / 1e9:.3f} GB | {found['peak'] / 1e9:.3f} GB"
              f"{' (too much)' if over else ''} | {found['seconds']:.1f} s | {found['took']:.1f} s "
              "|", flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
