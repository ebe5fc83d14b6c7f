"""The job file: what loads, where each value comes from, what wins, and what every mistake says."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_seconds

import prism
from prism import load_job

GOOD = """\
model: {name: llama3-8b}
parallelism:
  tp: 2
  pp: 4
  dp: 2
  microbatches: 8
cluster:
  nodes: 2
variability:
  effects:
    residual: {cv: 0.02}
run:
  steps: 10
"""
ONE_NODE = ["parallelism.pp=1", "cluster.nodes=1", "cluster.gpus_per_node=4"]


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mistakes(job: Any, *overrides: str) -> list[str]:
    """Lines of what a job is refused with: each has its place, its key and a way out."""
    with pytest.raises(prism.PrismError) as caught:
        load_job(job, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shown(run):
    """What `prism show` says of a job: its values by dotted key, and where they come from."""

    def call(job: Any, *options: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        status, out, err = run("show", job, *options, "--json", "-q")
        assert status == 0, err
        found = json.loads(out)
        return dict(flat(found["values"])), found["sources"], found

    return call


def flat(tree: Any, above: str = "") -> list[tuple[str, Any]]:
    """Keys and values of a nested mapping; what is not set is left out."""
    if isinstance(tree, dict) and tree:
        return [x for k, v in tree.items() for x in flat(v, f"{above}.{k}".lstrip("."))]
    return [] if tree is None else [(above, tree)]


def value(job: prism.Job, key: str) -> Any:
    return dict(flat(job.model_dump())).get(key)


# ------------------------------------------------------------------------- what loads, defaults
def test_a_good_job_has_its_values_and_the_documented_defaults(here: Path, shown) -> None:
    job = load_job(write(here, GOOD))
    assert (job.name, job.world_size, job.n_nodes, job.n_steps) == ("job", 16, 2, 10)
    assert job.tokens_per_step == 2 * 8 * 8192
    values, sources, found = shown("job.yaml")
    defaults = {
        "data_parallel": "ddp", "schedule": "1f1b", "p2p": "async", "microbatch_size": 1,
        "reshard_after_forward": False, "sequence_parallel": True, "recompute": "none",
        "overlap": True, "prefetch": 1, "bucket_layers": 4, "precision": "bf16", "ep": 1,
        "framework": "megatron", "gradient_dtype": "fp32", "fused_loss": True, "cp": 1,
        "expert_dispatch": "alltoall", "cluster.gpus_per_node": 8, "cluster.device": "h100",
        "cluster.nvlink_domain_gpus": 8, "cluster.oversubscription": 1.0, "cluster.leaf_nodes": 16,
        "cluster.placement": "megatron", "variability.library": "h100-healthy",
        "variability.dependence": "full", "variability.ranks": "drawn",
        "variability.resolution": "op", "run.probability": 0.9,
        "run.slowdown_thresholds": [1.05, 1.1, 1.2], "cluster.scale.memory.cv": 1.0,
    }  # fmt: skip
    for key, expected in defaults.items():
        key = key if "." in key else f"parallelism.{key}"
        assert (values[key], sources[key]) == (expected, "default"), key
    assert (
        sources["parallelism.tp"].endswith("job.yaml:3") and sources["model.n_layers"] == "preset"
    )
    assert found["layer_split"] == [8, 8, 8, 8]
    assert not {"run.deadline", "cluster.max_slowdown", "variability.effects.rank.cv"} & set(values)


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["parallelism.dp=1", "cluster.nodes=1"], "data_parallel", "none"),
        (["parallelism.vpp=2"], "schedule", "interleaved"),
        (["parallelism.schedule=zb-v"], "vpp", 2),
        (["parallelism.data_parallel=fsdp"], "framework", "compiled"),
        (["parallelism.framework=eager"], "fused_loss", False),
        (ONE_NODE, "microbatches", 8), (ONE_NODE, "reshard_after_forward", True),
        ([*ONE_NODE, "parallelism.microbatches="], "microbatches", 1),
        (["parallelism.global_batch=48"], "microbatches", 24),
        (["parallelism.global_batch=48", "parallelism.microbatch_size=3"], "microbatches", 8),
        (["parallelism.global_batch=48", "parallelism.microbatches=12"], "global_batch", None),
        (["cluster.device=gb200"], "variability.library", "gb200-healthy"),
        (["cluster.device=gb200"], "cluster.nvlink_domain_gpus", 72),
        (["model.n_heads=16"], "model.n_kv_heads", 8),
        (["model={name: null, n_layers: 8, hidden_size: 512, ffn_size: 1024, n_heads: 8, "
          "vocab_size: 1000, seq_len: 128}"], "model.n_kv_heads", 8),
        (["model.name=gpt3-175b"], "model.gated_mlp", False),
    ],
)  # fmt: skip
def test_defaults_that_follow_from_other_keys(here, overrides, key, expected) -> None:
    job = load_job(write(here, GOOD), overrides)
    assert value(job, key if "." in key else f"parallelism.{key}") == expected


@pytest.mark.parametrize(("nodes", "gpus"), [(18, 72), (36, 72), (32, 64), (20, 64), (16, 72)])
def test_a_rack_is_an_nvlink_domain_where_it_divides_the_job(here, nodes: int, gpus: int) -> None:
    keys = [f"cluster={{device: gb200, nodes: {nodes}, gpus_per_node: 4}}"]
    job = load_job(write(here, GOOD), [*keys, f"parallelism.dp={nodes // 2}"])
    assert job.cluster.nvlink_domain_gpus == gpus


def test_assumed_failures_are_those_of_gpus() -> None:
    """419 in 54 days on 16,384 GPUs, arXiv:2407.21783: so half as often of a node of 4."""
    rates = {}
    for gpus in (4, 8):
        machine = {"nodes": 16 // gpus, "gpus_per_node": gpus}
        job = load_job({"model": TINY, "parallelism": {"dp": 16}, "cluster": machine})
        found = prism.summary(prism.estimate(job, replicates=64, run_replicates=8, steps=9, seed=1))
        rates[gpus] = found["failure_model"]["per_1000_node_days"]
    assert rates == {n: pytest.approx(n * 1000 * 419 / (16_384 * 54)) for n in (4, 8)}


def test_yaml_is_version_1_2_with_any_line_ends(here: Path) -> None:
    text = GOOD.replace("cv: 0.02", "cv: 1e-3").replace("steps: 10", "steps: 1e3")
    job = load_job(write(here, text.replace("tp: 2", "tp: 0x2")))
    assert (value(job, "variability.effects.residual.cv"), job.run.steps, job.parallelism.tp) == (
        1e-3, 1000, 2,
    )  # fmt: skip
    path = here / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_job(path) == load_job(write(here, GOOD))


def test_a_job_does_not_change_and_can_be_rebuilt(here: Path) -> None:
    job = load_job(write(here, GOOD), ["run.start=2026-01-31", "cluster.node_slowdowns={1: 1.2}"])
    with pytest.raises(ValueError, match="frozen"):
        job.name = "other"  # type: ignore[misc]
    for again in (prism.Job.model_validate_json(job.model_dump_json()),
                  prism.Job.model_validate(job.model_dump())):  # fmt: skip
        assert again == job and hash(again) == hash(job)
    assert job != load_job("job.yaml")
    assert job.replace("run.steps=3").replace("run.steps=10") == job


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60d", 60 * 86400.0), ("12h", 43200.0), ("1.5min", 90.0), ("3600", 3600.0), (7, 7.0),
     ("2w", 1_209_600.0), ("5 s", 5.0), (0.5, 0.5)],
)  # fmt: skip
def test_lengths_of_time(text: Any, seconds: float) -> None:
    keys = ("run.deadline", "run.evaluation.duration", "run.checkpoint.interval",
            "variability.effects.fail_slow.duration", "run.failures.restart")  # fmt: skip
    for key in keys:
        also = {"run.evaluation.interval_steps": 9} if "evaluation" in key else {}
        also |= (
            {"variability.effects.fail_slow.rate_per_1000_node_days": 1} if "slow" in key else {}
        )
        if "checkpoint" in key:
            also = {"run.checkpoint.write_s": 0.0}
        job = load_job("pipeline-8x32").replace({**also, key: text})
        assert value(job, key) == seconds


@pytest.mark.parametrize("text", ["", "60x", "-3d", "d", 0, True, "inf", "nan", "1.2.3h"])
def test_what_is_no_length_of_time(text: Any) -> None:
    with pytest.raises(prism.PrismError, match="run.evaluation.duration: "):
        load_job("pipeline-8x32").replace({"run.evaluation": {"interval_steps": 1,
                                                              "duration": text}})  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "steps"), [(1e6, 8), (131_072, 1), (131_073, 2), (1, 1), (8 * 131_072, 8)]
)
def test_tokens_become_steps(here: Path, tokens: float, steps: int) -> None:
    job = load_job(write(here, GOOD), {"run.tokens": tokens})  # 131,072 tokens a step
    assert job.run.steps is None  # the override answers the same question, so it replaces steps
    assert job.n_steps == steps


# -------------------------------------------------------------------------------- layer splits
@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 4))
def test_only_chunks_without_work_are_refused(n_layers: int, pp: int, vpp: int) -> None:
    layout = {"pp": pp, "microbatches": 4 * pp} | ({"vpp": vpp} if pp > 1 else {})
    chunks = pp * vpp if pp > 1 else 1
    tree = {"model": {"name": "llama3-8b", "n_layers": n_layers}, "parallelism": layout,
            "cluster": {"nodes": pp, "gpus_per_node": 1}}  # fmt: skip
    if chunks <= n_layers + 2:  # the ends may be empty: they have the embedding and the loss
        assert load_job(tree).parallelism.layer_split == "auto"
        return
    said = [line for line in mistakes(tree) if "parallelism.layer_split" in line]
    assert said
    split = json.loads(re.search(r"layer_split: (\[[\d, ]+\])", said[0])[1])  # with other sizes
    assert sum(split) == n_layers


@pytest.mark.parametrize(
    ("sizes", "layout", "split"),
    [
        ((32, 4096), {"pp": 3}, [11, 11, 10]), ((30, 4096), {"pp": 4}, [7, 8, 8, 7]),
        ((32, 4096), {"pp": 3, "vpp": 3}, [3, 3, 4, 4, 4, 4, 4, 3, 3]),
        ((32, 4096), {"pp": 2, "framework": "nanotron"}, [18, 14]),
        # layout_sweep: nanotron's first stages hold as many layers as their peaks say
        ((16, 2048), {"pp": 2, "framework": "nanotron"}, [10, 6]),
        ((16, 2048), {"pp": 4, "framework": "nanotron"}, [5, 5, 5, 1]),
        ((28, 3072), {"pp": 4, "framework": "nanotron"}, [8, 8, 8, 4]),
    ],
)  # fmt: skip
def test_uneven_splits_are_near_even_and_nanotrons_by_cost(here, shown, sizes, layout, split):
    ffn = {2048: 8192, 3072: 8192, 4096: 14336}[sizes[1]]
    model = {"n_layers": sizes[0], "hidden_size": sizes[1], "ffn_size": ffn, "n_heads": 32,
             "vocab_size": 131072, "seq_len": 4096}  # fmt: skip
    tree = {"model": model, "parallelism": layout | {"microbatches": 6},
            "cluster": {"nodes": 1, "gpus_per_node": layout["pp"]}}  # fmt: skip
    assert shown(write(here, json.dumps(tree)))[2]["layer_split"] == split


def test_splits_are_shown(here: Path, shown) -> None:
    job = write(here, GOOD)
    assert shown(job)[2]["layer_split"] == [8, 8, 8, 8]
    split = ("--set", "parallelism.layer_split=[7, 9, 9, 7]")
    assert shown(job, *split)[2]["layer_split"] == [7, 9, 9, 7]
    ends = ("--set", "model.n_layers=30")
    assert shown(job, *ends)[2]["layer_split"] == [7, 8, 8, 7]


# ------------------------------------------------------------------------- mistakes, one by one
@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("  tp: 2", "  tp: two", "3: parallelism.tp"),
        ("  tp: 2", '  tp: "2"', "3: parallelism.tp"),
        ("  tp: 2", "  tp: 2.5", "3: parallelism.tp"),
        ("  tp: 2", "  tp: true", "3: parallelism.tp"),
        ("  tp: 2", "  tp: [2]", "3: parallelism.tp"),
        ("  tp: 2", "  tp: 0", "3: parallelism.tp"),
        ("  tp: 2", "  tp: 2\n  overlap: yes", "4: parallelism.overlap"),
        ("  tp: 2", "  tp: 2\n  tp: 4", "4: parallelism.tp"),
        ("  tp: 2", "  tp: 2\n  tpp:", "4: parallelism.tpp"),
        ("microbatches", "microbatchs", "6: parallelism.microbatchs"),
        ("run:", "rum:", "12: rum"),
        ("run:", "rum:\nrun:", "12: rum"),
        ("steps:", "nodes:", "13: run.nodes"),
        ("cv: 0.02", "cv: -0.02", "11: variability.effects.residual.cv"),
        ("cv: 0.02", "cv: .nan", "11: variability.effects.residual.cv"),
        ("cv: 0.02", "law: lognrmal", "11: variability.effects.residual.law"),
        ("cv: 0.02", "law: gamma", "11: variability.effects.residual.law"),
        ("nodes: 2", "nodes: 3", "2: parallelism"),
        ("  nodes: 2", "  device: h100", "7: cluster.nodes"),
        ("llama3-8b", "llama3-9b", "1: model.name"),
        ("{name: llama3-8b}", "", "1: model"),
        ("{name: llama3-8b}", "{n_layers: 3}", "1: model.hidden_size"),
        ("{name: llama3-8b}", "text", "1: model"),
        ("  dp: 2", "  dp: 2\n  data_parallel: none", "6: parallelism.data_parallel"),
        ("steps: 10", "steps: 10\n  deadline: soon", "14: run.deadline"),
        ("steps: 10", "steps: 10\n  start: soon", "14: run.start"),
        ("steps: 10", "steps: 10\n  tokens: 3", "14: run.tokens"),
        ("steps: 10", "checkpoint: {intervall: }", "13: run.checkpoint.intervall"),
        ("nodes: 2", "nodes: 2\n  nodez: null", "9: cluster.nodez"),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {2: 1.1}", "9: cluster.node_slowdowns.2"),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {1: 0}", "9: cluster.node_slowdowns.1"),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {1: {netwrk: }}", "9: cluster.node_slowdowns.1"),
        ("nodes: 2", "nodes: 2\n  tiers: {rack:16}", "9: cluster.tiers.rack:16"),
        ("nodes: 2", "nodes: 2\n  device: v100", "9: variability.library"),
        ("nodes: 2", "nodes: 2\n  device: h101", "9: cluster.device"),
        ("nodes: 2", "nodes: 2\n  oversubscription: 7", "9: cluster.oversubscription"),
        ("nodes: 2", "nodes: 2\n  links: {nvlnk: {}}", "9: cluster.links.nvlnk"),
        ("nodes: 2", "nodes: 2\n  nvlink_domain_gpus: 12", "9: cluster.nvlink_domain_gpus"),
        ("residual: {cv: 0.02}", "rank: {memory_loading: 20}",
         "11: variability.effects.rank.memory_loading"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_place_and_a_way_out(here, old: str, new: str, place: str) -> None:
    lines = mistakes(write(here, GOOD.replace(old, new, 1)))
    assert any(line.startswith(f"job.yaml:{place}: ") for line in lines), lines
    assert all(";" in line or line.endswith("?") for line in lines)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallelism.tp=3", "parallelism.tp"), ("model.seq_len=8191", "model.seq_len"),
        ("model.n_heads=24", "model.hidden_size"),
        ("parallelism.vpp=10", "parallelism.layer_split"),
        ("parallelism.schedule=interleaved", "parallelism.schedule"),
        ("parallelism={vpp: 2, schedule: gpipe}", "parallelism.schedule"),
        ("parallelism={pp: 1, vpp: 2}", "parallelism.vpp"),
        ("parallelism={schedule: zb-h1, p2p: blocking}", "parallelism.p2p"),
        ("parallelism={schedule: zb-v, p2p: blocking}", "parallelism.p2p"),
        ("parallelism={vpp: 2, p2p: blocking}", "parallelism.p2p"),
        ("parallelism.data_parallel=zero2", "parallelism.data_parallel"),
        ("parallelism={vpp: 2, microbatches: 10}", "parallelism.microbatches"),
        ("parallelism.layer_split=[1, 2]", "parallelism.layer_split"),
        ("parallelism.layer_split=[8, 8, 8, 9]", "parallelism.layer_split"),
        ("parallelism.layer_split=[8, 8, 8, -1]", "parallelism.layer_split"),
        ("parallelism.layer_split=even", "parallelism.layer_split"),
        ("parallelism={microbatches: null, global_batch: 17}", "parallelism.global_batch"),
        ("parallelism={microbatches: null, global_batch: 1}", "parallelism.global_batch"),
        ("parallelism={microbatches: 4, global_batch: 16}", "parallelism.global_batch"),
        ("parallelism={microbatches: null, global_batch: many}", "parallelism.global_batch"),
        ("model.durations={forward_s: 0, backward_s: 0}", "model.durations"),
        ("model.durations={forward_s: [1, 2], backward_s: 1}", "model.durations.forward_s"),
        ("model.durations={forward_s: -1, backward_s: 1}", "model.durations.forward_s"),
        ("model.durations={forward_s: 1, backward_s: 1e300}", "model.durations.backward_s"),
        ("model.durations={forward_s: 1}", "model.durations.backward_s"),
        ("run.checkpoint={interval: 1e300}", "run.checkpoint.interval"),
        ("run.checkpoint={write_s: 3}", "run.checkpoint"),
        ("run.checkpoint={interval: 1h, interval_steps: 9}", "run.checkpoint.interval_steps"),
        ("run.checkpoint={interval: 1min, write_s: 60}", "run.checkpoint.interval"),
        ("run.checkpoint={interval: 30m}", "run.checkpoint.interval"),
        ("run.checkpoint={interval: 1h, mode: async, writes: 3}", "run.checkpoint.writes"),
        ("run.failures={per_1000_node_days: -1}", "run.failures.per_1000_node_days"),
        ("run.failures=off", "run.failures"), ("run.failures={spares: -1}", "run.failures.spares"),
        ("run.failures={restrat: 5min}", "run.failures.restrat"),
        ("run.failures={repair: 2d}", "run.failures.repair"),
        ("run.failures={causes: {gpu: {share: 0}}}", "run.failures.causes.gpu.share"),
        ("run.failures={causes: {gpu: {shar: 1}}}", "run.failures.causes.gpu.shar"),
        ("run.evaluation={interval_steps: 100}", "run.evaluation.duration"),
        ("run.slowdown_thresholds=[1.2, 1.1]", "run.slowdown_thresholds"),
        ("variability.ranks=measured", "variability.ranks"),
        ("variability={library: none, effects: {residual: {cv: null, scale: 2}}}",
         "variability.effects.residual.scale"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(here: Path, override: str, key: str) -> None:
    lines = mistakes(write(here, GOOD), override)
    assert any(f"{key}: " in line for line in lines), lines
    assert all(line.startswith((f"overrides {override[:40]}", "job.yaml:")) for line in lines)


@pytest.mark.parametrize(
    ("effects", "key"),
    [
        ({"jitter": {"cv": 1e300}}, "jitter.cv"), ({"step": {"cv": 2}}, "step.cv"),
        ({"residual": {"cv": 11}}, "residual.cv"), ({"call": {"cv": 1e6}}, "call.cv"),
        ({"stall": {"duration_cv": 20}}, "stall.duration_cv"),
        ({"rank": {"lemon_slowdown": [1.2, 1.1]}}, "rank.lemon_slowdown"),
        ({"fail_slow": {"factor": 2}}, "fail_slow.rate_per_1000_node_days"),
        ({"fail_slow": {"rate_per_1000_node_days": 1, "replace": True}}, "fail_slow.detection"),
        ({"fail_slow": {"rate_per_1000_node_days": 1, "detection": 9}}, "fail_slow.detection"),
        ({"step": {"diurnal_cv": 0.01, "diurnal_peak_h": 25}}, "step.diurnal_peak_h"),
        ({"residual": {"cv": 1, "scale": 2}}, "residual"), ({"rank": {"cvv": 1}}, "rank.cvv"),
    ],
)  # fmt: skip
def test_effects_that_cannot_be(here: Path, effects: dict[str, Any], key: str) -> None:
    with pytest.raises(prism.PrismError, match=re.escape(f"variability.effects.{key}")):
        load_job(write(here, GOOD), {"variability.effects": effects})


def test_all_mistakes_of_a_file_at_once_in_order(here: Path) -> None:
    text = """\
model: {name: llama3-405b, colour: red}
parallelism: {tp: 8, pp: 16, vpp: 9, dp: 128, ep: 2, overlap: 1}
cluster: {nodes: 2000, leaf_nodes: many}
variability: {ranks: measured, effects: {call: {cv: -1}}}
run: {steps: 3, tokens: 3, checkpoint: 3}
weather: fine
"""
    lines = mistakes(write(here, text))
    wanted = [
        ("1", "model.colour"), ("2", "parallelism.overlap"), ("2", "parallelism.microbatches"),
        ("2", "parallelism"), ("2", "parallelism.layer_split"), ("2", "parallelism.ep"),
        ("3", "cluster.leaf_nodes"), ("4", "variability.effects.call.cv"),
        ("4", "variability.ranks"), ("5", "run.tokens"), ("5", "run.checkpoint"), ("6", "weather"),
    ]  # fmt: skip
    found = [tuple(line.removeprefix("job.yaml:").split(": ")[:2]) for line in lines]
    assert sorted(found) == sorted(wanted)
    assert [n for n, _ in found] == sorted(n for n, _ in found)
    for old, new in (
        ("tp: 2", "tp: two"),
        ("microbatches:", "microbatchs:"),
        ("nodes: 2", "nodes: x"),
    ):
        assert len(mistakes(write(here, GOOD.replace(old, new)))) == 1  # nothing follows from it


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("parallelism.tensor_parallel=2", "tp"),
        ("parallelism.tensor_model_parallel_size=2", "tp"),
        ("parallelism.pipeline_parallel_degree=2", "pp"),
        ("parallelism.data-parallel-shard-degree=2", "shard_size"),
        ("parallelism.global_batch_size=512", "global_batch"),
        ("parallelism.train_micro_batch_size_per_gpu=1", "microbatch_size"),
        ("parallelism.gradient_accumulation_steps=1", "microbatches"),
        ("num_query_groups=8", "model.n_kv_heads"), ("model.num_layers=3", "n_layers"),
        ("model.intermediate_size=3", "ffn_size"), ("run.train_iters=3", "steps"),
        ("parallelism.data_parallel=zero3", "fsdp"), ("parallelism.data_parallel=ZeRO-3", "fsdp"),
        ("parallelism.data_parallel=FSDP2", "fsdp"), ("parallelism.data_parallel=zero", "zero1"),
        ("parallelism.recompute=attention", "none"),
        ("parallelism.schedule=ZBVZeroBubble", "zb-v"), ("parallelism.precision=fp16", "bf16"),
        ("parallelism.tpp=3", "tp"), ("paralelism.tp=3", "parallelism"), ("tp=3", "parallelism.tp"),
    ],
)  # fmt: skip
def test_a_word_of_others_gives_prism_s(here: Path, override: str, meant: str) -> None:
    (line,) = mistakes(write(here, GOOD), override)
    assert re.search(r"mean (\S+?)( \(.*\))?\?", line)[1] == meant


# --------------------------------------------------------------------------------- bad files
@pytest.mark.parametrize(
    ("name", "text"),
    [("steps.csv", "step,step_s\n1,2.0\n2,2.1\n"), ("trace.json", '{"traceEvents": []}')],
)
def test_a_recording_is_no_job_and_is_for_fit(here: Path, name: str, text: str) -> None:
    write(here, text, name)
    (here / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    for one in (name, f"{name}.gz"):
        assert f"prism fit {one} " in mistakes(one)[0]


def test_a_missing_file_lists_what_is_near(here: Path) -> None:
    write(here, GOOD, "mine.yaml")
    for wrong, near in (("mein.yaml", "mine.yaml"), ("llama-405b-16k", "llama3-405b-16k"),
                        ("llama3-70b", "llama3-70b-fsdp-512")):  # fmt: skip
        assert near in mistakes(wrong)[0]


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 5000, "no/such/folder/job.yaml"])
def test_what_is_no_file_name(here: Path, name: str) -> None:
    assert len(mistakes(name)) == 1


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "job.yaml: "), ("# nothing\n\n", "job.yaml: "), ("- a\n- b\n", "job.yaml:1: "),
        ("hello\n", "job.yaml:1: "), ("model: [1\nrun: 2\n", "job.yaml:2: "),
        ("model: 1\n\trun: 2\n", "job.yaml:2: "), ("model: 1\n---\nrun: 2\n", "job.yaml:2: "),
        ("model: *nothing\n", "job.yaml:1: "), ("model: \x07\n", "job.yaml: "),
        ("[\n" * 1000, "job.yaml: "), ("model: &m [*m]\n", "job.yaml"),
        ("model: !!python/object:os.system x\n", "job.yaml:1: model: "),
        ("? [x]\n: 1\n", "job.yaml:1: "),
    ],
)  # fmt: skip
def test_wrong_yaml(here: Path, text: str, place: str) -> None:
    assert mistakes(write(here, text))[0].startswith(place)


def test_aliases_cannot_multiply_without_end(here: Path) -> None:
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for new, old in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]")
    path = write(here, "\n".join(lines))
    assert mistakes(path) and least_seconds(lambda: mistakes(path)) < 0.5


def test_a_huge_or_binary_file_is_refused_before_it_is_read(here: Path) -> None:
    path = here / "job.yaml"
    with path.open("wb") as stream:
        stream.write(b"some: garbage [\n" * 1000)
        stream.truncate(100_000_000)
    assert len(mistakes(path)) == 1 and least_seconds(lambda: mistakes(path)) < 0.5
    for raw in (b"\xff\xfe\x00", b"model: \x00", bytes(range(256))):
        path.write_bytes(raw)
        assert mistakes(path)[0].startswith("job.yaml: ")


@given(st.text(max_size=60))
def test_garbage_never_ends_in_a_traceback(tmp_path_factory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    assert mistakes(path)


# ------------------------------------------------------------------------------ base and --set
def test_base_keeps_what_is_not_written(here: Path, shown) -> None:
    write(here, GOOD, "parent.yaml")
    write(here, "base: parent\nparallelism: {dp: 4}\ncluster: {nodes: 4}\n", "child.yaml")
    write(here, "base: child.yaml\nparallelism:\n  microbatches: 16\n", "grandchild.yaml")
    values, sources, found = shown("grandchild.yaml", "--set", "run.steps=7")
    assert (found["job"], found["world_size"], values["run.steps"]) == ("grandchild", 32, 7)
    places = {
        "parallelism.tp": "parent.yaml:3", "parallelism.dp": "child.yaml:2", "run.steps": "--set",
        "parallelism.microbatches": "grandchild.yaml:3", "model.n_layers": "preset",
        "parallelism.schedule": "default", "variability.effects.residual.cv": "parent.yaml:11",
    }  # fmt: skip
    assert {key: Path(sources[key]).name for key in places} == places


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ("run: {slowdown_thresholds: [1.5, 1.6]}", "run: {slowdown_thresholds: [1.2]}",
         {"run.slowdown_thresholds": (1.2,)}),
        ("parallelism: {layer_split: [7, 9, 9, 7]}", "parallelism: {layer_split: [8, 8, 8, 8]}",
         {"parallelism.layer_split": (8, 8, 8, 8)}),
        ("cluster: {node_slowdowns: {0: 1.5}}", "cluster: {node_slowdowns: {1: 1.2}}",
         {"cluster.node_slowdowns.0": 1.5, "cluster.node_slowdowns.1": 1.2}),
        ("run: {deadline: 2h, price_per_gpu_hour: 2}", "run: {deadline: }",
         {"run.deadline": None, "run.price_per_gpu_hour": 2.0, "run.steps": 10}),
        ("run: {price_per_gpu_hour: 2}", "run:", {"run.price_per_gpu_hour": None,
                                                  "run.steps": None}),
        ("variability: {library: h100-stressed}", "variability: {library: }",
         {"variability.library": None, "variability.effects.residual.cv": 0.02}),
        ("parallelism: {microbatches: 4}", "parallelism: {global_batch: 32}",
         {"parallelism.microbatches": 16}),
    ],
)  # fmt: skip
def test_blocks_merge_key_by_key_and_the_rest_is_replaced(here, below, above, expected) -> None:
    """In a file over its base, and in an override over a file."""
    write(here, GOOD)
    write(here, f"base: job\n{below}\n", "low.yaml")
    write(here, f"base: low\n{above}\n", "up.yaml")
    job = load_job("up.yaml")
    assert {key: value(job, key) for key in expected} == expected
    block, _, rest = above.partition(": {")
    if rest and "library" not in above:
        assert load_job("low.yaml", [f"{block}={{{rest}"]) == job.model_copy(update={"name": "low"})


def test_a_mistake_in_a_base_is_placed_there(here: Path) -> None:
    write(here, GOOD.replace("tp: 2", "tp: two"), "parent.yaml")
    lines = mistakes(write(here, "base: parent\nrun: {steps: -1}\n"))
    assert lines[0].startswith("job.yaml:2: run.steps: ")
    assert lines[1].startswith("parent.yaml:3: parallelism.tp: ")


def test_a_cycle_of_bases_and_a_bad_base(here: Path) -> None:
    for name, base in (("a", "c"), ("b", "a"), ("c", "b"), ("self", "self")):
        write(here, f"base: {base}\n", f"{name}.yaml")
    assert "(a -> c -> b -> a)" in mistakes("a.yaml")[0]
    assert "(self -> self)" in mistakes("self.yaml")[0]
    for base in ("nowhere", "3", "[a]", ""):
        assert mistakes(write(here, f"base: {base}\n"))[0].startswith("job.yaml:1: base: ")


def test_names_resolve_to_shipped_jobs_and_paths_win(here: Path) -> None:
    assert load_job("pipeline-8x32") == load_job("pipeline-8x32.yaml")
    write(here, "base: pipeline-8x32\nrun: {steps: 5}\n", "pipeline-8x32.yaml")
    assert load_job("pipeline-8x32.yaml").run.steps == 5  # over the shipped one of the same name
    assert load_job("pipeline-8x32").run.steps != 5
    (here / "sub").mkdir()
    (here / "sub" / "mine.nc").touch()
    text = GOOD.replace("variability:", "variability:\n  library: mine.nc")
    job = load_job(write(here / "sub", text))
    assert job.variability.library == str(here / "sub" / "mine.nc")  # beside the file that names it


RESIDUAL, POD = "variability.effects.residual", "cluster.tiers.pod"
LIBRARY = "variability.library"


@pytest.mark.parametrize(
    ("below", "above", "gone"),
    [
        ("run.checkpoint.interval_steps=500", "run.checkpoint.interval=1h",
         "run.checkpoint.interval_steps"),
        ("run.checkpoint.interval=1h", "run.checkpoint={interval_steps: 500}",
         "run.checkpoint.interval"),
        ("run.steps=5", "run.tokens=1e9", "run.steps"),
        (f"{RESIDUAL}={{cv: 0.1, law: gamma}}", f"{RESIDUAL}.scale=2", f"{RESIDUAL}.cv"),
        (f"{RESIDUAL}.scale=2", f"{RESIDUAL}.cv=0.1", f"{RESIDUAL}.scale"),
        (f"{POD}={{gpus: 32, oversubscription: 2}}", f"{POD}.bandwidth_gbytes_per_s=10",
         f"{POD}.oversubscription"),
        (f"{POD}={{gpus: 32, oversubscription: 2, latency_us: 20}}", f"{POD}.distance_km=1",
         f"{POD}.latency_us"),
    ],
)  # fmt: skip
def test_an_answer_to_the_same_question_replaces_the_one_below(here, below, above, gone) -> None:
    small = {"base": "llama3-70b-fsdp-512", "parallelism": {"dp": 128}, "cluster": {"nodes": 16}}
    job = load_job(small, [below])
    over = job.replace(above)
    assert value(job, gone) is not None and value(over, gone) is None
    assert over == load_job(small, [below, above])


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("parallelism.microbatches=16", "parallelism.microbatches", 16),
        ("parallelism.overlap=false", "parallelism.overlap", False),
        ("run.slowdown_thresholds=[1.1, 1.3]", "run.slowdown_thresholds", (1.1, 1.3)),
        ("run.deadline=2h", "run.deadline", 7200.0), ("run.steps=1e6", "run.steps", 1_000_000),
        ("run.steps=", "run.steps", None), ("variability.library=none", LIBRARY, None),
        ("variability.library=null", LIBRARY, None),
        ("variability.library=h100-stressed", "variability.library", "h100-stressed"),
        ("cluster.node_slowdowns.1=1.5", "cluster.node_slowdowns.1", 1.5),
        ("cluster.node_slowdowns={0: 2, 1: 1.5}", "cluster.node_slowdowns.0", 2.0),
    ],
)  # fmt: skip
def test_overrides_are_yaml_and_come_before_validation(here, override, key, expected) -> None:
    path = write(here, GOOD.replace("tp: 2", "tp: two"))  # which an override may repair
    assert value(load_job(path, [override, "parallelism.tp=2"]), key) == expected


def test_the_last_override_wins_in_whatever_form(here: Path) -> None:
    path = write(here, GOOD)
    job = load_job(path, ["parallelism.microbatches=4", "parallelism.microbatches=16"])
    assert job.parallelism.microbatches == 16
    for same in (
        load_job(path, "parallelism.microbatches=16"),
        load_job(path, {"parallelism.microbatches": 16}),
        load_job(path, {"parallelism": {"microbatches": 16}}),
        load_job(path).replace({"parallelism.microbatches": 4}, "parallelism.microbatches=16"),
        load_job(path).replace({"parallelism": {"microbatches": 16}}),
        load_job({"base": "job", "parallelism": {"microbatches": 16}}),
    ):
        assert same == job
    with pytest.raises(prism.PrismError, match="^overrides parallelism.tpp=3: parallelism.tpp: "):
        load_job(path, {"parallelism.tpp": 3})
    for wrong in ([3], {"": 3}, {"base": "x"}):
        with pytest.raises(prism.PrismError, match="^overrides "):
            load_job(path, wrong)
    for wrong in ({"modell": {}}, {"base": "job", "run": {"step": 3}}, {}, 42, None):
        with pytest.raises(prism.PrismError):
            load_job(wrong)


def test_microbatches_follow_a_global_batch_wherever_the_job_goes(here: Path) -> None:
    job = load_job(write(here, GOOD.replace("microbatches: 8", "global_batch: 16")))
    rebuilt = prism.Job.model_validate_json(job.model_dump_json())
    for one in (job, rebuilt):
        assert one.parallelism.microbatches == 8
        wider = one.replace("parallelism.dp=4", "cluster.nodes=4")
        assert (wider.parallelism.microbatches, wider.tokens_per_step) == (4, job.tokens_per_step)
        assert one.replace("parallelism.microbatches=2").parallelism.global_batch is None


@pytest.mark.parametrize(
    "override",
    ["parallelism.tp=abc", "parallelism.tp=[1", "parallelism.tp.x=1", "parallelism.tp", "=3",
     "parallelism..tp=3", "", "base=llama3-405b-8k", "parallelism.dp=4", "cluster.nodes=4",
     "variability.effects.step.cv=-0.1", "run.steps=" + "9" * 5000, "parallelism={dp:256}"],
)  # fmt: skip
def test_bad_overrides_are_placed_at_the_override(run, here: Path, override: str) -> None:
    status, out, err = run("show", write(here, GOOD), "--set", override, "--json")
    lines = err.splitlines()
    assert (status, out) == (2, "") and f"--set {override[:60]}" in lines[0]
    assert all(len(line) < 400 for line in lines)


def test_nodes_that_no_dp_fills_are_told_the_nearest_that_one_does(here: Path) -> None:
    (text,) = mistakes(write(here, GOOD), "parallelism.tp=4", "cluster.nodes=3")
    ways = re.findall(r"nodes: (\d+) (?:with parallelism\.|for )dp: (\d+)", text)
    assert ways == [("2", "1"), ("4", "2"), ("4", "2")]


@pytest.mark.parametrize("make", [load_job, lambda blocks: prism.Job(**blocks)])
def test_a_job_made_by_hand_is_checked_and_replaced_as_one_of_a_file(make) -> None:
    durations = {"durations": {"forward_s": 1, "backward_s": 2}}
    job = make({"model": durations, "parallelism": {"pp": 2, "microbatches": 4}})
    assert (job.cluster.nodes, job.n_nodes, job.world_size) == (None, 1, 2)
    other = job.replace({"run.steps": 3}).replace({"parallelism.microbatches": 8})
    assert (other.run.steps, other.parallelism.pp, other.parallelism.microbatches) == (3, 2, 8)
    named = {"name": "llama3-8b"}
    for blocks, key in (
        ({"modell": {}}, "modell"), ({"model": durations, "parallelism": {"tpp": 3}}, "tpp"),
        ({"model": named, "cluster": {"nodes": 3}}, "parallelism: "),
        ({"model": named, "cluster": {"nodes": 1}, "parallelism": {"dp": 4}}, "parallelism: "),
    ):  # fmt: skip
        with pytest.raises(prism.PrismError, match=key):
            make(blocks)


# ------------------------------------------------------------------------------- a job as a file
RICH = [
    "variability.effects.fail_slow={rate_per_1000_node_days: 1, duration: 90min}",
    "variability.effects.fail_slow.detection=10min", "variability.effects.fail_slow.replace=true",
    "variability.effects.rank.lemon_slowdown=[1.05, 1.2]", "run.deadline=3w",
    "cluster.node_slowdowns={3: 1.2, 17: {network: 1.5}}", "cluster.scale.compute.cv=0.5",
    "run.start=2026-01-05", "run.checkpoint={interval: 20min, mode: async}",
    "run.failures={restart: 601, spares: 3, causes: {gpu: {share: 1}}}",
    "run.evaluation={interval_steps: 100, duration: 2d}",
]  # fmt: skip


def names_of_jobs() -> list[str]:
    folder = Path(__file__).resolve().parents[1] / "experiments" / "jobs"
    return sorted(path.stem for path in folder.glob("*.yaml"))


@pytest.mark.parametrize("name", [*names_of_jobs(), "llama3-405b-16k+", "deepseek-v3-2048+"])
def test_a_job_written_out_as_yaml_is_the_same_job(here: Path, run, name: str) -> None:
    name, rich = name.rstrip("+"), RICH if name.endswith("+") else []
    job = load_job(name, rich)
    status, text, _ = run("show", name, *(x for one in rich for x in ("--set", one)), "--yaml")
    assert status == 0 and load_job(write(here, text, f"{name}.yaml")) == job
    for block in ("parallelism", "cluster", "run"):  # with every key that could be set
        assert all(f"{key}:" in text for key in getattr(job, block).model_dump())


def test_defaults_stand_as_comments_that_can_be_taken_away(here: Path, run) -> None:
    text = run("show", "llama3-70b-fsdp-512", "--yaml")[1]
    job = load_job(write(here, text.replace("  # prefetch: 1", "  prefetch: 2")))
    assert job.parallelism.prefetch == 2
    assert (
        "  steps: 7  # --set\n" in run("show", "pipeline-8x32", "--yaml", "--set", "run.steps=7")[1]
    )
    for words in (("pipeline-8x32", "--yaml", "--json"), ("--jobs", "--yaml"),
                  ("h100-healthy", "--yaml")):  # fmt: skip
        assert run("show", *words)[0] == 2


# ------------------------------------------------------------------------------------- warnings
TINY = {"name": "llama3.2-1b", "n_layers": 2}
GROUPS = {"model": TINY, "parallelism": {"tp": 8, "dp": 4}, "cluster": {"nodes": 4}}
HSDP = {"parallelism.data_parallel": "hsdp"}


@pytest.mark.parametrize(
    ("changes", "word", "warned"),
    [
        ({}, "memory", False), ({"parallelism.microbatch_size": 200}, "memory", True),
        ({"cluster.tiers": {"zone": {"gpus": 16, "distance_km": 1}}}, "zone", False),
        ({"cluster.tiers": {"zone": {"gpus": 32, "distance_km": 1}}}, "zone", True),
        ({"cluster": {"device": "gb200", "nodes": 8, "gpus_per_node": 4, "power_limit_w": 900}},
         "power_limit_w", True),
        ({"cluster.power_limit_w": 600}, "power_limit_w", False),
        ({"cluster": {"device": "gb200", "nodes": 8, "gpus_per_node": 4, "clock_mhz": 1500}},
         "clock_mhz", True),
        ({"cluster": {"device": "gb200", "nodes": 8, "gpus_per_node": 4}}, "power curve", False),
        ({"cluster.clock_mhz": 1200}, "clock_mhz", False),
        # one replica fills the NVLink domain: nothing is sharded, unless a size is given
        (HSDP, "hsdp", True), (HSDP | {"parallelism.shard_size": 4}, "hsdp", False),
    ],
)  # fmt: skip
def test_an_estimate_warns_of_what_is_perhaps_not_meant(changes, word, warned) -> None:
    found = prism.summary(prism.estimate(load_job(GROUPS, changes), replicates=64, seed=1))
    assert any(word in text for text in found["warnings"]) is warned


# ------------------------------------------------------------------- what a step is made with
FRAMEWORKS = {"megatron", "compiled", "eager", "nanotron", "transformers"}


@pytest.mark.parametrize("microbatches", [1, 16])  # of one, no other hides the gradients
@pytest.mark.parametrize(("mode", "taken"), [("zero1", "megatron"), ("fsdp", "compiled")])
def test_a_framework_that_is_not_named_is_set_against_the_others(
    mode: str, taken: str, microbatches: int
) -> None:
    layout = {"data_parallel": mode, "tp": 1, "dp": 32, "microbatches": microbatches}
    job = load_job(GROUPS, {"parallelism": layout})
    result = prism.estimate(job, replicates=64, seed=1)
    found = prism.summary(result)["framework"]
    assert found["name"] == taken and not found["named"]
    assert set(found["others"]) == FRAMEWORKS - {taken}
    assert found["others"]["eager"] > 1.01
    for name, said in found["others"].items():  # as the estimate of a job that names it
        other = job.replace({"parallelism": {"framework": name}})
        again = prism.estimate(other, replicates=64, seed=1)
        assert prism.summary(again)["framework"] == {"name": name, "named": True, "others": {}}
        assert said == pytest.approx(
            float(again.ideal_step_time / result.ideal_step_time), rel=1e-3
        )


def test_a_job_is_shown_with_what_its_step_is_made_with(shown, here) -> None:
    found = shown("gpt3-175b-512")[2]
    assert found["framework"]["name"] == "megatron" and not found["framework"]["named"]
    assert found["attention"] == {"backend": "cudnn", "named": False}
    assert found["parameters"]["total"] == pytest.approx(175e9, rel=0.01)
    own = shown("gpt3-175b-512", "--set", "parallelism.attention=fa2", "--set",
                "parallelism.framework=eager", "--set", "cluster.power_limit_w=400")[2]  # fmt: skip
    assert own["framework"]["named"] and own["framework"]["others"] == {}
    assert own["attention"] == {"backend": "fa2", "named": True}
    assert own["power"]["watts"] <= own["power"]["limit_w"] == 400.0
    assert own["power"]["gemm_speed"] < found["power"]["gemm_speed"]
    sizes = shown("deepseek-v3-2048")[2]["parameters"]
    assert sizes["total"] == pytest.approx(671e9, rel=0.005)
    assert sizes["active"] == pytest.approx(37.5e9, rel=0.01)
    assert not {"parameters", "framework", "power"} & set(shown("pipeline-8x32")[2])


def test_the_page_of_the_model_lists_the_frameworks(shown) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "model.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.M))
    assert rows.pop("framework") == "release" and set(rows) == FRAMEWORKS
    for name, release in rows.items():
        found = shown("gpt3-175b-512", "--set", f"parallelism.framework={name}")[2]
        assert found["framework"]["release"] == release


@pytest.mark.parametrize("share", [0.96, 0.99, 1.02, 1.05])
def test_a_job_that_more_probably_does_not_fit_is_warned_of(share: float) -> None:
    """The estimate's median is the limit, whatever its error."""
    machine = {"nodes": 1, "gpus_per_node": 1}
    job = load_job({"model": TINY, "parallelism": {"microbatches": 1}, "cluster": machine})
    memory = prism.summary(prism.estimate(job, replicates=64, seed=1))["memory"]
    lasting = ("parameters", "gradients", "optimizer", "gathered", "reserve")
    part = memory["gib"] - sum(memory["parts"][name] for name in lasting)
    wanted = share * memory["limit_gib"] - memory["gib"] + part
    larger = job.replace({"parallelism.microbatch_size": round(wanted / part)})
    found = prism.summary(prism.estimate(larger, replicates=64, seed=1))
    fits = found["memory"]["p_fits"] >= 0.5
    assert fits is (found["memory"]["gib"] <= found["memory"]["limit_gib"])
    assert any(text.startswith("memory") for text in found["warnings"]) is not fits
