"""Files as people have them, of shared/data/field_inputs: what INDEX.md there says of each."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
FIELD = DATA / "field_inputs"
pytestmark = pytest.mark.skipif(not FIELD.is_dir(), reason="shared/data/field_inputs is not there")


def answer(run: Any, command: str, name: str, *options: str) -> dict[str, Any]:
    status, out, err = run(command, FIELD / name, *options, "--json", "-q")
    assert status == 0, err
    return dict(json.loads(out))


IMPORTS = {
    "hf_nemotron-3-super.json": (
        "--device b200 --gpus 512 --set model.seq_len=8192",
        {"total": 120.67e9, "active": 12.77e9, "model.expert_latent_size": 1024,
         "model.gated_mlp": False, "model.n_shared_experts": 2},
    ),
    "hf_granite-4.0-h-small.json": (
        "--gpus 64", {"total": 32.2e9, "active": 8.8e9, "model.shared_ffn_size": None}),
    "hf_llama4-maverick.json": ("--gpus 64", {"total": 400.7e9, "active": 17.2e9}),
    "hf_qwen3-next-80b-a3b.json": (
        "--gpus 64", {"total": 79.674e9, "model.layer_pattern": "LE LE LE *E"}),
    "hf_dsv3-resaved.json": ("--gpus 64", {"total": 671.0e9, "model.name": "deepseek-v3"}),
    "hf_moonlight-original.json": ("--gpus 64", {"total": 15.96e9, "model.q_lora_rank": None}),
    "ds_batch_gas.json": (
        "--gpus 8 --set model.name=llama3-8b",
        {"parallelism.microbatch_size": 4, "parallelism.global_batch": 256}),
    "deepspeed_dump.log": (
        "--set model.name=llama3-8b",
        {"parallelism.microbatch_size": 4, "format": "deepspeed", "parallelism.framework": "eager",
         "parallelism.data_parallel": "fsdp", "world": 8}),
    "titan_2026.json": (
        "", {"parallelism.global_batch": 256, "parallelism.microbatch_size": 8, "world": 256,
             "parallelism.tp": 8, "model.name": "llama3-70b"}),
    "modelzoo_qwen3_h100.sh": (
        "--set model.name=qwen3-235b-a22b --gpus 256",
        {"parallelism.tp": 2, "parallelism.pp": 8, "parallelism.vpp": 4, "parallelism.ep": 32,
         "parallelism.global_batch": 2048, "lacking": 1}),
    "titan_print_config.log": (
        "", {"parallelism.tp": 8, "world": 256, "parallelism.global_batch": 256,
             "parallelism.recompute": "full"}),
    "nanotron_3b.yaml": (
        "", {"world": 384, "parallelism.dp": 192, "parallelism.tp": 2, "run.steps": 3_200_000,
             "format": "nanotron", "parallelism.global_batch": 576}),
    "bridge_run_config.yaml": (
        "--gpus 64 --device h100 --set model.seq_len=1024", {"model.seq_len": 1024, "world": 64}),
    "bridge_task.log": (
        "--gpus 64 --set model.seq_len=1024",
        {"format": "bridge", "model.name": "llama3.2-1b", "parallelism.global_batch": 512}),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPORTS)
def test_imports(run, name: str) -> None:
    options, wanted = IMPORTS[name]
    found = answer(run, "import", name, *options.split())
    values = found["values"]
    sizes = found["parameters"] or {}
    for key, value in wanted.items():
        if key in ("total", "active"):
            assert sizes[key] == pytest.approx(value, rel=2e-3)
        elif key == "world":
            assert found["world_size"] == value
        elif key == "lacking":
            assert len(found["lacking"]) == value
        else:
            assert values.get(key, found.get(key)) == value, key
    assert len(found["not_understood"]) <= 4


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        # Megatron Bridge refuses to start with two lengths
        ("bridge_run_config.yaml", "--gpus 64", (":11:", ":61", "1024", "131072", "--set")),
        ("bridge_task.log", "--gpus 64", (":18:", ":68", "131072", "--set")),
        ("titan_registry.py", "", ("--debug.save_config_file",)),
    ],
)
def test_what_is_refused_says_why(run, name: str, options: str, words: tuple[str, ...]) -> None:
    status, out, err = run("import", FIELD / name, *options.split())
    assert (status, out) == (2, "") and all(word in err for word in words), err


# seconds a step, means over what is read
LOGS = {
    "L1_titan_8ranks.log": 1.641, "L3_nemo_bar_10k.log": 5.796, "L6_nanotron.log": 11.5,
    "L7_olmo_core.log": 0.254, "L9_ms_swift.log": 4.6, "L10_trainer_log.jsonl": 5.87,
    "L11b_hf_console.log": 5.05, "L17_xtuner.log": 3.21,
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_logs(run, name: str) -> None:
    found = answer(run, "show", name)
    assert found["kind"] == "step_times" and found["n_runs"] == 1
    assert found["mean"] == pytest.approx(LOGS[name], rel=0.01)


def test_evaluations_are_pauses(run) -> None:
    status, out, err = run("watch", FIELD / "L2_titan_validate.log", "--steps", "1000", "--once",
                           "--json")  # fmt: skip
    assert status == 0, err
    found = json.loads(out)  # 45 min 46 s are 1,000 steps, of which 60 are done
    assert found["completed_steps"] == 60
    assert found["time_left"]["p50"] == pytest.approx(0.94 * (45 * 60 + 46), rel=0.01)


def test_other_files(run, tmp_path) -> None:
    assert answer(run, "fit", "N7_nsys_kern_sum.csv")["kind"] == "library"
    status, out, err = run("fit", FIELD / "N5_no_mpi.txt")
    assert (status, out) == (2, "") and "MPI" in err
    job = tmp_path / "job.yaml"
    job.write_text("model: {name: llama3-8b}\nparallelism: {tp: 4, dp: 32, global_batch: 128}\n"
                   "cluster: {device: gb200, nodes: 32, gpus_per_node: 4}\n")  # fmt: skip
    hosts = answer(run, "import", "topograph_fake.conf", "--job", str(job))["hosts"]
    assert len(hosts) == 32 and all(host.startswith("gb") for host in hosts)
    ops = answer(run, "show", "trace_xpu", "--details")
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(json.dumps(ops).split('"'))


COLLECTIVES = {
    "N1b_no_test_name.txt": ("all_reduce", 380.5), "N3_rccl.json": ("all_reduce", 310.0),
    "N3b_rccl.csv": ("all_reduce", 310.0), "N4_nvl72.txt": ("all_reduce", 858.2),
    "N8_timestamps.txt": ("all_reduce", 380.5),
}  # fmt: skip


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(run, name: str) -> None:
    kind, gbytes = COLLECTIVES[name]
    found = answer(run, "fit", name)
    assert [c["name"] for c in found["collectives"]] == [kind]
    assert found["collectives"][0]["bus_bytes_per_s"] == pytest.approx(gbytes * 1e9, rel=0.01)
    assert ("network" in found["links"]) == (name in ("N1b_no_test_name.txt", "N8_timestamps.txt"))
