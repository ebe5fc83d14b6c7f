"""Compare the JSON of 30 commands between two checkouts: a rebuild must keep every number.

    python experiments/checks/same_json.py OLD NEW [-k WORD] [--aside KEY,KEY]
        [--within SHARE] [--all]

runs each command in both with this interpreter (and their own Numba cache), and prints where
figures of the old one are gone or differ, timings aside; keys that are new are no difference.
--within SHARE counts numbers that are as near as that as the same, --all prints all differences
rather than five a command. It exits with 1 where any does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FEW = "--replicates 256 --seed 1"
PIPELINE = "--set parallelism.dp=4 --set cluster.nodes=4"
COMMANDS = [
    f"estimate pipeline-8x32 {FEW}",
    f"estimate pipeline-8x32 {FEW} --steps 1000 --deadline 2d --run-replicates 500",
    f"estimate gpt3-175b-512 {FEW}",
    f"estimate llama3-70b-fsdp-512 {FEW}",
    f"estimate llama3-70b-fsdp-512 {FEW} --dependence none",
    f"estimate llama3-405b-16k {FEW} --run-replicates 64",
    f"estimate llama3-405b-64k {FEW} --run-replicates 64",
    f"estimate llama3-405b-two-sites {FEW} --run-replicates 64",
    f"estimate deepseek-v3-2048 {FEW} --run-replicates 64",
    f"estimate pipeline-8x32 {FEW} --set parallelism.schedule=zb-h1",
    f"estimate gpt3-175b-512 {FEW} --set variability.resolution=kernel --set parallelism.dp=2 "
    "--set cluster.nodes=8",
    f"estimate gpt3-175b-512 {FEW} --set variability.library=h100-stressed",
    f"estimate pipeline-8x32 {FEW} {PIPELINE} --set "
    "variability.effects.stall={entity: rank, rate_per_hour: 60, duration_s: 2}",
    f"estimate llama3-70b-fsdp-512 {FEW} --set "
    "variability.effects.regime={probability: 0.05, factor: 2}",
    "rank pipeline-8x32 --seed 1",
    "rank llama3-70b-fsdp-512 --seed 1",
    f"place pipeline-8x32 {PIPELINE} --slow-nodes 1 --slowdown 1.2 --seed 1",
    "place gpt3-175b-512 --slow-nodes 1 --slowdown 1.2 --kind network --seed 1",
    f"sweep pipeline-8x32 --vary parallelism.schedule=gpipe,1f1b {FEW}",
    "place gpt3-175b-512 --slow-nodes 2 --slowdown 1.3 --spares 2 --seed 1",
    "timeline pipeline-8x32 --seed 1",
    "replay experiments/samples/kineto",
    "fit experiments/samples/kineto --seed 0",
    "fit experiments/samples/hta_kernels.csv --seed 0",
    "timeline experiments/samples/kineto",
    "kernel gemm --device h100 --m 8192 --n 8192 --k 8192",
    "kernel collective --device h100 --op all_gather --bytes 1GiB --nodes 16",
    "schedule dualpipe-v --stages 4 --microbatches 8",
    "show llama3-405b-16k",
    "show h100-healthy",
    "show --jobs",
    "show --libraries",
]
ASIDE = {
    "wall_seconds", "cpu_seconds", "seconds", "engine", "created", "path", "elapsed", "source",
    "sources", "file", "threads", "command", "version", "uncommitted", "commit",
}  # fmt: skip


def split(text: str) -> list[str]:
    """Words of a command; what stands in braces is one."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "{") - (letter == "}")
        if letter == " " and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words


def run(checkout: Path, text: str, cache: str) -> object:
    """JSON of a command in a checkout, or what it said."""
    env = os.environ | {"PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": cache}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    words = [sys.executable, "-m", "prism", *split(text), "--json", "-q"]
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()[-300:]


def differences(
    old: object, new: object, aside: set[str], within: float, at: str = ""
) -> list[str]:
    """Where figures of the old answer are gone or differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{at}.{k}", old.get(k), new.get(k)) for k in sorted(old.keys() - aside)]
        return [x for k, a, b in pairs for x in differences(a, b, aside, within, k)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{at}[{i}]", a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))]
        return [x for k, a, b in pairs for x in differences(a, b, aside, within, k)]
    numbers = all(isinstance(x, int | float) for x in (old, new))
    if numbers and abs(old - new) <= within * max(abs(old), abs(new)):
        return []
    return [] if old == new else [f"{at}: {str(old)[:80]} | {str(new)[:80]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("-k", default="", help="only commands with this in them")
    parser.add_argument("--aside", default="", help="more keys that may differ, with commas")
    parser.add_argument("--within", type=float, default=0.0, help="share of a number [0]")
    parser.add_argument("--all", action="store_true", help="all differences of a command")
    options = parser.parse_args()
    wrong, aside = 0, ASIDE | set(options.aside.split(","))
    chosen = [c for c in COMMANDS if options.k in c]
    with tempfile.TemporaryDirectory() as folder:
        for text in chosen:
            answers = [
                run(checkout.resolve(), text, f"{folder}/{i}")
                for i, checkout in enumerate((options.old, options.new))
            ]
            found = differences(*answers, aside, options.within)
            failed = isinstance(answers[0], str) or isinstance(answers[1], str)
            wrong += bool(found) or failed
            print(f"{'differs' if found else 'FAILED' if failed else 'same':8s} {text}", flush=True)
            for line in (found or [str(answers[0])] * failed)[: None if options.all else 5]:
                print(f"         {line}", flush=True)
    print(f"{len(chosen)} commands, {wrong} differ or fail")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
