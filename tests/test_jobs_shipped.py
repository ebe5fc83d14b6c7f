"""The jobs that ship with prism: they load, they are what their sources say, they say so."""

import json
from pathlib import Path

import pytest

from prism import Job, load_job

FOLDER = Path(__file__).parents[1] / "experiments" / "jobs"

# name: tp, cp, pp, vpp, dp, microbatches, GPUs, tokens of one step
LAYOUTS = {
    "deepseek-v3-2048": (1, 1, 16, 1, 128, 120, 2_048, 15_360 * 4_096),
    "deepseek-v3-gb200-256": (1, 1, 4, 4, 64, 64, 256, 4_096 * 4_096),
    "dlrm-dcnv2-h100-8": (1, 1, 1, 1, 8, 1, 8, 65_536),
    "flux1-b200-64": (1, 1, 1, 1, 64, 1, 64, 1_024 * 512),
    "gpt3-175b-10752": (4, 1, 8, 12, 336, 8, 10_752, 2_688 * 2_048),
    "gpt3-175b-512": (4, 1, 8, 12, 16, 128, 512, 2_048 * 2_048),
    "llama3-405b-131k-sequence": (8, 16, 16, 8, 8, 16, 16_384, 2**24),
    "llama3-405b-16k": (8, 1, 16, 8, 128, 16, 16_384, 2**24),
    "llama3-405b-1m": (8, 1, 16, 4, 8_192, 16, 1_048_576, 2**30),
    "llama3-405b-64k": (8, 1, 16, 4, 512, 16, 65_536, 2**26),
    "llama3-405b-8k": (8, 1, 16, 8, 64, 32, 8_192, 2**24),
    "llama3-405b-two-sites": (8, 1, 16, 8, 128, 16, 16_384, 2**24),
    "llama3-70b-fsdp-512": (1, 1, 1, 1, 512, 1, 512, 512 * 8_192),
    "llama3-70b-h100-fp8-64": (4, 2, 4, 5, 2, 64, 64, 128 * 8_192),
    "llama31-405b-gb200-512": (4, 2, 8, 8, 8, 112, 512, 896 * 8_192),
    "llama31-405b-h100-512": (8, 2, 8, 8, 4, 288, 512, 1_152 * 8_192),
    "pipeline-8x32": (1, 1, 8, 1, 1, 32, 8, 0),
}


def shown(run, name):
    return json.loads(run("show", name, "--json")[1])


def test_all_shipped_jobs_are_listed_here(run) -> None:
    assert {row["job"] for row in json.loads(run("show", "--jobs", "--json")[1])["jobs"]} == {
        *LAYOUTS
    }
    assert {file.stem for file in FOLDER.glob("*.yaml")} == {*LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shipped_job_has_its_published_layout(run, name: str) -> None:
    job = load_job(name)
    p = job.parallelism
    sizes = (p.tp, p.cp, p.pp, p.vpp, p.dp, p.microbatches)
    assert (*sizes, job.world_size, job.tokens_per_step) == LAYOUTS[name]
    found = shown(run, name)
    assert job.model.durations is not None or sum(found["layer_split"]) == job.model.depth
    assert job.run.deadline is not None and job.n_steps >= 1
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert set(found["sources"].values()) != {"default"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shipped_job_names_its_source_and_the_schema(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert "Source" in text or name == "llama3-405b-64k"
    if name.startswith(("gpt3", "llama31")):
        assert "FP8" in text and load_job(name).parallelism.precision == "fp8"


def test_llama_has_one_layer_fewer_at_both_ends(run) -> None:
    split = shown(run, "llama3-405b-64k")["layer_split"]
    assert len(split) == 64 and split[0] == split[-1] == 1 and set(split[1:-1]) == {2}
    whole, pp = shown(run, "llama3-405b-16k")["layer_split"], 16
    stages = [whole[s::pp] for s in range(pp)]
    assert [sum(stage) for stage in stages] == [7] + [8] * 14 + [7]


def test_the_reference_pipeline_varies_only_by_its_residual() -> None:
    job = load_job("pipeline-8x32")
    v = job.variability
    assert v.library is None and v.effects.residual is not None
    assert (v.effects.residual.law, v.effects.residual.cv) == ("lognormal", 0.05)
    assert set(v.effects.model_dump(exclude_none=True)) == {"residual"}
    assert (job.parallelism.schedule, job.parallelism.p2p, job.run.steps) == ("1f1b", "async", 1000)


SCHEMA = json.loads((FOLDER / "schema.json").read_text())


def test_the_shipped_schema_is_current() -> None:
    """But for defaults that follow from other keys, which it leaves out."""
    own = Job.model_json_schema()
    assert own["$defs"].keys() == SCHEMA["$defs"].keys()
    for name, block in own["$defs"].items():
        for key, value in block["properties"].items():
            shipped = SCHEMA["$defs"][name]["properties"][key]
            left_out = {k: value[k] for k in value.keys() - shipped.keys()}
            assert left_out.keys() <= {"title", "default"}, key
            assert {**left_out, **shipped} == value, key
        assert block["properties"].keys() == SCHEMA["$defs"][name]["properties"].keys()


def test_defaults_of_the_schema_are_what_a_job_without_them_has() -> None:
    """Whatever else it says: a default that follows from another key has no value there."""
    properties = SCHEMA["$defs"]
    sharded, model = {"dp": 8, "data_parallel": "fsdp"}, {"name": "llama3-8b"}
    for given in (
        {"model": model, "parallelism": {"dp": 8}}, {"model": model, "parallelism": sharded},
        {"model": {"name": "gpt3-175b"}, "parallelism": {"dp": 8, "framework": "eager"}},
        {"model": model, "parallelism": {"dp": 4, "pp": 2, "microbatches": 4},
         "cluster": {"device": "gb200", "nodes": 2, "gpus_per_node": 4}},
        {"model": model, "parallelism": {"pp": 2, "dp": 4, "vpp": 2, "microbatches": 4}},
    ):  # fmt: skip
        job = load_job({"cluster": {"nodes": 1}, **given})
        for name, block in (("model", "ModelBlock"), ("parallelism", "ParallelismBlock"),
                            ("cluster", "ClusterBlock")):  # fmt: skip
            for key, entry in properties[block]["properties"].items():
                left_out = key not in given.get(name, {}) and (name, key) != ("cluster", "nodes")
                value = getattr(getattr(job, name), key)
                if left_out and isinstance(entry.get("default"), bool | str):
                    assert value == entry["default"], (key, given)


def test_the_schema_describes_every_key_and_requires_none() -> None:
    schema = SCHEMA
    blocks = ["base", "model", "parallelism", "cluster", "variability", "run"]
    assert list(schema["properties"]) == blocks
    for block in (schema, *schema["$defs"].values()):
        assert "required" not in block and block["additionalProperties"] is False
        assert all(value.get("description") for value in block["properties"].values())
    keys = schema["$defs"]["ParallelismBlock"]["properties"]
    assert "default" not in keys["schedule"] and keys["tp"]["default"] == 1
