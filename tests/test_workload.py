"""One step's work: flop and bytes against closed forms, collectives by layout, laws by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from prism import Job, PrismError, load_job, load_library
from prism.cluster.machine import build_cluster
from prism.distributions.kerneltables import KernelTable
from prism.distributions.library import Entry, Library
from prism.jobs.jobspec.blocks import ModelBlock
from prism.jobs.jobspec.presets import PRESETS
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.workload.build import Workload, build_workload, count_model_flop, count_parameters
from prism.workload.kernels import GEMM_LARGE_S, Kernel, Rates, build_rates
from prism.workload.modelsize import shard_sizes
from prism.workload.transformer import TP_OVERLAP_COST, attention_flop

NOMINAL = {
    "gemm_efficiency_max": 0.7,
    "gemm_half_flop": 8e9,
    "attention_efficiency": 0.6,
    "attention_backward_efficiency": 0.5,
    "memory_efficiency": 0.8,
    "kernel_launch_s": 2e-6,
    "training_gemm_derate": 0.8,
    "nvlink_efficiency": 0.8,
    "network_efficiency": 0.8,
}


@pytest.fixture
def library() -> Library:
    """Figures alone, no measured table: durations follow the roofline."""
    entries = {f"nominal/{k}": Entry(f"nominal/{k}", "test", number=v) for k, v in NOMINAL.items()}
    return Library("test", "h100", entries)


def small_job(*overrides: str) -> Job:
    """Llama 3 8B on one to four nodes; the layout is overridden key by key."""
    base = ["model.name=llama3-8b", "parallelism.pp=1", "parallelism.vpp=1", "parallelism.dp=1"]
    base += ["parallelism.tp=8", "parallelism.microbatches=1", "parallelism.data_parallel=none"]
    base += ["cluster.nodes=1"]
    return load_job("llama3-405b-8k", [*base, *overrides])


def test_positions_rotate_whatever_the_feed_forward_part_is() -> None:
    library = load_library("h100-healthy")
    for gated in ("true", "false"):
        for rope in ("true", "false"):
            job = small_job(f"model.gated_mlp={gated}", f"model.rope={rope}")
            work = build_workload(job, library)
            names = Counter(k.name for row in work.chunks for c in row for k in c.forward)
            assert names["rope"] == (job.model.n_layers if rope == "true" else 0)
    rotated = {name: ModelBlock(name=name).rope for name in PRESETS}
    without = {name for name, rope in rotated.items() if not rope}
    assert without == {"gpt3-175b", "mpt-7b", "mpt-13b", "mpt-30b", "mpt-70b", "nemotron-h-8b",
                       "nemotron3-nano-30b-a3b"}  # fmt: skip
    assert ModelBlock(n_layers=2, gated_mlp=False).rope


def named(kernels: Sequence[Kernel], kernel_class: str) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.kernel_class == kernel_class]


def forward(work: Workload) -> list[Kernel]:
    return [kernel for row in work.chunks for chunk in row for kernel in chunk.forward]


def backward(work: Workload) -> list[Kernel]:
    return [kernel for row in work.chunks for chunk in row for kernel in chunk.backward]


@pytest.mark.parametrize(
    ("name", "parameters"),
    # the published checkpoints' own counts
    [
        ("llama3-405b", 405_853_388_800),
        ("llama3-70b", 70_553_706_496),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_parameters_of_the_published_models(name: str, parameters: int) -> None:
    assert count_parameters(small_job(f"model.name={name}").model) == parameters


def test_gpt3_has_175_billion_parameters() -> None:
    assert count_parameters(load_job("gpt3-175b-512").model) == pytest.approx(175e9, rel=0.01)


def test_model_flop_per_token() -> None:
    job = load_job("llama3-405b-16k")
    tokens = 128 * 16 * 8192
    n, layers, s, h = 405_853_388_800, 126, 8192, 16384
    assert count_model_flop(job) == pytest.approx(tokens * (6 * n + 6 * layers * s * h), rel=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallelism.tp=1", "parallelism.dp=8", "parallelism.data_parallel=fsdp"),
        ("parallelism.tp=2", "parallelism.cp=4"),
        ("parallelism.tp=2", "parallelism.pp=4", "parallelism.microbatches=4"),
        ("parallelism.sequence_parallel=false",),
    ],
)
def test_flop_do_not_depend_on_the_layout(library: Library, overrides: tuple[str, ...]) -> None:
    job = small_job(*overrides)
    work, model = build_workload(job, library), job.model
    gpus = job.parallelism.tp * job.parallelism.cp
    norms = (2 * model.n_layers + 1) * model.hidden_size
    matrices = count_parameters(model) - norms - model.vocab_size * model.hidden_size
    attention = model.n_layers * attention_flop(model, 1)
    ahead = gpus * sum(kernel.flop for kernel in forward(work))
    back = gpus * sum(kernel.flop for kernel in backward(work))
    assert ahead == pytest.approx(2 * matrices * model.seq_len + attention)
    assert back == pytest.approx(4 * matrices * model.seq_len + 2.5 * attention)


def test_sequence_parallel_collectives(library: Library) -> None:
    """Per layer 4 in forward and 4 in backward; one more per pass at either end of the model."""
    n = 32
    work = build_workload(small_job("parallelism.sequence_parallel=true"), library)
    for kernels in (forward(work), backward(work)):
        count = Counter(kernel.kernel_class for kernel in kernels if kernel.group == "tp")
        assert count["tp_all_gather"] == 2 * n + 1
        assert count["tp_reduce_scatter"] == 2 * n + 1
    plain = build_workload(small_job("parallelism.sequence_parallel=false"), library)
    for kernels, ends in ((forward(plain), 2), (backward(plain), 1)):
        count = Counter(kernel.kernel_class for kernel in kernels if kernel.group == "tp")
        assert count == {"tp_all_reduce": 2 * n + ends}


def test_weight_gradient_hides_the_reduce_scatter(library: Library) -> None:
    work = build_workload(small_job(), library)
    name = "mlp_backward_reduce_scatter"
    hidden = next(k for k in backward(work) if k.name == name)
    whole = next(k for k in forward(work) if k.name == "mlp_reduce_scatter")
    assert hidden.duration == pytest.approx(TP_OVERLAP_COST * whole.duration)
    assert hidden.bytes == whole.bytes == 2 * 8192 * 4096


def test_context_parallel_collectives(library: Library) -> None:
    job = small_job("parallelism.tp=2", "parallelism.cp=4")
    work = build_workload(job, library)
    ahead = [k for k in forward(work) if k.group == "cp"]
    back = [k for k in backward(work) if k.group == "cp"]
    assert len(ahead) == 32 and len(back) == 64
    assert all(kernel.kernel_class == "cp_all_gather" for kernel in ahead + back)
    # keys and values of the whole sequence, four of eight heads of width 128, bfloat16
    assert {kernel.bytes for kernel in ahead + back} == {2 * 2 * 8192 * 4 * 128}


def test_recompute(library: Library) -> None:
    times = {}
    for mode in ("none", "selective", "full"):
        work = build_workload(small_job(f"parallelism.recompute={mode}"), library)
        again = [k for k in backward(work) if k.name.startswith("recompute_")]
        times[mode] = sum(kernel.duration for kernel in again)
        if mode == "full":
            layers = [k for k in forward(work) if "embedding" not in k.name]
            loss = ("final_norm", "loss_all_gather", "logits", "cross_entropy", "loss_reduce")
            assert times[mode] == pytest.approx(
                sum(k.duration for k in layers if k.name not in loss)
            )
    assert times["none"] == 0.0 < times["selective"] < 0.6 * times["full"]


@pytest.mark.parametrize("tp", [1, 2])
def test_selective_recomputes_every_other_product(library: Library, tp: int) -> None:
    """Of q, k, v, out, gate, up, down: torchtitan's policy of selective recomputation by op."""
    one = (f"parallelism.tp={tp}", f"parallelism.dp={8 // tp}", "model.n_layers=1")
    one += ("parallelism.data_parallel=ddp",)
    kept = "parallelism.recompute=selective"
    job = small_job(*one, kept)
    plain, back = (backward(build_workload(j, library)) for j in (small_job(*one), job))
    again = [k for k in back if k.name.startswith("recompute_")]
    assert [k for k in back if k not in again] == plain
    s = shard_sizes(job.model, job.parallelism)
    products = [s.query, s.key, s.value, s.hidden, s.ffn, s.ffn, s.hidden]
    inner = [s.hidden] * 3 + [s.out] + [s.hidden] * 2 + [s.ffn]
    flop = [2 * s.tokens * n * k for n, k in zip(products, inner, strict=True)]
    assert sum(k.flop for k in again) == pytest.approx(sum(flop[1::2]))
    assert not any(k.kernel_class == "attention" for k in again)
    sent = [k.kernel_class for k in again if k.group]
    assert sent == (["tp_all_gather"] * 2 if tp > 1 else [])  # a reduce-scatter's output is kept


def test_fsdp_units_are_layers(library: Library) -> None:
    overrides = ("parallelism.tp=1", "parallelism.dp=8", "parallelism.data_parallel=fsdp")
    job = small_job(*overrides)
    work, n = build_workload(job, library), count_parameters(job.model)
    assert len(work.chunks) == 1 and len(work.chunks[0]) == 32
    assert named(work.chunks[0][0].forward, "embedding")
    assert named(work.chunks[0][-1].forward, "loss")
    gathered = [collective.bytes for (collective,) in work.gathers[0]]
    reduced = [collective.bytes for (collective,) in work.reduces[0]]
    assert sum(gathered) == pytest.approx(2 * n)
    assert sum(reduced) == pytest.approx(4 * n)
    assert {c.op_kind for (c,) in work.reduces[0]} == {"reduce_scatter"}
    assert work.optimizer[0].bytes == pytest.approx(30 * n / 8)
    assert not any(map(any, work.param_gathers))


def test_ddp_buckets(library: Library) -> None:
    job = small_job("parallelism.tp=1", "parallelism.dp=8", "parallelism.data_parallel=ddp",
                    "parallelism.bucket_layers=5")  # fmt: skip
    work = build_workload(job, library)
    assert len(work.chunks[0]) == 7
    assert {c.op_kind for (c,) in work.reduces[0]} == {"all_reduce"}
    assert work.gathers[0] == ((),) * 7
    assert work.optimizer[0].bytes == pytest.approx(30 * count_parameters(job.model))


def test_zero1_gathers_parameters_after_the_optimizer(library: Library) -> None:
    job = small_job("parallelism.tp=1", "parallelism.dp=8", "parallelism.data_parallel=zero1")
    work = build_workload(job, library)
    (gather,), (of_experts,) = work.param_gathers
    assert gather is not None and of_experts is None
    assert gather.bytes == pytest.approx(2 * count_parameters(job.model))
    assert not work.gathers[0][0] and work.reduces[0][0]


def test_one_replica_shares_nothing(library: Library) -> None:
    work = build_workload(small_job("parallelism.dp=1"), library)
    assert set(work.reduces[0]) == set(work.gathers[0]) == {()}
    assert work.transfer is None and work.embedding_reduce is None


def test_pipeline_chunks_follow_virtual_stages(library: Library) -> None:
    job = load_job("llama3-405b-16k")
    work = build_workload(job, library)
    assert (len(work.chunks), len(work.chunks[0])) == (16, 8)
    # one layer fewer on the first and the last virtual stage: embedding alone, loss alone
    assert {k.kernel_class for k in work.chunks[0][0].forward} == {
        "embedding",
        "tp_reduce_scatter",
    }
    assert not named(work.chunks[15][7].forward, "attention")
    assert len(named(work.chunks[15][7].forward, "loss")) == 2
    assert len(named(work.chunks[0][1].forward, "attention")) == 1
    assert work.transfer is not None
    assert work.transfer.bytes == 2 * 8192 * 16384 / 8
    assert work.tokens == 128 * 16 * 8192


def test_tied_embeddings_are_reduced_between_the_ends(library: Library) -> None:
    job = load_job("gpt3-175b-512")
    reduce = build_workload(job, library).embedding_reduce
    assert reduce is not None
    assert job.parallelism.gradient_dtype == "bf16"
    assert reduce.bytes == 2 * job.model.vocab_size * job.model.hidden_size / job.parallelism.tp
    assert build_workload(load_job("llama3-405b-8k"), library).embedding_reduce is None


def test_explicit_durations() -> None:
    job = load_job("pipeline-8x32")
    work = build_workload(job, None)
    assert len(work.chunks) == 8
    (ahead,), (back,) = work.chunks[3][0].forward, work.chunks[3][0].backward
    assert (ahead.duration, back.duration) == (1.0, 2.0)
    assert {ahead.kernel_class, ahead.law} == {"compute", "residual/compute"}
    assert work.transfer is None and not work.optimizer and work.model_flop == 0.0


def test_explicit_durations_of_a_stage_are_shared_by_its_chunks() -> None:
    job = load_job("pipeline-8x32", ["parallelism.vpp=2", "parallelism.schedule=interleaved"])
    chunks = build_workload(job, None).chunks[0]
    assert [chunk.forward[0].duration for chunk in chunks] == [0.5, 0.5]


BY_WORK = KernelTable({"flop": np.array([1e10, 1e12])}, np.array([2e14, 6e14]))


def test_roofline_and_table() -> None:
    rates = Rates(700e12, 7e9, 500e12, 400e12, 2e12, 0.0, derate=0.5)
    assert rates.gemm_time(7e9) == pytest.approx(2 * 7e9 / 700e12 / 0.5)
    tables = {"gemm/bf16": BY_WORK}
    measured = Rates(700e12, 7e9, 500e12, 400e12, 2e12, 0.0, tables, derate=0.8)
    middle = np.sqrt(2e14 * 6e14)  # logarithms are interpolated
    assert measured.gemm_time(1e11) == pytest.approx(1e11 / middle / 0.8)
    assert measured.gemm_time(1e13) == pytest.approx(1e13 / 6e14 / 0.8)


def test_a_table_by_shape_is_read_by_rows_columns_and_depth() -> None:
    grid = np.array([1e3, 1e4])
    rate = np.array([[[1e14, 2e14], [3e14, 4e14]], [[5e14, 6e14], [7e14, 8e14]]])
    table = KernelTable({"m": grid, "n": grid, "k": grid}, rate)
    rates = Rates(700e12, 7e9, 500e12, 400e12, 1e30, 0.0, {"gemm/bf16": table})
    for m, n, k, expected in (
        (1e3, 1e3, 1e4, 2e14), (1e4, 1e3, 1e3, 5e14), (1e5, 1e5, 1e5, 8e14),
        (1e3, 1e4, np.sqrt(1e7), np.sqrt(3e14 * 4e14)),
    ):  # fmt: skip
        found = rates.gemm("x", "gemm_mlp", m, n, k)
        assert found.flop / found.duration == pytest.approx(expected)
    grouped = rates.gemm("x", "gemm_expert", 1e4, 1e4, 1e3, groups=10.0)  # of 1,000 rows each
    assert grouped.flop / grouped.duration == pytest.approx(3e14)


def test_tables_are_used_for_their_own_device_however_it_is_spelt() -> None:
    job = load_job("llama3-405b-8k")

    def rates(device: str, job: Job = job) -> Rates:
        library = replace(
            load_library("h100-healthy"), device=device, tables={"gemm/bf16": BY_WORK}
        )
        return build_rates(build_cluster(job, library), library, job.parallelism)

    for device in ("h100", "NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert rates(device).tables["gemm/bf16"] is BY_WORK
    for device in ("NVIDIA GB200", "CPU AMD EPYC"):
        assert not rates(device).tables
    other = rates("h100", load_job("llama3-405b-8k", ["cluster.device=b200"]))
    assert not other.tables and other.gemm_flop_per_s == pytest.approx(0.7 * 2250e12, rel=0.01)


def test_eight_bit_products_are_quantized_and_gathered_in_eight_bits(library: Library) -> None:
    half, fp8 = (
        build_workload(small_job(f"parallelism.precision={p}"), library) for p in ("bf16", "fp8")
    )
    sent = [sum(k.bytes for k in forward(w) if k.name == "mlp_all_gather") for w in (half, fp8)]
    assert sent[0] == 2 * sent[1] > 0
    products = [
        sum(k.duration for k in (*forward(w), *backward(w)) if k.kernel_class == "gemm_mlp")
        for w in (half, fp8)
    ]
    assert products[1] / products[0] == pytest.approx(0.5, abs=0.02)  # the data sheet's ratio
    casts = [k for k in (*forward(fp8), *backward(fp8)) if k.name.endswith("_cast")]
    tokens, layers = 8192, 32
    # by layer: inputs of four products, gradients of four outputs, over tp = 8
    widths = 3 * 4096 + 14336 + 6144 + 4096 + 2 * 14336 + 4096
    assert sum(k.bytes for k in casts) == 4.0 * tokens * layers * widths / 8
    assert not [k for k in forward(half) if k.name.endswith("_cast")]
    logits = [[k.duration for k in forward(w) if k.name == "logits"] for w in (half, fp8)]
    assert logits[0] == logits[1]


def test_arithmetic_that_a_device_has_not_is_refused() -> None:
    for device, precision in (
        ("a100", "fp8"),
        ("h100", "nvfp4"),
        ("h200", "mxfp8"),
        ("mi300x", "nvfp4"),
    ):
        keys = [f"cluster.device={device}", f"parallelism.precision={precision}"]
        with pytest.raises(PrismError, match="parallelism.precision"):
            build_workload(load_job("llama3-405b-8k", keys), None)


def test_laws_part_at_one_millisecond(library: Library) -> None:
    laws: dict[str, list[float]] = {}
    for job in (load_job("llama3-405b-8k"), small_job()):
        for kernel in forward(build_workload(job, library)):
            laws.setdefault(kernel.law, []).append(kernel.duration)
    assert min(laws["residual/gemm_large"]) >= GEMM_LARGE_S
    assert max(laws["residual/gemm_small"]) < GEMM_LARGE_S
    assert {"residual/nvlink_small", "residual/nvlink_medium", "residual/nvlink_large"} <= set(laws)


@pytest.mark.parametrize("name", shipped_jobs())
def test_shipped_jobs_name_laws_that_exist(name: str) -> None:
    job = load_job(name)
    library = load_library(job.variability.library or "h100-healthy")
    work = build_workload(job, library)
    ends = [*work.optimizer, *sum(work.param_gathers, ()), work.transfer, work.grad_norm_reduce]
    ends += [work.layernorm_reduce, work.embedding_reduce]
    rows = *work.gathers, *work.reduces
    ends += [collective for row in rows for chunk in row for collective in chunk]
    parts = [*forward(work), *backward(work), *(c for c in ends if c is not None)]
    assert all(part.law in library for part in parts)
    assert all(0.0 < part.duration < 10.0 for part in parts)
    assert len(work.chunks) == job.parallelism.pp
    shape = [len(row) for row in work.chunks]
    assert shape == [len(row) for row in work.gathers] == [len(row) for row in work.reduces]


@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp", "hsdp"])
def test_gradients_in_bf16_are_half_the_bytes(library: Library, mode: str) -> None:
    """Of every reduction of gradients, and of nothing else."""
    overrides = [f"parallelism.data_parallel={mode}"]
    overrides += ["parallelism.shard_size=4"] if mode == "hsdp" else []
    wide, narrow = (
        build_workload(
            load_job("llama3-70b-fsdp-512", [*overrides, f"parallelism.gradient_dtype={t}"]),
            library,
        )
        for t in ("fp32", "bf16")
    )

    def reduced(work):
        return [[[c.bytes for c in chunk] for chunk in row] for row in work.reduces]

    assert reduced(narrow) == [[[n / 2 for n in c] for c in row] for row in reduced(wide)]
    assert sum(n for row in reduced(wide) for c in row for n in c) > 0.0
    assert narrow.gathers == wide.gathers and narrow.optimizer == wide.optimizer
    assert narrow.grad_norm_reduce == wide.grad_norm_reduce


@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_take_a_share_of_the_compute_that_hides_them(
    library: Library, reshard: bool
) -> None:
    cost = {"nominal/overlap_cost": Entry("nominal/overlap_cost", "test", number=0.5)}
    keys = ["parallelism={tp: 1, dp: 8, data_parallel: fsdp, microbatches: 4, "
            f"reshard_after_forward: {str(reshard).lower()}}}"]  # fmt: skip
    job = small_job(*keys)
    free = build_workload(job, library)
    taken = build_workload(job, replace(library, entries={**library.entries, **cost}))
    share = 0.5 if reshard else 0.5 / 4  # gathered and reduced once for all microbatches
    for c, (before, after) in enumerate(zip(free.chunks[0], taken.chunks[0], strict=True)):
        gather, reduce = (
            sum(x.duration for x in y[0][c]) for y in (free.gathers, free.reduces)
        )  # fmt: skip
        for way, beside in (("forward", gather), ("backward", gather * reshard + reduce)):
            kernels, longer = getattr(before, way), getattr(after, way)
            assert longer[: len(kernels)] == kernels
            hidden = min(beside, sum(k.duration for k in kernels))
            assert longer[-1].duration == pytest.approx(share * hidden)
            assert longer[-1].kernel_class.startswith("dp_")


def test_torch_recomputes_up_to_the_last_product(library: Library) -> None:
    found = {}
    for framework in ("megatron", "compiled", "eager"):
        keys = ["parallelism.recompute=full", f"parallelism.framework={framework}"]
        work = build_workload(small_job(*keys), library)
        found[framework] = [k.name for k in backward(work) if k.name.startswith("recompute_")]
    assert found["compiled"] == found["eager"]
    left = len(found["megatron"]) - len(found["eager"])
    assert left == 3 * 32  # product, reduce-scatter and residual of every layer
    assert not any(name.endswith("mlp_down") for name in found["eager"])
