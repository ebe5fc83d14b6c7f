"""Kernels by what they do: classes by name and launching op, and a step's time by class."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from test_kineto import Recorder, shown, write

import prism

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))

CUDNN, FLASH = "aten::_cudnn_attention_backward", "aten::_flash_attention_backward"
REAL = {
    ("compute", "gemm"): (
        ("x", "aten::_grouped_mm"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", ""),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1", ""),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", ""),
        ("triton_tem_fused_addmm_3", ""),
    ),
    ("compute", "convolution"): (
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", ""),
        ("cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4", "aten::cudnn_convolution"),
    ),
    ("compute", "attention"): (
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", CUDNN),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", ""),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<x>>", ""),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(x)", ""),
        ("_ZN7ck_tile6kentryILi256ELi1ENS_13FmhaFwdKernelI", ""),
        ("_ZN5aiter38fmha_bwd_hd128_bf16_causal_a32_rtna_psskE", ""),
        ("_attn_fwd", ""),
        ("triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_0"),
        ("void softmax_warp_forward<float, float, float, 1, false, false>(x)", "aten::_softmax"),
    ),
    ("memory", "elementwise"): (
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(x)", CUDNN),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(x)", CUDNN),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, x>", FLASH),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<x>", FLASH),
        ("void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<x>>", ""),
        ("_ZN5aiter23fmha_bwd_hd128_odo_bf16E", ""),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_mul_3", "triton_poi_fused__x"),
        ("triton_red_fused__to_copy_sum_7", ""),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps<float>>>", ""),
        ("void at::native::vectorized_elementwise_kernel<8, silu_kernel>", "aten::silu"),
        ("void fbgemm_gpu::permute_2D_data_kernel<true, int, int, float>", ""),
    ),
    ("memory", "norm"): (
        ("x", "aten::_fused_rms_norm_backward"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<x>", ""),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<x>", ""),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>", ""),
        ("_layer_norm_fwd_1pass_kernel", ""),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(x)", ""),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", ""),
        ("triton_per_fused__fused_rms_norm_backward_add_4", ""),
    ),
    ("compute", "loss"): (
        ("void cunn_SoftMaxBackward<4, float, float, float, LogSoftMaxBackwardEpilogue>", ""),
        ("void softmax_warp_forward<float, float, float, 10, true, false>(x)", ""),
        ("void nll_loss_forward_reduce_cuda_kernel_2d<float>", "aten::nll_loss_forward"),
        ("triton_red_fused__log_softmax_nll_loss_forward_1", ""),
    ),
    ("compute", "embedding"): (
        ("void DeviceRadixSortOnesweepKernel<x>", "aten::embedding_dense_backward"),
        ("split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_cta_per_row_1", ""),
        ("triton_poi_fused_embedding_0", ""),
    ),
    ("optimizer", "optimizer"): (
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "aten::_fused_adamw_"),
    ),
}  # fmt: skip
"""Names of kernels, and of ops that launch them, as profiles have them, by op kind and class."""


@pytest.mark.parametrize("expected", REAL, ids=lambda pair: pair[1])
def test_kernels_of_real_profiles(run, tmp_path, expected):
    made = Recorder()
    for i, (kernel, op) in enumerate(REAL[expected]):
        made.kernel(kernel, 100.0 * i, 30.0, op=op)
    _, ops = shown(run, write(tmp_path, made.document) / "0.json")
    gaps = ("launch_gap", "host")
    assert {what: row["n"] for what, row in ops.items() if what != gaps} == {
        expected: len(REAL[expected])
    }


NAMES = {
    "gemm": "nvjet_tst_128x256", "attention": "flash_fwd_kernel", "elementwise": "silu_kernel",
    "norm": "vectorized_layer_norm_kernel", "loss": "nll_loss_kernel",
    "optimizer": "multi_tensor_apply_kernel", "all_gather": "ncclDevKernel_AllGather_RING(x)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum(x)", "p2p": "ncclDevKernel_SendRecv(x)",
}  # fmt: skip
"""A kernel of each class, in the order in which one that runs beside others counts."""
LAYER = {
    "model": {"n_layers": 2, "hidden_size": 512, "ffn_size": 2048, "n_heads": 8,
              "vocab_size": 4096, "seq_len": 1024},
    "parallelism": {"microbatches": 2, "data_parallel": "ddp"},
    "cluster": {"gpus_per_node": 1, "device": "h100"},
}  # fmt: skip


def alone(**layout):
    """A job on as many GPUs as the layout has, one a node."""
    n = int(np.prod([layout.get(k, 1) for k in ("tp", "pp", "dp")]))
    blocks = {key: dict(block) for key, block in LAYER.items()}
    blocks["parallelism"] |= layout
    blocks["cluster"]["nodes"] = n
    return prism.load_job(blocks)


def compared(path, job, **options):
    """Figures of a profile against a job, and its classes by name."""
    found = prism.summary(prism.compare(path, job, **options))
    return found, {row["name"]: row for row in found["classes"]}


def adds_up(found):
    """Whether classes and idle are the period, on both sides."""
    sums = [sum(row[side] for row in found["classes"]) for side in ("measured", "predicted")]
    return sums == pytest.approx([found["period"][x] for x in ("measured", "predicted")], rel=1e-9)


def test_what_runs_at_once_is_counted_once(tmp_path):
    made = Recorder()
    for step in range(3):  # periods of 1,000 us, from 900 to 900
        t = 1_000.0 * step
        made.step(step, t, 990.0)
        made.kernel(NAMES["gemm"], t + 100.0, 200.0)
        made.collective(t + 200.0, 300.0, [0])  # 100 of it hidden
        made.kernel(NAMES["elementwise"], t + 250.0, 100.0, stream=9)  # 50 after the product
        made.kernel(NAMES["norm"], t + 600.0, 50.0)
        made.kernel(NAMES["optimizer"], t + 700.0, 200.0)
    path = write(tmp_path, made.document) / "0.json"
    found, rows = compared(path, alone())
    expected = {"gemm": 200, "elementwise": 50, "all_reduce": 150, "norm": 50, "optimizer": 200,
                "idle": 350}  # fmt: skip
    measured = {name: 1e6 * row["measured"] for name, row in rows.items() if row["measured"]}
    assert measured == pytest.approx(expected)
    assert found["period"]["measured"] == pytest.approx(1e-3) and adds_up(found)
    kernels = {name: row["kernels"] for name, row in rows.items()}
    assert all(kernels[name] == 1 for name in expected if name != "idle")
    assert kernels["idle"] is None and kernels["attention"] == 0
    assert rows["idle"]["ratio"] == rows["idle"]["predicted"] / rows["idle"]["measured"]
    assert rows["attention"]["ratio"] is None
    assert (found["steps"], found["ranks"]) == (2, 1)
    assert compared(path, alone(), steps="2:2")[0]["steps"] == 1  # the step before is known
    with pytest.raises(prism.PrismError):
        compared(path, alone(), steps="7:9")


def test_the_only_step_is_from_its_first_activity_to_its_last(tmp_path):
    made = Recorder()
    made.kernel(NAMES["gemm"], 100.0, 50.0)
    made.kernel(NAMES["loss"], 200.0, 30.0)
    found, rows = compared(write(tmp_path, made.document) / "0.json", alone())
    assert found["period"]["measured"] == pytest.approx(130e-6)
    assert rows["idle"]["measured"] == pytest.approx(50e-6) and adds_up(found)


@pytest.mark.parametrize("seed", range(4))
def test_against_a_count_by_the_microsecond(run, tmp_path, seed):
    """Two ranks with random activities that run over each other and over the ends of steps."""
    rng = np.random.default_rng(seed)
    ran, last = {0: [], 1: []}, np.zeros(4, int)
    names = [list(NAMES), list(NAMES)[:6]]
    made = [Recorder(rank, 2) for rank in ran]
    for step, rank in ((step, rank) for step in range(4) for rank in ran):
        made[rank].step(step, 1_000.0 * step, 1_000.0)
        for _ in range(int(rng.integers(5, 30))):
            # collectives on one rank alone, so that no clock is moved
            launch, name = 1_000 * step + int(rng.integers(0, 900)), rng.choice(names[rank])
            start = launch + int(rng.integers(1, 80))
            end = start + int(rng.integers(1, 200))
            ran[rank].append((name, start, end))
            last[step] = max(last[step], end)
            made[rank].kernel(NAMES[name], start, end - start, launch=launch, stream=len(ran[rank]))
    painted = []
    for rank in ran:
        classes = np.full(6_000, "idle", dtype="<U12")
        for name in reversed(NAMES):  # the first ones paint over the others
            for own, start, end in ran[rank]:
                if own == name:
                    classes[start:end] = name
        painted.append(classes[last[0] : last[-1]])
    documents = [recorder.document for recorder in made]
    figures, rows = compared(write(tmp_path, *documents), alone(dp=2))
    for name in (*NAMES, "idle"):
        seconds = np.mean([1e-6 * (classes == name).sum() / 3 for classes in painted])
        assert rows[name]["measured"] == pytest.approx(seconds, abs=1e-9), name
    assert figures["period"]["measured"] == pytest.approx(1e-6 * (last[-1] - last[0]) / 3)
    assert adds_up(figures)
    status, out, _ = run("show", tmp_path, "--json")
    alike = json.loads(out)["step_classes"]
    assert status == 0 and alike["period"] == pytest.approx(figures["period"]["measured"])
    seconds = {row["name"]: row["seconds"] for row in alike["classes"]}
    assert seconds == pytest.approx({name: rows[name]["measured"] for name in seconds})
    assert sum(seconds.values()) == pytest.approx(alike["period"])


@pytest.fixture
def profile(tmp_path):
    """A profile with a kernel of every class."""
    made = Recorder()
    for step in range(2):
        made.step(step, 1_000.0 * step, 1_000.0)
        for i, name in enumerate(NAMES.values()):
            made.kernel(name, 1_000.0 * step + 50.0 * i + 10.0, 40.0)
    return write(tmp_path, made.document) / "0.json"


@pytest.mark.parametrize(
    ("layout", "links"),
    [
        ({}, set()),
        ({"dp": 2}, {"all_reduce"}),
        ({"tp": 2}, {"all_gather", "reduce_scatter"}),
        ({"dp": 2, "data_parallel": "fsdp"}, {"all_gather"}),
        ({"pp": 2, "microbatches": 4}, {"p2p"}),
    ],
)
def test_what_a_job_predicts(profile, layout, links):
    job = alone(**layout)
    found, rows = compared(profile, job)
    ideal = prism.summary(prism.estimate(job, replicates=64, seed=1))["ideal_step_time"]
    assert found["period"]["predicted"] == pytest.approx(ideal, rel=1e-6) and adds_up(found)
    exposed = {name for name, row in rows.items() if "_" in name or name == "p2p"}
    assert {name for name in exposed if rows[name]["predicted"] > 0.0} >= links
    if not layout:
        gaps = prism.summary(prism.simulate(job, 64, seed=1))["critical_path"]["launch_gaps"]
        assert rows["idle"]["predicted"] == pytest.approx(gaps, rel=0.01) and 0.0 < gaps < ideal
        assert all(rows[name]["predicted"] == 0.0 for name in exposed)
    work = ("gemm", "attention", "elementwise", "norm", "loss", "embedding", "optimizer")
    assert all(rows[name]["predicted"] > 0.0 for name in work)
    if layout == {"dp": 2}:  # twice the replicas, no less work of each
        single = compared(profile, alone())[1]
        same = [rows[name]["predicted"] / single[name]["predicted"] for name in work]
        assert same == pytest.approx(np.ones(len(work)), rel=1e-5)


def test_durations_of_stages_are_one_class(profile):
    found, rows = compared(profile, prism.load_job("pipeline-8x32"))
    (work,) = [name for name in rows if name not in ("optimizer", "idle") and "_" not in name
               and name != "p2p"]  # fmt: skip
    assert "gemm" in work and "norm" in work
    assert rows["idle"]["predicted"] / found["period"]["predicted"] == pytest.approx(7 / 39)
    assert rows[work]["measured"] == pytest.approx(5 * 40e-6)
    assert rows["optimizer"]["predicted"] == 0.0 and adds_up(found)


def test_what_is_compared_with_a_job(profile, tmp_path, run):
    steps = tmp_path / "steps.csv"
    steps.write_text("step,step_s\n" + "".join(f"{i},{1 + 0.01 * (i % 7)}\n" for i in range(40)))
    job = alone()
    for a, b, options in (
        (steps, job, {}), (tmp_path / "none", job, {}), (job, profile, {}), (profile, steps, {}),
        (profile, profile, {}), (profile, "no-such-job", {}), (profile, job, {"unit": "s"}),
        (profile, job, {"fail_if_slower": 0.01}), (steps, steps, {"step_range": "x"}),
        (Path(__file__).parents[1] / "experiments" / "samples" / "trace.csv", job, {}),
    ):  # fmt: skip
        with pytest.raises(prism.PrismError):
            prism.compare(a, b, **options)
    status, out, _ = run("compare", profile, "pipeline-8x32", "--json")
    found = json.loads(out)
    assert status == 0 and set(found["period"]) >= {"measured", "predicted"}
    keys = {"name", "measured", "predicted", "ratio", "kernels"}
    assert all(set(row) == keys for row in found["classes"])
    assert prism.summary(prism.compare(steps, steps, seed=1))["quantities"]  # as before


def test_eager_h100_as_measured(run):
    """Per step, of eight: the README of the data, whose figures have three digits."""
    path = DATA / "h100_device" / "eager_trace.json.gz"
    if not path.is_file():
        pytest.skip(f"no {path}; set PRISM_DATA to its parent's parent")
    _, ops = shown(run, path)
    total = {what: row["n"] * row["mean"] / 8 for (_, what), row in ops.items()}
    count = {what: row["n"] / 8 for (_, what), row in ops.items()}
    rest = [x for x in total if x not in ("gemm", "attention", "optimizer", "host")]
    for names, seconds, n in (
        (["gemm"], 140.4e-3, 678), (["attention"], 33.8e-3, 64), (rest, 84.4e-3, 2_971),
        (["optimizer"], 7.2e-3, 57),
    ):  # fmt: skip
        assert sum(total[x] for x in names) == pytest.approx(seconds, rel=0.01)
        assert sum(count[x] for x in names) == n
