"""Effects of a job: what it sets, else the library's, else off."""

import math

import pytest

from prism import PrismError, estimate, load_job, load_library, simulate, summary
from prism.simulation.prepare import prepare, prepare_variability
from prism.simulation.program import ideal_program
from prism.simulation.steps import run_blocks

JOB = "llama3-405b-16k"
LEMONS = "variability.library=h100-uncurated"
RANK = "variability.effects.rank"


def rank_params(*overrides):
    law = prepare_variability(load_job(JOB, [LEMONS, *overrides])).rank
    assert law.mean == pytest.approx(1.0, abs=1e-9)
    return law.params


def test_what_the_job_leaves_out_stays_the_library_s():
    cv, shape, fraction, low, high, limit = rank_params()
    assert (fraction, low, limit) == (4 / 392, 1.06, 1.25)
    assert rank_params(f"{RANK}.cv=0.03") == (0.03, shape, fraction, low, high, limit)
    assert rank_params(f"{RANK}.lemon_fraction=0") == (cv, shape, 0.0, low, high, limit)
    assert rank_params(f"{RANK}.lemon_slowdown=[1.1, 1.15]")[3:5] == (1.1, 1.15)


def test_lemons_slower_than_max_slowdown_are_culled():
    law = prepare_variability(load_job(JOB, [LEMONS, "cluster.max_slowdown=1.1"])).rank
    assert law.ppf(1.0) == pytest.approx(1.1, rel=2e-3)  # relative to the body's mean
    assert law.mean == pytest.approx(1.0, abs=1e-9)


def test_lemons_beyond_max_slowdown_are_refused():
    override = f"{RANK}.lemon_slowdown=[1.1, 1.4]"
    with pytest.raises(PrismError, match=r"lemon_slowdown: .* 1\.4, .* 1\.25"):
        rank_params(override)
    assert rank_params(override, "cluster.max_slowdown=1.4")[4:] == (1.4, 1.4)


def test_laws_that_reach_below_zero_are_refused():
    residual = "variability.effects.residual={law: normal, cv: 0.5}"
    with pytest.raises(PrismError, match="yaml.*effects.residual: .*normal.*lognormal"):
        prepare(load_job("pipeline-8x32", [residual]), 1)
    call = "variability.effects={call: {cv: 1.5}}"
    with pytest.raises(
        PrismError, match="effects.call: .* cv 1.5 gives negative.*smaller.*call.cv"
    ):
        small = ["model.n_layers=8", "parallelism={vpp: 1, dp: 1, microbatches: 8}"]
        small += ["cluster.nodes=4", "variability.resolution=kernel"]
        prepare(load_job("gpt3-175b-512", [call, *small]), 1)


def test_without_a_library_effects_are_off_unless_set():
    v = prepare_variability(load_job(JOB, ["variability.library=none"]))
    assert [law.std for law in (v.rank, v.step, v.microbatch, v.call)] == [0.0] * 4
    assert v.residual("residual/gemm_large").std == 0.0
    v = prepare_variability(load_job(JOB, ["variability.library=none", f"{RANK}.cv=0.02"]))
    assert v.rank.std == pytest.approx(0.02, rel=1e-6)
    assert v.rank.params[2:] == (0.0, 1.06, 1.2, 1.25)


@pytest.mark.parametrize("key", ["step", "microbatch", "call", "expert", "run"])
def test_a_spread_set_by_a_job_is_taken_whatever_the_library_has(key):
    job = load_job("deepseek-v3-2048", [f"variability.effects.{key}.cv=0.02"])
    found = prepare_variability(job)
    cv = found.run_cv if key == "run" else getattr(found, key).cv
    assert cv == pytest.approx(0.02, rel=1e-6)


def test_error_of_the_model_is_that_of_the_class_and_grows_beyond_the_largest_job():
    library = load_library("h100-healthy")
    names = ("model_error_compiled", "model_error_growth", "largest_gpus_compiled")
    error, growth, largest = (library.value(f"run/{name}") for name in names)
    for dp in (1, 16, 64, 512):
        job = load_job(JOB, [f"parallelism.dp={dp}", f"cluster.nodes={16 * dp}"])
        beyond = math.log(max(1.0, 128 * dp / largest))
        found = prepare_variability(job).model_error
        assert found == pytest.approx(math.hypot(error, growth * beyond))
    for value in (0.0, 0.07):
        job = load_job(JOB, [f"variability.model_error={value}"])
        assert prepare_variability(job).model_error == value


FSDP, DDP = {"dp": 8, "data_parallel": "fsdp"}, {"dp": 8, "data_parallel": "ddp"}


@pytest.mark.parametrize(
    ("device", "parallelism", "model", "kind"),
    [
        ("h100", DDP, "llama3-8b", "megatron"), ("a100", DDP, "llama3-8b", "megatron"),
        ("h100", FSDP, "llama3-8b", "compiled"),
        ("h100", FSDP | {"framework": "eager"}, "llama3-8b", "eager"),
        ("a100", FSDP | {"framework": "eager"}, "llama3-8b", "eager"),
        ("b200", DDP | {"ep": 8}, "qwen3-30b-a3b", "experts"),
        # nobody published such a job
        ("mi300x", DDP, "llama3-8b", None), ("h200", DDP, "llama3-8b", None),
        ("b300", DDP, "llama3-8b", None), ("a100", FSDP, "llama3-8b", None),
        ("h100", DDP | {"framework": "eager"}, "llama3-8b", None),
        ("h100", DDP | {"framework": "compiled"}, "llama3-8b", None),
        ("h100", FSDP | {"framework": "megatron"}, "llama3-8b", None),
        ("gb200", FSDP | {"framework": "eager"}, "llama3-8b", None),
        ("a100", DDP | {"ep": 8}, "qwen3-30b-a3b", None),
        ("h100", FSDP | {"ep": 8, "framework": "eager"}, "qwen3-30b-a3b", None),
        ("h100", DDP, "nemotron-h-8b", None),
    ],
)  # fmt: skip
def test_only_classes_with_published_jobs_have_an_error_of_their_own(
    device, parallelism, model, kind
):
    cluster = {"nodes": 1, "device": device}
    job = load_job({"model": {"name": model}, "parallelism": parallelism, "cluster": cluster})
    library = load_library(f"{device}-healthy")
    found = prepare_variability(job).model_error
    wide = library.value("run/model_error_unmeasured")
    assert found == (wide if kind is None else library.value(f"run/model_error_{kind}"))
    assert 0.1 < wide < 0.4
    told = summary(estimate(job, replicates=64, run_replicates=8, steps=100, seed=1))
    assert told["model_error"]["spread"] == found
    assert told["model_error"]["measured"] is (kind is not None)
    assert any(text.startswith("model error:") for text in told["warnings"]) is (kind is None)


def test_a_library_of_another_device_does_not_bring_its_error():
    job = load_job("llama3-70b-fsdp-512", ["cluster.device=h200"])  # whose library is H100's
    wide = load_library("h100-healthy").value("run/model_error_unmeasured")
    assert job.variability.library == "h100-healthy"
    assert prepare_variability(job).model_error == wide


def test_compiled_is_not_slower_than_eager():
    """Where nothing was published of it: it runs the same products, and less beside them."""
    for device in ("a100", "h200", "b200", "b300", "gb200", "gb300", "mi300x"):
        nodes = {"nodes": 4, "gpus_per_node": 4} if device.startswith("gb") else {"nodes": 2}
        for model in ("llama3-8b", "gpt3-175b"):
            compiled, eager = (
                ideal_s({
                    "model": {"name": model, "n_layers": 8}, "cluster": {"device": device, **nodes},
                    "parallelism": {"dp": 16, "data_parallel": "fsdp", "framework": framework},
                })
                for framework in ("compiled", "eager")
            )  # fmt: skip
            assert compiled < eager, (device, model)


def ideal_s(values):
    """Step of a job with every effect at 1 [s]."""
    program = ideal_program(prepare(load_job(values), 1).program)
    return float(run_blocks(program, range(1), 1)[0][0, 0])


def test_spreads_are_the_job_s_where_it_sets_them():
    effects = "variability.effects"
    v = prepare_variability(
        load_job(JOB, [f"{effects}.step.cv=0.03", f"{effects}.residual.scale=2"])
    )
    plain = prepare_variability(load_job(JOB))
    assert v.step.std == pytest.approx(0.03, rel=1e-3)
    entry = "residual/gemm_large"
    assert v.residual(entry).std == pytest.approx(2 * plain.residual(entry).std, rel=1e-3)


def test_loadings_by_class():
    v = prepare_variability(load_job(JOB))
    assert v.rank_loading("gemm_mlp") == v.rank_loading("attention") == 1.0
    assert v.rank_loading("memory") == v.memory_loading
    assert v.rank_loading("tp_all_gather") == v.rank_loading("p2p") == 0.0
    assert v.microbatch_loading("forward", "gemm_mlp") == 1.0
    assert v.microbatch_loading("backward", "gemm_mlp") == v.backward_loading
    assert v.microbatch_loading("forward", "loss") == v.loss_loading
    assert v.microbatch_loading("forward", "tp_all_gather") == 0.0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.node_slowdowns.0=1e300", "between 0.001 and 1000"),
        ("model.durations={forward_s: 1e38, backward_s: 1}", "0 to 1e\\+15"),
        ("parallelism.microbatches=2147483632", "lower parallelism.microbatches"),
        ("variability.effects={residual: {cv: 0}, rank: {cv: 1.0}}", "negative durations"),
    ],
)
def test_numbers_out_of_range_are_refused(override, words):
    with pytest.raises(PrismError, match=words):
        simulate(load_job("pipeline-8x32", [override]), 64, seed=1)
