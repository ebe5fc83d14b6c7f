"""Broken inputs of every kind that prism reads: made whole, mutated by a seed, fed to a command.

`make_originals` writes small whole files of every kind with prism itself and with the makers beside
this file; `make_input` copies one and breaks it as the seed says; `run_input` calls a command and
names what it must not do. Used by the tests and by ``experiments/checks/fuzz.py``.
"""

import contextlib
import gzip
import hashlib
import json
import math
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chakra_synth
import h5py
import kineto_synth
import nsys_synth
import numpy as np
import pandas as pd
import pipeline_synth
import steps_made
import tables_made
import xarray as xr
import yaml

SEAL = b"\nprism sha256 "  # before the hash at the end of a file that prism wrote
COMMON = "--seed", "7", "--threads", "1"
FEW = "--replicates", "128"
FEWER = *FEW, "--run-replicates", "8"
LINE = re.compile(r"^\S*:\d+: \w*Warning: ", re.MULTILINE)  # what Python prints of a warning
BOMB = 1 << 30  # bytes that a bomb unpacks to

ROOT = Path(__file__).parents[1]
# Put somewhere into a script: what grows, nests, does not end or is no number.
SNIPPETS = (
    'A=("${A[@]}" "${A[@]}" x)\n' * 30, 'B="$B$B"x\n' * 40, "if true; then\n" * 300,
    "for i in a b; do\n" * 300, "for ((i=0;i<99999;i++)); do X+=x; done\n", "$((" * 500,
    "x=$((9**9**9))\n", "x=$((1<<99999))\n", "x=$((-))\n", "${a:-" * 300, "'", '"', "`", "$(",
    "cat <<E\n" * 300, "case a in\n*a*a*a*a*a*a*b) x=1;;\n", "source /dev/zero\n", "\\\n" * 300,
    "bash -c '" * 100, " -- --- -_ --_ = == --=", "--num-layers=", "${" + "a" * 5000 + "}",
)  # fmt: skip
JOB = """
model: {name: llama3-8b, n_layers: 4, seq_len: 2048}
parallelism: {tp: 2, pp: 2, dp: 4, microbatches: 4, data_parallel: zero1, schedule: 1f1b}
cluster: {nodes: 2, gpus_per_node: 8, device: h100, node_slowdowns: {1: 1.1}}
variability: {library: h100-healthy, effects: {rank: {cv: 0.01}, step: {cv: 0.002}}}
run:
  steps: 200
  deadline: 1h
  price_per_gpu_hour: 2.5
  checkpoint: {interval_steps: 50, write_s: 5.0}
  failures: {per_1000_node_days: 30.0, restart: 60s}
"""
DURATIONS = """
model: {durations: {forward_s: [1.0, 1.1], backward_s: 2.0}}
parallelism: {pp: 2, dp: 8, microbatches: 4}
cluster: {nodes: 2, gpus_per_node: 8}
variability: {effects: {rank: {cv: 0.02}, microbatch: {cv: 0.05}}}
run: {steps: 100}
"""
FSDP = """
model: {name: llama3-8b, n_layers: 4, seq_len: 2048}
parallelism: {dp: 16, microbatches: 1, data_parallel: fsdp}
cluster: {nodes: 2, gpus_per_node: 8}
run: {steps: 50}
"""
EXPERTS = """
model: {n_layers: 4, hidden_size: 512, ffn_size: 1024, n_heads: 8, n_kv_heads: 8, vocab_size: 4096,
  seq_len: 512, n_experts: 8, experts_per_token: 2, expert_ffn_size: 256, n_dense_layers: 1}
parallelism: {pp: 2, dp: 8, ep: 4, microbatches: 4, expert_imbalance: 1.2}
cluster: {nodes: 4, gpus_per_node: 4, tiers: {rack: {gpus: 8, oversubscription: 2.0}}}
run: {steps: 50}
"""
JOBS = {"sizes": JOB, "durations": DURATIONS, "fsdp": FSDP, "experts": EXPERTS}

Call = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Original:
    """A whole file of one kind, and the commands that read one; {} stands for the file."""

    kind: str
    path: Path
    commands: tuple[tuple[str, ...], ...]


# --------------------------------------------------------------------------------- whole files
def make_originals(folder: Path, call: Call | None, netcdf: bool = True) -> list[Original]:
    """Write whole files of every kind; `call`, which netCDF needs, runs a command here."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.yaml"
    job.write_text(DURATIONS)
    texts = {
        **_jobs(folder),
        **_step_times(folder, str(job)),
        **_nodes(folder, str(job)),
        **_traces(folder, str(job)),
        **_imports(folder),
    }
    found = [Original(*name.split("/")[:1], path, tuple(commands))
             for name, (path, commands) in texts.items()]  # fmt: skip
    return found + (_netcdf(folder, call, str(job)) if netcdf and call is not None else [])


def _jobs(folder: Path) -> dict[str, Any]:
    commands = [
        ("estimate", "{}", *FEWER), ("estimate", "{}", *FEWER), ("estimate", "{}", *FEWER),
        ("rank", "{}"), ("place", "{}", "--slow-nodes", "1", "--slowdown", "1.2"),
        ("sweep", "{}", "--vary", "cluster.scale.compute.cv=1,1.5", *FEW), ("show", "{}"),
        ("show", "{}", "--yaml"), ("timeline", "{}", *FEW),
    ]  # fmt: skip
    out = {}
    for name, text in JOBS.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
        explains = ("explain", "{}", str(folder / "sizes.yaml"), *FEW)  # jobs of known work
        out[f"job/{name}"] = path, [*commands, *[explains] * (name in ("sizes", "fsdp"))]
    return out


def _step_times(folder: Path, job: str) -> dict[str, Any]:
    seconds = steps_made.made(shape=(60, 3), stalls=0.05)
    table = pd.DataFrame({
        "run": np.repeat(["a", "b", "c"], 60), "step": np.tile(np.arange(60), 3),
        "step_s": np.round(seconds.T.ravel(), 4),
    })  # fmt: skip
    table.to_csv(folder / "steps.csv", index=False)
    table.to_parquet(folder / "steps.parquet")
    one = table[table.run == "a"]
    one.to_csv(folder / "one.csv", index=False)
    megatron = "".join(
        f" iteration {i + 1:8d}/    1000 | consumed samples: 8 | elapsed time per iteration (ms): "
        f"{1e3 * s:.1f} | learning rate: 1.5E-04 |\n"
        for i, s in enumerate(one.step_s)
    )
    (folder / "megatron.log").write_text(megatron)

    def event(key: str, value: Any, ms: int = 0, **metadata: Any) -> str:
        found = {"time_ms": ms, "key": key, "value": value, "metadata": metadata}
        return f":::MLLOG {json.dumps(found)}\n"

    mlperf = event("global_batch_size", 8) + event("run_start", None)
    for i, s in enumerate(one.step_s):
        mlperf += event("tracked_stats", {"train_step_timing": s}, 2000 * (i + 1), step=8 * (i + 1))
    (folder / "mlperf.log").write_text(mlperf)
    whole = str(folder / "steps.csv")
    commands = [
        ("show", "{}"), ("fit", "{}", "-o", "{out}/m.nc"), ("compare", "{}", "{}"),
        ("compare", "{}", whole), ("validate", job, "--measured", "{}", *FEW, "--bootstrap", "3"),
    ]  # fmt: skip
    completed = ("estimate", job, "--progress", "{}", *FEWER, "--steps", "500")
    kinds = {"steps": ("steps.csv", "one.csv"), "steps_parquet": ("steps.parquet",),
             "log": ("megatron.log", "mlperf.log")}  # fmt: skip
    return {
        f"{kind}/{name}": (folder / name, [*commands, completed][: 5 + ("steps" not in name)])
        for kind, names in kinds.items()
        for name in names
    }


def _nodes(folder: Path, job: str) -> dict[str, Any]:
    files = {
        "hosts/mpi": ("hosts.txt", "n0 slots=8\nn1 slots=8\n"),
        "hosts/slurm": ("slurm.txt", "NodeList=n[0-1]\n"),
        "inventory/factors": ("nodes.csv", "node,slowdown,network\n0,1.2,1.01\n1,1.05,\n"),
        "placement_file/csv": ("places.csv", "slot,node,host,first_rank,stages,replicas\n"
                               "0,1,,0,0,0-7\n1,0,,8,1,0-7\n"),
    }  # fmt: skip
    burn_in = pd.DataFrame(
        [(n, g, r, 10.0 + 2.0 * n + 0.1 * ((g * 3 + r) % 5)) for n in range(2) for g in range(8)
         for r in range(3)], columns=["node", "gpu", "run", "time_ms"],
    )  # fmt: skip
    files["inventory/burn_in"] = ("burn_in.csv", burn_in.to_csv(index=False))
    rows = [{"node": f"n{n}", "gemm-flops/return_code": 0}
            | {f"gemm-flops/bf16_tc:{g}": 7e5 / (1.0 + n + 0.01 * g) for g in range(8)}
            for n in range(2)]  # fmt: skip
    files["inventory/json"] = ("rows.json", json.dumps(rows))
    nccl = tables_made.nccl_tests(hosts=("n0", "n1"), noise=0.02)
    files["nccl_tests/run"] = ("nccl.txt", nccl)
    for name, text in files.values():
        (folder / name).write_text(text)
    place = "place", job
    slow = "--slow-nodes", "1", "--slowdown", "1.2"
    commands = {
        "hosts": [(*place, *slow, "--hosts", "{}")],
        "inventory": [(*place, "--measured-nodes", "{}")],
        "nccl_tests": [("show", "{}"), ("fit", "{}", "-o", "{out}/m.nc")],
        "placement_file": [("estimate", job, "--set", "cluster.hosts={}", *FEWER)],
    }  # fmt: skip
    return {k: (folder / name, commands[k.split("/")[0]]) for k, (name, _) in files.items()}


def _traces(folder: Path, job: str) -> dict[str, Any]:
    layout = pipeline_synth.Layout(replicas=2, stages=2, microbatches=3, steps=6)
    frame, _ = pipeline_synth.make_trace(layout, pipeline_synth.Effects(rank_sd=0.02))
    tidy = frame.rename(columns={"start": "start_s", "duration": "duration_s"})
    tidy.to_csv(folder / "tidy.csv", index=False)
    tidy.to_parquet(folder / "tidy.parquet")
    pipeline_synth.as_production(frame).to_csv(folder / "pipeline.csv", index=False)
    program = kineto_synth.training_step(n_layers=2, kernels=2)
    times = kineto_synth.simulate(program, *kineto_synth.draw(program, 4, 1))
    for name, maker in (("kineto", kineto_synth), ("nsys", nsys_synth), ("chakra", chakra_synth)):
        (folder / name).mkdir(exist_ok=True)
        made = maker.write(folder / name, program, times)[0]
        shutil.copy(made, folder / f"{name}{made.suffix}")
    packed = gzip.compress((folder / "kineto.json").read_bytes(), mtime=0)
    (folder / "kineto.json.gz").write_bytes(packed)
    hta = tables_made.hta_table(tables_made.durations(n=40))
    hta.to_csv(folder / "hta.csv", index=False)
    kernels = [
        ("show", "{}"), ("replay", "{}"), ("fit", "{}", "-o", "{out}/m.nc"), ("timeline", "{}"),
    ]  # fmt: skip
    commands = [*kernels, ("validate", "--trace", "{}", *FEW, "--bootstrap", "2")]
    library = [("show", "{}"), ("fit", "{}", "-o", "{out}/m.nc")]
    return {
        "tidy/csv": (folder / "tidy.csv", commands),
        "tidy_parquet/parquet": (folder / "tidy.parquet", commands),
        "pipeline/csv": (folder / "pipeline.csv", commands),
        "kineto/json": (folder / "kineto.json", kernels),
        "kineto/gz": (folder / "kineto.json.gz", kernels),
        "nsys/sqlite": (folder / "nsys.sqlite", kernels),
        "chakra/et": (folder / "chakra.et", kernels),
        "hta/csv": (folder / "hta.csv", library),
    }


def _imports(folder: Path) -> dict[str, Any]:
    """Files of other tools: shipped public configurations, and topologies of 64 nodes."""
    public = sorted((ROOT / "experiments" / "validation" / "public-configs" / "configs").iterdir())
    gpus = {"bigscience-bloom-176b.slurm": "384", "megatron-llama3-8b-h100-fp8.sh": "8",
            "deepspeed-llama-70b.json": "32"}  # fmt: skip
    named = {"deepspeed-llama-70b.json": ("--set", "model.name=llama3-70b")}
    out = {
        f"import/{path.name}": (path, [
            ("import", "{}", "--gpus", gpus.get(path.name, "512"), *named.get(path.name, ()))
        ]) for path in public
    }  # fmt: skip
    n = range(16)  # leaf switches, of four nodes each
    lines = [f"SwitchName=s{k} Nodes=n[{4 * k}-{4 * k + 3}]\n" for k in n]
    blocks = [f"BlockName=b{k} Nodes=n[{4 * k}-{4 * k + 3}]\n" for k in n]
    rows = [f"      - {{switch: s{k}, nodes: 'n[{4 * k}-{4 * k + 3}]'}}\n" for k in n]
    label = "network.topology.nvidia.com/"
    hosts = [{"metadata": {"name": f"n{k}", "labels": {
        f"{label}leaf": f"s{k // 4}", f"{label}spine": "t",
    }}} for k in range(64)]  # fmt: skip
    texts = {
        "topology.conf": "".join(lines) + "SwitchName=t Switches=s[0-15]\n",
        "blocks.conf": "".join(blocks) + "BlockSizes=4,8\n",
        "topology.yaml": "- topology: t\n  tree:\n    switches:\n"
        + "".join(rows)
        + "      - {switch: t, children: 's[0-15]'}\n",
        "nodes.json": json.dumps({"kind": "List", "items": hosts}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        out[f"topology/{name}"] = folder / name, [("import", "{}", "--job", "llama3-70b-fsdp-512")]
    return out


def _netcdf(folder: Path, call: Call, job: str) -> list[Original]:
    """Have prism write a result, model or library of each kind."""
    steps, trace = folder / "steps.csv", folder / "pipeline.csv"
    slow = "--slow-nodes", "1", "--slowdown", "1.2"
    made = {
        "estimate": ("estimate", job, *FEWER),
        "rank": ("rank", job),
        "place": ("place", job, *slow),
        "sweep": ("sweep", job, "--vary", "parallelism.microbatches=2,4", *FEW),
        "validate": ("validate", "--trace", trace, *FEW, "--bootstrap", "2"),
        "replay": ("replay", trace),
        "compare": ("compare", steps, folder / "one.csv"),
        "timeline": ("timeline", job, *FEW),
        "explanation": ("explain", folder / "sizes.yaml", folder / "fsdp.yaml", *FEW),
        "trace_model": ("fit", trace),
        "kernel_model": ("fit", folder / "kineto.json"),
        "steps_model": ("fit", steps),
        "kernel_library": ("fit", folder / "hta.csv"),
        "calibrated": ("fit", "--calibrate", f"{folder / 'fsdp.yaml'}={folder / 'one.csv'}"),
    }
    made["steps_estimate"] = ("estimate", folder / "steps_model.nc", *FEWER, "--steps", "50")
    page = ("report", "{}", "-o", "{out}/r.html")
    result = [("show", "{}"), page]
    model = [*result, ("estimate", "{}", *FEWER), ("estimate", "{}", *FEWER),
             ("validate", "{}", "--measured", str(steps), *FEW, "--bootstrap", "2")]  # fmt: skip
    trace_like = [*model, ("rank", "{}"), ("place", "{}", *slow), ("timeline", "{}"),
                  ("sweep", "{}", "--vary", "parallelism.dp=1,2", *FEW)]  # fmt: skip
    sizes = str(folder / "sizes.yaml")
    library = [("show", "{}"), ("show", "{}"),
               ("estimate", sizes, "--set", "variability.library={}", *FEWER)]  # fmt: skip
    commands = {
        "estimate": [*result, ("compare", "{}", "{}"), ("timeline", "{}")],
        "timeline": [("show", "{}")],
        "explanation": result,
        "steps_estimate": [*result, ("compare", "{}", "{}")],
        "trace_model": trace_like, "kernel_model": trace_like, "steps_model": model,
        "calibrated": library, "kernel_library": library[:2],  # no job has all of it
    }  # fmt: skip
    out = []
    for name, command in made.items():
        file = folder / f"{name}.nc"
        target = file if command[0] == "fit" else folder / name
        if not file.exists():
            status, _, err = call(*command, "-o", target, "--json", "-q", *COMMON)
            assert status == 0, f"{name}: {err}"
            if target != file:
                shutil.copy(target / "result.nc", file)
        out.append(Original(f"nc_{name}", file, tuple(commands.get(name, result))))
    return out


# ----------------------------------------------------------------------------------- mutations
NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e308", "1e-308", "5e-324", "-0.0", "9" * 40,
           "9223372036854775808", "1000000", "1e9", "0x10", "1_000", "", "null", "true", "1,5",
           "abc", "\u0663", "1e400", "2147483648", "-2147483649")  # fmt: skip
VALUES: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, -1, 0, 1e308, 1e-308, 10**30, 2**63, 10**6, 10**9, None, True,
    "", "x", [], {}, [1], {"a": 1}, -0.5, 1.5, "1e400", "\u0000", [[]], 3, 2,
)  # fmt: skip
CONTROLS = ("\x00", "\x1b[31m", "\r", "\u202e", "\ufeff", "\u2028", "[/bold]", "\x7f", "\ud7ff")
TOKEN = re.compile(rb"-?\d+\.?\d*(?:[eE][+-]?\d+)?")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Break a file as a disk or an editor would."""
    how = rng.choice(
        ("cut", "flip", "flip", "drop", "repeat", "noise", "encode", "control", "empty")
    )
    at = rng.randrange(len(data) + 1)
    if how == "cut":
        return data[:at]
    if how == "flip":
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        return bytes(out)
    if how == "drop":
        return data[:at] + data[at + rng.choice((1, 7, 100)) :]
    if how == "repeat":
        return data[:at] + data[max(0, at - rng.choice((1, 50, 5000))) :]
    if how == "noise":
        return data[:at] + rng.randbytes(rng.choice((1, 8, 300))) + data[at:]
    if how == "encode":
        text = data.decode("utf-8", errors="replace")
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "cp037")), errors="replace")
    if how == "control":
        return data[:at] + rng.choice(CONTROLS).encode() + data[at:]
    return b"" if rng.random() < 0.5 else b"\n \n"


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Put other numbers, lines and columns in a text."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        tokens = list(TOKEN.finditer(data))
        lines = data.split(b"\n")
        how = rng.choice(("number", "number", "number", "line", "column", "all"))
        if how == "number" and tokens:
            token = rng.choice(tokens)
            data = data[: token.start()] + rng.choice(NUMBERS).encode() + data[token.end() :]
        elif how == "line" and len(lines) > 1:
            i = rng.randrange(len(lines))
            j = rng.randrange(len(lines))
            lines = rng.choice(
                (
                    lines[:i],
                    lines[:i] + lines[i + 1 :],
                    lines + [lines[i]],
                    lines[:1] + lines[-1:],
                    [*lines[:i], lines[j], *lines[i:]],
                )
            )
            data = b"\n".join(lines)
        elif how in ("column", "all") and b"," in lines[0]:
            column = rng.randrange(lines[0].count(b",") + 1)
            value = rng.choice(NUMBERS).encode()
            keep = how == "column"
            rows = [line.split(b",") for line in lines]
            for row in rows[1:]:
                if len(row) > column:
                    row[column : column + 1] = [] if keep else [value]
            if keep:
                del rows[0][column]
            data = b"\n".join(b",".join(row) for row in rows)
    return data


def mutate_tree(tree: Any, rng: random.Random, times: int = 0) -> Any:
    """Put other values, keys and types somewhere in a tree of mappings and lists."""
    for _ in range(times or rng.choice((1, 1, 1, 2, 4))):
        node, path = tree, []
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            path.append((node, rng.choice(list(keys))))
            node = node[path[-1][1]]
            if rng.random() < 0.08:
                break
        if not path:
            return rng.choice(VALUES)
        parent, key = path[-1]
        how, number = rng.random(), isinstance(node, int | float) and not isinstance(node, bool)
        if number and how < 0.5:
            scale = rng.choice((-1, 0, 0.5, 2, 4, 10, 1000, 1e6, 1e12, 1e300))
            whole = isinstance(node, int) and math.isfinite(node * scale)
            parent[key] = int(node * scale) if whole else node * scale
        elif how < 0.1 and isinstance(parent, dict):
            parent[rng.choice(("no_such_key", "", 3, "x" * 300))] = rng.choice(VALUES)
        elif how < 0.2:
            del parent[key]
        elif how < 0.3 and isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[key] = rng.choice(VALUES)
    return tree


def mutate_netcdf(path: Path, rng: random.Random) -> None:
    """Change variables and attributes of a netCDF file: what HDF5 holds, or what prism says."""
    if rng.random() < 0.5:
        _mutate_dataset(path, rng)
        return
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        with h5py.File(path, "r+") as file:
            names = [name for name in file if isinstance(file[name], h5py.Dataset)]
            if names and rng.random() < 0.6:
                _mutate_variable(file, rng.choice(names), rng)
            elif file.attrs:
                _mutate_attribute(file, rng.choice(sorted(file.attrs)), rng)


def reseal(content: bytes) -> bytes:
    """Put the hash of a netCDF file behind it again."""
    content = content.partition(SEAL)[0]
    return content + SEAL + hashlib.sha256(content).hexdigest().encode()


def _mutate_dataset(path: Path, rng: random.Random) -> None:
    """Change a dataset as a program could that writes such files itself."""
    with xr.open_dataset(path, engine="h5netcdf") as opened:
        dataset = opened.load().drop_encoding()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        how, names = rng.random(), sorted(map(str, dataset.variables))
        if how < 0.4 and dataset.attrs:
            _mutate_attribute(dataset, rng.choice(sorted(dataset.attrs)), rng)
        elif how < 0.7:
            name = rng.choice(names)
            values = np.array(dataset[name].values)
            if values.dtype.kind in "iuf" and values.size:
                scale = rng.choice((-1, 0, 1e-300, 1e6, 1e300, np.nan, np.inf))
                row = rng.randrange(values.size) if values.ndim and rng.random() < 0.5 else ...
                with np.errstate(all="ignore"):
                    values = values.astype(float)
                    values.reshape(-1)[row] *= scale
            elif values.size:
                values = values.astype(object)
                values.reshape(-1)[rng.randrange(values.size)] = rng.choice(("", "x", "trace"))
            dataset = dataset.assign({name: (dataset[name].dims, values, dataset[name].attrs)})
        elif how < 0.8 and dataset.sizes:
            name = rng.choice(sorted(map(str, dataset.sizes)))
            keep = rng.choice((slice(0), slice(1), slice(None, -1), slice(None, None, -1)))
            dataset = dataset.isel({name: keep})
        elif how < 0.9:
            dataset = dataset.drop_vars(rng.choice(names))
        elif how < 0.95:
            name = rng.choice(names)
            dataset = dataset.rename({name: f"other_{name}"})
        else:
            name = rng.choice(names)
            values = np.ones(rng.choice(((), (0,), (2,), (3, 2))))
            dims = tuple(f"{name}_{i}" for i in range(values.ndim))
            with contextlib.suppress(ValueError):  # it names a dimension of others
                dataset = dataset.drop_vars(name).assign({name: (dims, values)})
        if not dataset.variables:
            break
    path.write_bytes(bytes(dataset.to_netcdf(engine="h5netcdf")))


def _mutate_attribute(file: h5py.File | xr.Dataset, name: str, rng: random.Random) -> None:
    value = file.attrs[name]
    if rng.random() < 0.2:
        del file.attrs[name]
        return
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = json.dumps(mutate_tree(json.loads(value), rng))
    elif isinstance(value, str):
        value = rng.choice((*CONTROLS[1:], "", "x" * 10_000, value[1:], "[red]", "trace", "\n"))
    else:
        value = rng.choice((math.nan, -1, 0, 1e308, "x", 2**62, np.array([1.0, 2.0]), math.inf))
    file.attrs[name] = value


def _mutate_variable(file: h5py.File, name: str, rng: random.Random) -> None:
    data = file[name]
    how = rng.random()
    if how < 0.12:
        del file[name]
        return
    number = data.dtype.kind in "iuf"
    if how < 0.75 and number and data.size:
        values = data[...]
        extremes = (-1, 0, 10**6, np.iinfo(np.int32).max) if data.dtype.kind in "iu" else (
            np.nan, np.inf, -1.0, 0.0, 1e300, 1e-300, -1e300, 1e30)  # fmt: skip
        with np.errstate(over="ignore"):
            extreme = np.array(rng.choice(extremes)).astype(data.dtype)
        if data.ndim == 0 or rng.random() < 0.3:
            values[...] = extreme
        else:
            flat = values.reshape(-1)
            flat[rng.randrange(flat.size)] = extreme
        data[...] = values
        return
    attributes = {k: v for k, v in data.attrs.items() if k in ("units", "long_name")}
    shape = data.shape
    del file[name]
    if how < 0.85:  # other shape
        shape = rng.choice(((), (0,), (1,), (3,), (*shape, 2), shape[1:]))
        made = file.create_dataset(name, data=np.ones(shape, np.float64))
    elif how < 0.95:  # other type
        dtype = rng.choice((np.int8, np.float32, np.int64, h5py.string_dtype()))
        made = file.create_dataset(name, shape, dtype)
    else:  # a bomb: nothing is stored
        made = file.create_dataset(name, (BOMB,), np.float64, chunks=(1 << 20,), compression=1)
    made.attrs.update(attributes)


def mutate_sqlite(path: Path, rng: random.Random) -> None:
    """Change cells, rows, columns and tables of an SQLite file."""
    with contextlib.closing(sqlite3.connect(path)) as db, contextlib.suppress(sqlite3.Error):
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")]
        for _ in range(rng.choice((1, 1, 3))):
            table = rng.choice(tables)
            columns = [row[1] for row in db.execute(f"PRAGMA table_info('{table}')")]
            if not columns:  # dropped before
                continue
            column, some = rng.choice(columns), f"rowid % {rng.choice((1, 1, 7, 50))} = 0"
            how = rng.choice(("cell", "cell", "cell", "cell", "drop", "rows", "rename"))
            if how == "cell":
                value = rng.choice((None, -1, 0, 2**63 - 1, -(2**63), 1e308, math.inf, "x", b"\0",
                                    "", 1.5, 10**12, 1e30))  # fmt: skip
                db.execute(f"UPDATE '{table}' SET '{column}' = ? WHERE {some}", (value,))
            elif how == "drop":
                db.execute(f"DROP TABLE '{table}'")
            elif how == "rows":
                db.execute(f"DELETE FROM '{table}' WHERE {some}")
            else:
                db.execute(f"ALTER TABLE '{table}' RENAME COLUMN '{column}' TO 'other'")
        db.commit()


def mutate_parquet(path: Path, rng: random.Random) -> None:
    """Change cells and columns of a parquet table."""
    frame = pd.read_parquet(path)
    for _ in range(rng.choice((1, 1, 3))):
        column = rng.choice(list(frame.columns))
        how = rng.choice(("cell", "cell", "all", "drop", "text", "none", "rename", "rows"))
        if how in ("cell", "all"):
            value = rng.choice((np.nan, np.inf, -1, 0, 1e308, "x", None, 2**62, -1e-3))
            frame[column] = frame[column].astype(object)
            rows = [rng.randrange(len(frame))] if how == "cell" else frame.index
            frame.loc[rows, column] = value
        elif how == "drop" and frame.shape[1] > 1:
            frame = frame.drop(columns=column)
        elif how == "text":
            frame[column] = frame[column].astype(str)
        elif how == "none":
            frame[column] = None
        elif how == "rename":
            frame = frame.rename(columns={column: rng.choice(("x", "", "duration_ms", "rank"))})
        else:
            frame = frame.iloc[: rng.choice((1, 2, len(frame) // 2))].reset_index(drop=True)
        if frame.empty or not frame.columns.is_unique:
            break
    with contextlib.suppress(Exception):  # a column of several types that parquet does not take
        frame.to_parquet(path)


def make_bomb(path: Path) -> None:
    """Pack a text that repeats what the file holds until it is large."""
    text = path.read_bytes() or b"\n"
    part = gzip.compress(text * (1 + (1 << 22) // len(text)), mtime=0)
    with path.open("wb") as file:
        for _ in range(BOMB >> 22):
            file.write(part)


def mutate_file(path: Path, rng: random.Random) -> None:
    """Break a file as its kind can be broken, or any file can."""
    data = path.read_bytes()
    head, plain = data[:16], rng.random() < 0.25
    if head.startswith(b"\x89HDF"):
        if rng.random() < 0.2:
            path.write_bytes(mutate_bytes(data, rng))
        else:
            mutate_netcdf(path, rng)
        how, data = rng.random(), path.read_bytes()  # half are signed, by nobody or anew
        if how < 0.5:
            path.write_bytes(reseal(data) if how < 0.25 else data.partition(SEAL)[0])
        return None
    if rng.random() < 0.004:
        return make_bomb(path)
    if plain:
        path.write_bytes(mutate_bytes(data, rng))
    elif head.startswith(b"SQLite"):
        mutate_sqlite(path, rng)
    elif head.startswith(b"PAR1"):
        mutate_parquet(path, rng)
    elif path.suffix in (".yaml", ".yml"):
        tree = mutate_tree(yaml.safe_load(data), rng)
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
    elif head[:1] == b"{" and rng.random() < 0.7:
        tree = json.loads(data)
        target = tree.get("traceEvents", tree) if rng.random() < 0.8 else tree
        mutate_tree(target, rng)
        path.write_text(json.dumps(tree))
    elif path.suffix in (".gz", ".et"):
        path.write_bytes(mutate_bytes(data, rng))
    else:
        if path.suffix in (".sh", ".slurm") and rng.random() < 0.5:
            lines = data.split(b"\n")
            at = rng.randrange(len(lines))
            data = b"\n".join([*lines[:at], rng.choice(SNIPPETS).encode(), *lines[at:]])
        path.write_bytes(mutate_text(data, rng))
    return None


# -------------------------------------------------------------------------------- one input
def count_controls(originals: list[Original]) -> int:
    """Commands that read whole files, each once: inputs -1, -2, ..., which must be answered."""
    return sum(len(set(original.commands)) for original in originals)


def make_input(originals: list[Original], seed: int, index: int, folder: Path) -> tuple[str, list]:
    """Write one input into an empty folder; its kind, and the command that reads it.

    A whole file for every index below 0, one that is broken for others.
    """
    if index < 0:
        pairs = [(o, command) for o in originals for command in sorted(set(o.commands))]
        original, command = pairs[-1 - index]
        path = folder / original.path.name
        shutil.copyfile(original.path, path)
        return "whole", [*_fill(command, path), *_common(command, original.kind), "-q"]
    kinds = sorted({original.kind for original in originals})
    rng = random.Random(f"{seed}/{index}")
    # a job file can say more than any other: one input in six
    kind = "job" if index % 6 == 0 and "job" in kinds else kinds[index * 7 // 6 % len(kinds)]
    original = rng.choice([o for o in originals if o.kind == kind])
    path = folder / original.path.name
    shutil.copyfile(original.path, path)
    command = list(rng.choice(original.commands))
    mutate_file(path, rng)
    if kind == "job" and rng.random() < 0.2:
        option = rng.choice(("--steps", "--replicates", "--seed", "--price", "--deadline"))
        if option in ("--seed", "--replicates") or command[0] == "estimate":
            command += [option, rng.choice(NUMBERS)] if command[0] != "rank" else []
    words = [*_fill(command, path), *_common(command, kind), "-q"]
    return kind, words + ["--json"] * (rng.random() < 0.8 and "--yaml" not in words)


def _common(command: Sequence[str], kind: str) -> tuple[str, ...]:
    """Options that make a command repeatable; a result has its own seed."""
    own = "--seed" in command or (command[0] == "timeline" and kind == "nc_estimate")
    return COMMON[2:] if own else COMMON


def _fill(command: Sequence[str], path: Path) -> list[str]:
    """Name the file, and the folder it is in, where a command does."""
    return [word.replace("{out}", str(path.parent)).replace("{}", str(path)) for word in command]


def find_faults(words: list[str], status: int, out: str, err: str) -> list[str]:
    """Name what a command did that it must not do."""
    found = []
    if "Traceback (most recent call last)" in out + err:
        found.append("traceback")
    if status not in (0, 2) or "internal error" in err:
        found.append("internal error")
    if LINE.search(err):
        found.append("warning of Python")
    if status == 2 and not err.startswith(("prism: ", "Usage: ", "Error: ")):
        found.append("refused without a word")
    if "--json" in words:
        try:
            if status == 0:
                _check_finite(json.loads(out, parse_constant=_refuse))
            elif out:
                found.append("no JSON")
        except ArithmeticError:
            found.append("nonfinite figure")
        except ValueError:
            found.append("no JSON")
    return found


def _refuse(word: str) -> float:
    raise ArithmeticError(word)


def _check_finite(tree: Any) -> None:
    for value in (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    ):
        _check_finite(value)
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ArithmeticError(tree)
