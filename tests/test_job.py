"""The job file layer: what loads, what each value's place is, and what every mistake says."""

import gzip
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_seconds

from prism import Job, PrismError, load_job
from prism.common.errors import as_typed
from prism.jobs.job import flatten, job_from_dict, layer_split, provenance
from prism.jobs.jobspec import othernames
from prism.jobs.jobspec.blocks import BLOCKS, UNMODELLED
from prism.jobs.jobspec.layers import resolve_path
from prism.jobs.jobspec.values import parse_duration
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.jobs.layersplit import auto_split, valid_split

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


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def mistakes(path: Path | str, *overrides: str) -> list[str]:
    with as_typed(), pytest.raises(PrismError) as caught:
        load_job(path, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------- what loads, defaults
def test_a_good_job_has_its_values_and_the_documented_defaults(here: Path) -> None:
    job = load_job(write(here, GOOD))
    assert (job.name, job.world_size, job.n_nodes, job.n_steps) == ("job", 16, 2, 10)
    assert job.tokens_per_step == 2 * 8 * 8192
    p, c, v, r = job.parallelism, job.cluster, job.variability, job.run
    assert (p.data_parallel, p.schedule, p.p2p, p.reshard_after_forward) == (
        *("ddp", "1f1b", "async"),
        False,
    )
    assert (p.microbatch_size, p.sequence_parallel, p.recompute, p.overlap) == (
        *(1, True, "none"),
        True,
    )
    assert (p.prefetch, p.bucket_layers, p.layer_split, p.precision) == (1, 4, "auto", "bf16")
    assert (c.gpus_per_node, c.device, c.nvlink_domain_gpus, c.max_slowdown) == (8, "h100", 8, None)
    assert (c.pod_gpus, c.oversubscription, c.leaf_nodes, c.links.network) == (None, 1.0, 16, None)
    assert (v.library, v.dependence, v.ranks, v.resolution) == (
        *("h100-healthy", "full", "drawn"),
        "op",
    )
    assert v.effects.residual is not None and v.effects.residual.cv == 0.02
    assert v.effects.rank is None
    assert (r.probability, r.slowdown_thresholds, r.deadline) == (0.9, (1.05, 1.1, 1.2), None)


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["parallelism.dp=1", "cluster.nodes=1"], "data_parallel", "none"),
        (["parallelism.vpp=2"], "schedule", "interleaved"),
        (["parallelism.pp=1", "cluster.nodes=1", "cluster.gpus_per_node=4"], "microbatches", 8),
        (
            ["parallelism.pp=1", "cluster.nodes=1", "cluster.gpus_per_node=4"],
            *("reshard_after_forward", True),
        ),
        (
            ["parallelism={pp: 1, microbatches: null}", "cluster={nodes: 1, gpus_per_node: 4}"],
            *("microbatches", 1),
        ),
        (["parallelism.global_batch=48"], "microbatches", 24),
        (["parallelism.global_batch=48", "parallelism.microbatch_size=3"], "microbatches", 8),
        (["parallelism.global_batch=48", "parallelism.microbatches=12"], "global_batch", None),
    ],
)
def test_defaults_that_follow_from_other_keys(
    here: Path, overrides: list[str], key: str, expected: object
) -> None:
    assert getattr(load_job(write(here, GOOD), overrides).parallelism, key) == expected


def test_gb200_has_its_own_library_and_a_rack_wide_nvlink_domain(here: Path) -> None:
    job = load_job(write(here, GOOD), ["cluster.device=gb200"])
    assert job.variability.library == "gb200-healthy"
    assert job.cluster.nvlink_domain_gpus == 72
    for nodes, expected in ((18, 72), (36, 72), (32, 64), (128, 64), (20, 64), (16, 72)):
        keys = [f"cluster={{device: gb200, nodes: {nodes}, gpus_per_node: 4}}"]
        keys += [f"parallelism.dp={nodes // 2}"]
        assert load_job(write(here, GOOD), keys).cluster.nvlink_domain_gpus == expected


def test_sizes_can_be_given_without_a_name_and_a_named_size_can_be_overridden(here: Path) -> None:
    sizes = "{n_layers: 4, hidden_size: 512, ffn_size: 1024, n_heads: 8, vocab_size: 1000, "
    text = GOOD.replace("{name: llama3-8b}", sizes + "seq_len: 128}")
    job = load_job(write(here, text))
    assert (job.model.n_kv_heads, job.model.gated_mlp, job.model.tied_embeddings) == (
        8,
        True,
        False,
    )
    job = load_job(write(here, GOOD), ["model.seq_len=131072"])
    assert (job.model.seq_len, job.model.n_layers) == (131072, 32)


def test_durations_need_no_device_and_no_nodes(here: Path) -> None:
    text = """\
model: {durations: {forward_s: [1, 2.5], backward_s: 3}}
parallelism: {pp: 2, microbatches: 4}
variability: {library: none}
"""
    job = load_job(write(here, text))
    assert job.model.durations is not None
    assert (job.model.durations.forward_s, job.model.durations.backward_s) == ((1.0, 2.5), 3.0)
    assert (job.cluster.nodes, job.n_nodes, job.world_size) == (None, 1, 2)
    assert job.variability.library is None
    assert layer_split(job) == [1, 1]


def test_yaml_is_version_1_2(here: Path) -> None:
    text = GOOD.replace("cv: 0.02", "cv: 1e-3").replace("steps: 10", "steps: 1e3")
    job = load_job(write(here, text.replace("tp: 2", "tp: 0x2")))
    assert job.variability.effects.residual is not None
    assert (job.variability.effects.residual.cv, job.run.steps, job.parallelism.tp) == (
        1e-3,
        1000,
        2,
    )


def test_a_byte_order_mark_crlf_and_a_pipe_are_fine(here: Path) -> None:
    path = here / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_job(path) == load_job(str(path))


def test_a_job_does_not_change_and_can_be_rebuilt(here: Path) -> None:
    job = load_job(write(here, GOOD), ["run.start=2026-01-31", "cluster.node_slowdowns={1: 1.2}"])
    with pytest.raises(ValueError, match="frozen"):
        job.name = "other"  # type: ignore[misc]
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert Job.model_validate(job.model_dump()) == job
    assert hash(Job.model_validate(job.model_dump())) == hash(job)
    assert job != load_job("job.yaml")
    assert job.cluster.node_slowdowns == {1: 1.2}


def test_a_mapping_gets_the_same_checks() -> None:
    blocks = {"model": {"name": "llama3-8b"}, "cluster": {"nodes": 1}, "parallelism": {"dp": 8}}
    assert job_from_dict(blocks, "mine").world_size == 8
    with pytest.raises(
        PrismError, match=r"^mine: parallelism: tp\*cp\*pp\*dp = 1\*1\*1\*4 = 4, but"
    ):
        job_from_dict({**blocks, "parallelism": {"dp": 4}}, "mine")
    with pytest.raises(PrismError, match="GPUs"):
        Job.model_validate({**blocks, "parallelism": {"dp": 4}})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60d", 60 * 86400.0), ("12h", 43200.0), ("1.5min", 90.0), ("3600", 3600.0), (7, 7.0)],
)
def test_lengths_of_time(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "60x", "-3d", "d", 0, True, None, "inf", "nan", "1.2.3h"])
def test_what_is_no_length_of_time(text: object) -> None:
    with pytest.raises(ValueError, match="length of time"):
        parse_duration(text)


def test_tokens_become_steps(here: Path) -> None:
    job = load_job(write(here, GOOD), ["run.tokens=1e6"])
    assert job.run.steps is None  # the override answers the same question, so it replaces steps
    assert job.n_steps == 8  # 131,072 tokens a step


# -------------------------------------------------------------------------------- layer splits
@given(st.integers(1, 200), st.integers(1, 128))
def test_splits_add_up_and_are_even(n_layers: int, n_chunks: int) -> None:
    split = auto_split(n_layers, n_chunks)
    for found in (split, valid_split(n_layers, n_chunks)):
        if found is not None:
            assert len(found) == n_chunks and sum(found) == n_layers
            assert max(found) - min(found) <= 1 and min(found) >= 0
    even = n_layers % n_chunks == 0 or (n_chunks > 1 and (n_layers + 2) % n_chunks == 0)
    assert (split is not None) == even


def test_an_explicit_split_is_kept(here: Path) -> None:
    job = load_job(write(here, GOOD), ["parallelism.layer_split=[7, 9, 9, 7]"])
    assert layer_split(job) == [7, 9, 9, 7]
    assert layer_split(load_job("job.yaml")) == [8, 8, 8, 8]


def test_the_split_of_an_impossible_layout_is_valid_when_pasted_back(here: Path) -> None:
    path = write(here, GOOD.replace("pp: 4", "pp: 5").replace("nodes: 2", "gpus_per_node: 10"))
    path.write_text(path.read_text().replace("gpus_per_node: 10", "{nodes: 2, gpus_per_node: 10}"))
    path.write_text(path.read_text().replace("cluster:\n  {", "cluster: {"))
    (line,) = mistakes(path)
    assert line.startswith("job.yaml:4: parallelism.layer_split: 32 layers ")
    split = line.split("a valid layer_split: ")[1]
    assert layer_split(load_job(path, [f"parallelism.layer_split={split}"])) == [6, 7, 7, 6, 6]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("[1, 2]", " 2 counts, .*= 4 chunks; .*valid"),
        ("[8, 8, 8, 9]", r" 33, .*n_layers = 32; .*layer_split: \[8, 8, 8, 8\]"),
        ("[8, 8, 8, -1]", "auto .*-1"),
        ("even", "auto .*'even'"),
    ],
)
def test_bad_splits(here: Path, split: str, words: str) -> None:
    (line,) = mistakes(write(here, GOOD), f"parallelism.layer_split={split}")
    assert re.search(words, line), line


def test_more_chunks_than_layers_says_what_fits(here: Path) -> None:
    (line,) = mistakes(write(here, GOOD), "parallelism.vpp=10")
    assert re.search("32 layers .*= 40 chunks; .*pp: 4 .*vpp: 8", line), line


def test_measured_ranks_need_a_model(here: Path) -> None:
    (line,) = mistakes(write(here, GOOD), "variability.ranks=measured")
    assert re.search("measured .*variability.model: .*drawn", line), line


# ------------------------------------------------------------------------- mistakes, one by one
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  tp: 2", "  tp: two", "3: parallelism.tp: .*'two'; "),
        ("  tp: 2", '  tp: "2"', "3: parallelism.tp: .*'2'; "),
        ("  tp: 2", "  tp: 2.5", "3: parallelism.tp: .*2.5; "),
        ("  tp: 2", "  tp: true", "3: parallelism.tp: .*True; "),
        ("  tp: 2", "  tp: [2]", r"3: parallelism.tp: .*\[2\]; "),
        ("  tp: 2", "  tp: 0", "3: parallelism.tp: .* 1, .* 0; "),
        ("  tp: 2", "  tp: 2\n  overlap: yes", "4: parallelism.overlap: .*true or false"),
        ("  tp: 2", "  tp: 2\n  tp: 4", "4: parallelism.tp: .*twice, .*job.yaml:3"),
        ("microbatches", "microbatchs", "6: parallelism.microbatchs: .* mean microbatches"),
        ("run:", "rum:", r"12: rum: .* mean run\b"),
        ("steps:", "nodes:", "13: run.nodes: .* cluster.nodes"),
        ("steps:", "qqqqqq:", "13: run.qqqqqq: .* steps, tokens, "),
        ("cv: 0.02", "cv: -0.02", "11: variability.effects.residual.cv: .* 0, .*-0.02"),
        ("cv: 0.02", "cv: .nan", "11: variability.effects.residual.cv: .*nan"),
        ("cv: 0.02", "law: lognrmal", "11: variability.effects.residual.law: .*lognormal or"),
        ("cv: 0.02", "law: gamma", "11: variability.effects.residual.law: gamma .*spread; "),
        ("nodes: 2", "nodes: 3", "2: parallelism: .*= 16, .* 24 GPUs"),
        ("  nodes: 2", "  device: h100", "7: cluster.nodes: missing"),
        ("llama3-8b", "llama3-9b", "1: model.name: .*llama3-8b"),
        ("{name: llama3-8b}", "", "1: model: .*; .* name"),
        ("{name: llama3-8b}", "{n_layers: 3}", "1: model.hidden_size: .*missing"),
        ("{name: llama3-8b}", "text", "1: model: .*block .*'text'"),
        ("  dp: 2", "  dp: 2\n  data_parallel: none", "6: parallelism.data_parallel: none, .*dp"),
        ("steps: 10", "steps: 10\n  deadline: soon", "14: run.deadline: .*'soon'.* 60d"),
        ("steps: 10", "steps: 10\n  start: soon", "14: run.start: .*date.* 'soon'"),
        ("steps: 10", "steps: 10\n  tokens: 3", "14: run.tokens: .*steps"),
        (
            "nodes: 2",
            "nodes: 2\n  node_slowdowns: {2: 1.1}",
            "9: cluster.node_slowdowns.2: no node",
        ),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {1: 0}", "9: cluster.node_slowdowns.1: .* 0"),
        ("nodes: 2", "nodes: 2\n  device: v100", "9: variability.library: .*v100"),
        ("nodes: 2", "nodes: 2\n  device: h101", "9: cluster.device: .*v100 or a100"),
        ("nodes: 2", "nodes: 2\n  oversubscription: 7", "9: cluster.oversubscription: 7 "),
        ("residual: {cv: 0.02}", "rank: {memory_loading: 20}", "11: variability.effects.rank."),
        ("nodes: 2", "nodes: 2\n  links: {nvlnk: {}}", "9: cluster.links.nvlnk: .* nvlink"),
        ("nodes: 2", "nodes: 2\n  nvlink_domain_gpus: 12", "9: cluster.nvlink_domain_gpus: 12 and"),
    ],
)
def test_each_mistake_says_where_what_and_a_way_out(
    here: Path, old: str, new: str, expected: str
) -> None:
    lines = mistakes(write(here, GOOD.replace(old, new, 1)))
    assert any(re.match(f"job.yaml:{expected}", line) for line in lines), lines
    assert all(";" in line for line in lines)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("parallelism={schedule: zb-h1, p2p: blocking}", "setting: async"),
        ("parallelism={schedule: zb-v, p2p: blocking}", "setting: async"),
        ("parallelism.data_parallel=zero2", "setting: zero1"),
        ("parallelism={vpp: 2, p2p: blocking}", "setting: async"),
        ("parallelism={vpp: 2, microbatches: 10}", "supported: 8 or 12"),
    ],
)
def test_legal_but_not_modelled_names_the_nearest_setting(
    here: Path, override: str, nearest: str
) -> None:
    (line,) = mistakes(write(here, GOOD), override)
    assert line.startswith(f"--set {override}: ")
    assert "not modelled yet" in line and nearest in line


def test_microbatches_follow_a_global_batch_wherever_the_job_goes(here: Path) -> None:
    job = load_job(write(here, GOOD.replace("microbatches: 8", "global_batch: 16")))
    wider = ("parallelism.dp=4", "cluster.nodes=4")
    rebuilt = job_from_dict(job.model_dump(mode="json", exclude={"name", "source"}))
    assert rebuilt.parallelism == job.parallelism
    for one in (job, rebuilt):
        assert one.parallelism.microbatches == 8
        assert one.replace(*wider).parallelism.microbatches == 4
        assert one.replace("parallelism.microbatches=2").parallelism.global_batch is None
    both = GOOD.replace("microbatches: 8", "microbatches: 8\n  global_batch: 16")
    assert load_job(write(here, both)).parallelism.microbatches == 8


@pytest.mark.parametrize(
    ("batch", "also", "words"),
    [
        ("17", "", ("17", "dp * microbatch_size = 2 * 1 = 2", "16 or 18")),
        ("1", "", ("nearest: 2",)),
        ("16", "microbatches: 4, ", ("2 * 4 * 1 = 8", "drop one")),
        ("many", "", ("got 'many'",)),
        ("0", "", ("at least 1",)),
        ("12", "vpp: 2, ", ("interleaved with 6 microbatches",)),
    ],
)
def test_a_global_batch_that_does_not_fit(
    here: Path, batch: str, also: str, words: tuple[str, ...]
) -> None:
    layout = f"parallelism: {{tp: 2, pp: 4, dp: 2, {also}global_batch: {batch}}}"
    text = f"model: {{name: llama3-8b}}\n{layout}\ncluster: {{nodes: 2}}\n"
    (line,) = mistakes(write(here, text))
    assert line.startswith("job.yaml:2: parallelism.")
    assert all(word in line for word in words)


def test_context_parallelism_has_op_resolution_only(here: Path) -> None:
    overrides = ("variability.resolution=kernel", "parallelism.cp=2", "cluster.nodes=4")
    (line,) = mistakes(write(here, GOOD), *overrides)
    assert "kernel" in line and "cp = 2" in line and "setting: op" in line
    assert load_job("job.yaml", overrides[:1]).variability.resolution == "kernel"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallelism.tp=3", "tp: 3 .*n_heads = 32, ffn_size = 14336"),
        ("model.seq_len=8191", "seq_len: 8191 .*tp = 2 .*cp = 1; .*multiple of 2"),
        ("model.n_heads=24", "4096 .*n_heads = 24"),
        ("parallelism.schedule=interleaved", "interleaved .*vpp > 1"),
        ("parallelism={vpp: 2, schedule: gpipe}", "gpipe .*one chunk .*vpp = 2"),
        ("parallelism={pp: 1, vpp: 2}", "2 chunks .*pp = 1"),
        ("model.durations={forward_s: 0, backward_s: 0}", "are all 0"),
        ("model.durations={forward_s: [1, 2], backward_s: 1}", "forward_s: .*2 durations, "),
        ("model.durations={forward_s: -1, backward_s: 1}", r"forward_s: .*1e\+15, .*-1"),
        ("model.durations={forward_s: 1, backward_s: 1e300}", r"backward_s: .*1e\+15, .*1e\+300"),
        ("run.checkpoint={interval: 1e300}", r"interval: .*1e\+300"),
        ("variability.effects.jitter.cv=1e300", r"jitter.cv: .*1e\+15, .*1e\+300"),
        ("variability.effects.step.cv=2", "step.cv: .* 1, got 2; .* 0.02"),
        ("model.durations={forward_s: 1}", "backward_s: .*missing"),
        ("variability.effects.rank.lemon_slowdown=[1.2, 1.1]", "runs downwards"),
        ("run.checkpoint={write_s: 3}", "checkpoint: .* interval: 30min"),
        ("run.checkpoint={interval: 1h, interval_steps: 9}", "interval_steps: .*beside interval;"),
        ("run.checkpoint={interval: 1min, write_s: 60}", "write_s: .*60 s; "),
        ("run.checkpoint={interval: 30m}", "interval: .*'30m'.* 60d"),
        ("run.checkpoint={interval: 1h, mode: async, writes: 3}", "mean write_s"),
        ("run.failures={per_1000_node_days: -1}", "per_1000_node_days: .* 0, .*-1"),
        ("run.failures=off", "run.failures: .*none, .*'off'"),
        ("run.failures={restrat: 5min}", "restrat: .* mean restart"),
        ("run.failures={spares: -1}", "spares: .* 0, .*-1"),
        ("run.failures={repair: 2d}", "repair: .*no effect .*; .*spares"),
        ("run.failures={causes: {gpu: {share: 0}}}", "share: .* 0, .* 0"),
        ("run.failures={causes: {gpu: {shar: 1}}}", "shar: .* mean share"),
        ("run.evaluation={interval_steps: 100}", "run.evaluation.duration: .*missing"),
        ("variability.effects.fail_slow={factor: 2}", "rate_per_1000_node_days: .*episodes"),
        (
            "variability.effects.fail_slow={rate_per_1000_node_days: 1, replace: true}",
            "detection: .*missing.*; .* 10min",
        ),
        (
            "variability.effects.fail_slow={rate_per_1000_node_days: 1, detection: 9min}",
            "detection: .*no effect.*; .*replace: true",
        ),
        (
            "variability.effects.step={diurnal_cv: 0.01, diurnal_peak_h: 25}",
            "diurnal_peak_h: .* 24, .* 25",
        ),
        ("variability.effects.residual={cv: 1, scale: 2}", "residual.*scale.*; keep one"),
        ("variability={library: none, effects: {residual: {cv: null, scale: 2}}}", "no library"),
        ("run.slowdown_thresholds=[1.2, 1.1]", "slowdown_thresholds: .*rising"),
    ],
)
def test_what_does_not_fit_together(here: Path, override: str, words: str) -> None:
    lines = mistakes(write(here, GOOD), override)
    assert any(re.search(words, line) for line in lines), lines


def test_all_mistakes_of_a_file_at_once_in_order(here: Path) -> None:
    text = """\
model: {name: llama3-405b, colour: red}
parallelism: {tp: 8, pp: 16, vpp: 3, dp: 128, ep: 2, overlap: 1}
cluster: {nodes: 2000, leaf_nodes: many}
variability: {ranks: measured, effects: {call: {cv: -1}}}
run: {steps: 3, tokens: 3, checkpoint: 3}
weather: fine
"""
    lines = mistakes(write(here, text))
    wanted = [
        ("1", "model.colour"),
        ("2", "parallelism.overlap"),
        ("2", "parallelism.microbatches"),
        ("2", "parallelism"),
        ("2", "parallelism.layer_split"),
        ("2", "parallelism.ep"),
        ("3", "cluster.leaf_nodes"),
        ("4", "variability.effects.call.cv"),
        ("4", "variability.ranks"),
        ("5", "run.tokens"),
        ("5", "run.checkpoint"),
        ("6", "weather"),
    ]
    found = [tuple(line.removeprefix("job.yaml:").split(": ")[:2]) for line in lines]
    assert sorted(found) == sorted(wanted)
    assert [n for n, _ in found] == sorted(n for n, _ in found)


def test_nothing_is_concluded_from_a_bad_value(here: Path) -> None:
    assert len(mistakes(write(here, GOOD.replace("tp: 2", "tp: two")))) == 1
    assert len(mistakes(write(here, GOOD.replace("microbatches:", "microbatchs:")))) == 1
    assert len(mistakes(write(here, GOOD.replace("nodes: 2", "nodes: x")))) == 1


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("  tp: 2", "  tp: 2\n  tpp:", ["parallelism.tpp"]),
        ("nodes: 2", "nodes: 2\n  nodez: null", ["cluster.nodez"]),
        ("nodes: 2", "nodes: 2\n  links: {network: {bandwith: }}", ["cluster.links.network"]),
        ("residual: {cv: 0.02}", "step: {cv:0.02}", ["variability.effects.step.cv:0.02"]),
        ("steps: 10", "checkpoint: {intervall: }", ["run.checkpoint.intervall"]),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {1:1.5}", ["cluster.node_slowdowns.1:1.5"]),
        ("nodes: 2", "nodes: 2\n  node_slowdowns: {1: {netwrk: }}", ["netwrk"]),
        ("nodes: 2", "nodes: 2\n  tiers: {rack:16}", ["cluster.tiers.rack:16"]),
        ("run:", "rum:\nrun:", ["rum"]),
    ],
)
def test_an_unknown_key_is_an_error_without_a_value_too(
    here: Path, old: str, new: str, keys: list[str]
) -> None:
    lines = mistakes(write(here, GOOD.replace(old, new, 1)))
    assert all(any(key in line for line in lines) for key in keys), lines


def test_a_missing_space_is_told(here: Path) -> None:
    (line,) = mistakes(write(here, GOOD), "parallelism={dp:256}")
    assert "`dp: 256`" in line
    (line,) = mistakes(write(here, "base: pipeline-8x32\nparallelism: {pp:4}\n"))
    assert line.startswith("job.yaml:2: ") and "`pp: 4`" in line


def test_a_known_key_without_a_value_has_its_default_whatever_the_base_says(here: Path) -> None:
    write(here, GOOD.replace("steps: 10", "steps: 10\n  deadline: 2h\n  price_per_gpu_hour: 2"))
    upper = "base: job\nrun: {deadline: }\nvariability: {library: , effects: {residual: null}}\n"
    job = load_job(write(here, upper, "upper.yaml"))
    assert (job.run.deadline, job.run.price_per_gpu_hour, job.run.steps) == (None, 2, 10)
    assert (job.variability.library, job.variability.effects.residual) == (None, None)
    job = load_job(write(here, "base: job\nrun:\n", "block.yaml"))
    assert (job.run.price_per_gpu_hour, job.run.steps) == (None, None)
    dumped = load_job("pipeline-8x32").model_dump(mode="json", exclude={"name", "source"})
    assert dumped["variability"]["library"] is None  # none, and none again when it is read
    assert job_from_dict(dumped).variability.library is None


# ------------------------------------------------------------------- other frameworks' names
def test_every_other_name_stands_for_a_key_of_a_job() -> None:
    named = [name for names in othernames.KEYS.values() for name in names]
    assert len(named) == len({othernames.plain(name) for name in named})
    for key, names in othernames.KEYS.items():
        block, last = key.split(".")
        assert last in BLOCKS[block].model_fields
        assert all(othernames.key_of(name) == key for name in names)
        own = {field for kind in BLOCKS.values() for field in kind.model_fields}
        assert not own & set(names)
    assert {othernames.plain(name) for name in othernames.NOTES} <= set(othernames._KEY_OF)
    for key, values in othernames.VALUES.items():
        legal = get_args(BLOCKS["parallelism"].model_fields[key].annotation)
        assert set(values) <= set(legal) - set(UNMODELLED.get(key, {}))
        words = [othernames.plain(word) for words in values.values() for word in words]
        assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("parallelism.tensor_parallel=2", "tp"),
        ("parallelism.tensor_model_parallel_size=2", "tp"),
        ("parallelism.pipeline_parallel_degree=2", "pp"),
        ("parallelism.data-parallel-shard-degree=2", "shard_size"),
        ("parallelism.global_batch_size=512", "global_batch"),
        ("parallelism.train_micro_batch_size_per_gpu=1", "microbatch_size"),
        ("num_query_groups=8", "model.n_kv_heads"),
        ("model.num_layers=3", "n_layers"),
        ("run.train_iters=3", "steps"),
        ("parallelism.data_parallel=zero3", "fsdp"),
        ("parallelism.data_parallel=ZeRO-3", "fsdp"),
        ("parallelism.data_parallel=FSDP2", "fsdp"),
        ("parallelism.data_parallel=zero", "zero1"),
        ("parallelism.recompute=attention", "none"),
        ("parallelism.schedule=ZBVZeroBubble", "zb-v"),
        ("parallelism.precision=fp16", "bf16"),
    ],
)
def test_another_framework_s_word_gives_prism_s(here: Path, override: str, meant: str) -> None:
    (line,) = mistakes(write(here, GOOD), override)
    assert re.search(r"mean (\S+?)( \(.*\))?\?$", line)[1] == meant


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps.csv", "step,step_s\n1,2.0\n2,2.1\n"),
        ("trace.json", '{"traceEvents": []}'),
    ],
)
def test_a_recording_is_no_job_and_is_for_fit(here: Path, name: str, text: str) -> None:
    write(here, text, name)
    (here / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert f"prism fit {name} " in mistakes(name)[0]
    assert f"prism fit {name}.gz " in mistakes(f"{name}.gz")[0]


# --------------------------------------------------------------------------------- bad files
def test_a_missing_file_lists_what_is_near(here: Path) -> None:
    write(here, GOOD, "mine.yaml")
    assert "mean mine.yaml" in mistakes("mein.yaml")[0]
    (line,) = mistakes("llama-405b-16k")
    assert re.match("llama-405b-16k: .* mean llama3-405b-16k", line)
    (line,) = mistakes("llama3-70b")
    assert re.search("mean (\\S+)", line)[1] == "llama3-70b-fsdp-512"
    assert all(name in mistakes("zzzzzzzz")[0] for name in shipped_jobs())


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 5000, "no/such/folder/job.yaml"])
def test_what_is_no_file_name(here: Path, name: str) -> None:
    assert len(mistakes(name)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.yaml: .*empty.* `base: NAME`"),
        ("# nothing\n\n", "job.yaml: .*empty"),
        ("- a\n- b\n", "job.yaml:1: .*list.*blocks"),
        ("hello\n", "job.yaml:1: .*text"),
        ("model: [1\nrun: 2\n", "job.yaml:2: .*YAML"),
        ("model: 1\n\trun: 2\n", "job.yaml:2: .*YAML"),
        ("model: 1\n---\nrun: 2\n", "job.yaml:2: .*YAML"),
        ("model: *nothing\n", "job.yaml:1: .*YAML"),
        ("model: \x07\n", "job.yaml: .*YAML"),
        ("[\n" * 1000, r"job.yaml: .*YAML \(RecursionError\)"),
        ("model: &m [*m]\n", "alias"),
        ("model: !!python/object:os.system x\n", "job.yaml:1: model: tag"),
        ("? [x]\n: 1\n", "job.yaml:1: .*key"),
    ],
)
def test_wrong_yaml(here: Path, text: str, words: str) -> None:
    assert re.search(words, mistakes(write(here, text))[0])


def test_aliases_cannot_multiply_without_end(here: Path) -> None:
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for new, old in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]")
    assert "alias" in mistakes(write(here, "\n".join(lines)))[0]


@pytest.mark.parametrize("unit", [b"\x00\xff\x17random", b"some: garbage [\n"])
def test_a_huge_file_is_refused_before_it_is_read(here: Path, unit: bytes) -> None:
    path = here / "job.yaml"
    with path.open("wb") as stream:
        stream.write(unit * 1000)
        stream.truncate(100_000_000)
    (line,) = mistakes(path)
    assert re.search("job.yaml: .*1 MiB.*; .*YAML", line)
    assert least_seconds(lambda: mistakes(path)) < 0.5


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"model: \x00", bytes(range(256))])
def test_a_binary_file_is_refused(here: Path, raw: bytes) -> None:
    path = here / "result.nc"
    path.write_bytes(raw)
    assert re.search("result.nc: .*UTF-8 .*YAML", mistakes(path)[0])


@given(st.text(max_size=60))
def test_garbage_never_ends_in_a_traceback(text: str) -> None:
    from prism.jobs.jobspec.yaml import parse_yaml

    try:
        layer = parse_yaml(text, "job.yaml")
    except PrismError:
        return
    with pytest.raises(PrismError):
        job_from_dict(layer.values)


# ------------------------------------------------------------------------------ base and --set
def test_base_keeps_what_is_not_written(here: Path) -> None:
    write(here, GOOD, "parent.yaml")
    write(here, "base: parent\nparallelism: {dp: 4}\ncluster: {nodes: 4}\n", "child.yaml")
    write(here, "base: child.yaml\nparallelism:\n  microbatches: 16\n", "grandchild.yaml")
    job = load_job("grandchild.yaml", ["run.steps=7"])
    assert (job.name, job.world_size, job.parallelism.microbatches) == ("grandchild", 32, 16)
    where = provenance(job)
    assert where["parallelism.tp"] == "parent.yaml:3"
    assert where["parallelism.dp"] == "child.yaml:2"
    assert where["parallelism.microbatches"] == "grandchild.yaml:3"
    assert where["run.steps"] == "--set"
    assert where["model.n_layers"] == "preset"
    assert where["parallelism.schedule"] == "default"
    assert where["variability.effects.residual.cv"] == "parent.yaml:11"


def test_a_mistake_in_a_base_is_placed_there(here: Path) -> None:
    write(here, GOOD.replace("tp: 2", "tp: two"), "parent.yaml")
    lines = mistakes(write(here, "base: parent\nrun: {steps: -1}\n"))
    assert re.match("job.yaml:2: run.steps: .* 1, .*-1", lines[0])
    assert re.match("parent.yaml:3: parallelism.tp: .*'two'", lines[1])


def test_a_cycle_of_bases(here: Path) -> None:
    write(here, "base: c\n", "a.yaml")
    write(here, "base: a\n", "b.yaml")
    write(here, "\nbase: b\n", "c.yaml")
    assert "(a -> c -> b -> a)" in mistakes("a.yaml")[0]
    write(here, "base: self\n", "self.yaml")
    assert "(self -> self)" in mistakes("self.yaml")[0]


def test_a_user_may_build_on_the_shipped_job_of_the_same_name(here: Path) -> None:
    write(here, "base: llama3-405b-16k\nrun: {steps: 5}\n", "llama3-405b-16k.yaml")
    job = load_job("llama3-405b-16k.yaml")
    assert (job.world_size, job.run.steps, job.run.tokens) == (16384, 5, None)


@pytest.mark.parametrize("base", ["nowhere", "3", "[a]", ""])
def test_a_bad_base(here: Path, base: str) -> None:
    (line,) = mistakes(write(here, f"base: {base}\n"))
    assert line.startswith("job.yaml:1: base: ") and "llama3-405b-16k" in line


def test_a_library_file_is_found_beside_the_job_that_names_it(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "mine.nc").touch()
    text = GOOD.replace("variability:", "variability:\n  library: mine.nc")
    job = load_job(write(here / "sub", text))
    assert job.variability.library == str(here / "sub" / "mine.nc")


RESIDUAL, POD = "variability.effects.residual", "cluster.tiers.pod"


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
def test_an_answer_to_the_same_question_replaces_the_one_below(below, above, gone, tmp_path):
    """In an override, and in a file over its base."""
    size = "parallelism: {dp: 128}\ncluster: {nodes: 16}\n"
    (tmp_path / "base.yaml").write_text(f"base: llama3-70b-fsdp-512\n{size}", encoding="utf-8")
    job = load_job(tmp_path / "base.yaml", [below])
    over = job.replace(above)
    assert gone in values_of(job) and gone not in values_of(over)
    assert over == load_job(tmp_path / "base.yaml", [below, above])
    for name, under, text in (("low", "base", below), ("up", "low", above)):
        written = f"base: {under}\n{yaml_of(text)}"
        (tmp_path / f"{name}.yaml").write_text(written, encoding="utf-8")
    assert values_of(load_job(tmp_path / "up.yaml")) == values_of(over)


def values_of(job):
    """Values of a job by dotted key; what is not set is left out."""
    return dict(flatten(job.model_dump(exclude={"name", "source"})))


def yaml_of(override):
    """Write an override as a job file has it."""
    key, _, value = override.partition("=")
    blocks = key.split(".")
    return "".join(f"{'  ' * i}{name}:\n" for i, name in enumerate(blocks))[:-1] + f" {value}\n"


@pytest.mark.parametrize(
    ("override", "block", "key", "value"),
    [
        ("parallelism.microbatches=16", "parallelism", "microbatches", 16),
        ("parallelism.overlap=false", "parallelism", "overlap", False),
        ("run.slowdown_thresholds=[1.1, 1.3]", "run", "slowdown_thresholds", (1.1, 1.3)),
        ("run.deadline=2h", "run", "deadline", 7200.0),
        ("run.steps=1e6", "run", "steps", 1_000_000),
        ("run.steps=", "run", "steps", None),
        ("variability.library=none", "variability", "library", None),
        ("variability.library=null", "variability", "library", None),
        ("variability.library=h100-stressed", "variability", "library", "h100-stressed"),
        ("cluster.node_slowdowns.1=1.5", "cluster", "node_slowdowns", {1: 1.5}),
        ("cluster.node_slowdowns={0: 2, 1: 1.5}", "cluster", "node_slowdowns", {0: 2.0, 1: 1.5}),
    ],
)
def test_overrides_are_yaml_and_come_before_validation(
    here: Path, override: str, block: str, key: str, value: object
) -> None:
    job = load_job(write(here, GOOD), [override])
    assert getattr(getattr(job, block), key) == value


def test_overrides_are_values_too_and_named_as_python_names_them(here: Path) -> None:
    path = write(here, GOOD)
    values = {"parallelism.microbatches": 16, "variability.effects": {"residual": {"cv": 0.03}}}
    texts = ["parallelism.microbatches=16", "variability.effects={residual: {cv: 0.03}}"]
    assert load_job(path, values) == load_job(path, texts)
    assert provenance(load_job(path, values))["parallelism.microbatches"] == "--set"
    for wrong in ({"parallelism.tpp": 3}, ["parallelism.tpp=3"]):
        with pytest.raises(PrismError, match="^overrides parallelism.tpp=3: parallelism.tpp: "):
            load_job(path, wrong)
    for wrong in ([3], {"": 3}, {"base": "x"}):
        with pytest.raises(PrismError, match="^overrides "):
            load_job(path, wrong)


def test_a_mapping_is_a_job_as_its_file_is(here: Path) -> None:
    write(here, GOOD)
    own = {"base": "job", "parallelism": {"microbatches": 16}, "run": {"deadline": None}}
    job = load_job(own, {"run.steps": 7})
    assert (job.name, job.parallelism.microbatches, job.run.steps, job.n_nodes) == ("job", 16, 7, 2)
    assert provenance(job)["parallelism.tp"] == "job.yaml:3"
    assert own["parallelism"] == {"microbatches": 16}
    for wrong in ({"modell": {}}, {"base": "job", "run": {"step": 3}}, {}, 42, None):
        with pytest.raises(PrismError):
            load_job(wrong)


@pytest.mark.parametrize(
    ("blocks", "key"),
    [
        ({"modell": {}}, "modell: unknown key"),
        ({"model": {"name": "llama3-8b"}, "parallelism": {"tpp": 3}}, "parallelism.tpp: unknown"),
        ({"model": {"name": "llama3-8b"}, "cluster": {"nodes": 3}}, "parallelism: tp"),
        ({"name": 3, "model": {"durations": {"forward_s": 1, "backward_s": 1}}}, "name: "),
    ],
)
def test_a_job_made_by_hand_has_the_messages_of_a_file(blocks: dict, key: str) -> None:
    with pytest.raises(PrismError) as caught:
        Job(**blocks)
    assert any(key in line for line in str(caught.value).splitlines())


def test_replace_gives_a_job_with_other_values(here: Path) -> None:
    path = write(here, GOOD)
    job = load_job(path)
    other = job.replace("run.deadline=28d", {"parallelism.vpp": 2})
    assert other == load_job(path, ["run.deadline=28d", "parallelism.vpp=2"])
    assert (other.parallelism.schedule, job.parallelism.schedule) == ("interleaved", "1f1b")
    assert other.name == job.name and provenance(other)["cluster.nodes"] == "job.yaml:8"
    nested = job.replace({"parallelism": {"vpp": 2}}).replace("run.deadline=28d")
    assert nested == other
    with pytest.raises(PrismError, match="cluster.nodez: unknown"):
        job.replace({"cluster.nodez": 3})


@pytest.mark.parametrize("make", [job_from_dict, lambda blocks: Job(**blocks)])
def test_a_job_made_by_hand_is_replaced_again_and_again(make: Any) -> None:
    durations = {"forward_s": 1, "backward_s": 2}
    job = make({"model": {"durations": durations}, "parallelism": {"pp": 2, "microbatches": 4}})
    other = job.replace({"run.steps": 3}).replace({"parallelism.microbatches": 8})
    assert (other.run.steps, other.parallelism.pp, other.parallelism.microbatches) == (3, 2, 8)
    assert other.model == job.model


def test_the_last_override_wins_and_may_repair_the_file(here: Path) -> None:
    path = write(here, GOOD.replace("tp: 2", "tp: two"))
    job = load_job(path, ["parallelism.tp=4", "parallelism.tp=2"])
    assert job.parallelism.tp == 2
    assert load_job(path, "parallelism.tp=2") == job


def test_nodes_that_no_dp_fills_are_told_the_nearest_that_one_does(here: Path) -> None:
    (text,) = mistakes(write(here, GOOD), "parallelism.tp=4", "cluster.nodes=3")
    ways = re.findall(r"nodes: (\d+) (?:with parallelism\.|for )dp: (\d+)", text)
    assert ways == [("2", "1"), ("4", "2"), ("4", "2")]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallelism.tpp=3", r"parallelism.tpp: .* mean tp\b"),
        ("paralelism.tp=3", "paralelism: .* mean parallelism"),
        ("tp=3", r"\btp: .* mean parallelism.tp"),
        ("parallelism.tp=abc", "parallelism.tp: .*'abc'"),
        ("parallelism.tp=[1", "YAML"),
        ("parallelism.tp.x=1", "parallelism.tp: .*mapping"),
        ("parallelism.tp", "block.key=value; .*--set"),
        ("=3", "block.key=value"),
        ("parallelism..tp=3", "block.key=value"),
        ("", "block.key=value"),
        ("base=llama3-405b-8k", "base .*cannot"),
        ("parallelism.dp=4", "parallelism: .*= 32, .* 2"),
        ("cluster.nodes=4", "= 32 GPUs; .*dp: 4 .*cluster.nodes: 2"),
        ("variability.effects.step.cv=-0.1", "step.cv: .* 0, .*-0.1"),
        ("run.steps=" + "9" * 5000, "5000 digits"),
    ],
)
def test_bad_overrides_are_placed_at_the_override(here: Path, override: str, words: str) -> None:
    lines = mistakes(write(here, GOOD), override)
    assert lines[0].startswith(f"--set {override[:60]}") and re.search(words, lines[0])
    assert all(len(line) < 400 for line in lines)


def test_names_resolve_to_shipped_jobs_and_paths_win(here: Path) -> None:
    assert resolve_path("pipeline-8x32").name == "pipeline-8x32.yaml"
    assert resolve_path("pipeline-8x32.yaml").parent != here
    own = write(here, GOOD, "pipeline-8x32.yaml")
    assert resolve_path("pipeline-8x32.yaml").resolve() == own
