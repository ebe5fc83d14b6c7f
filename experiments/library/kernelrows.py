"""Measured kernels, one a row, by the sizes of `prism.workload.kernelcost`, in seconds.

Each reader returns the rows of one device and kind: its sizes, `seconds`, and what tells
backends, dtypes and passes apart. Folders are described in their own README.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from prism.distributions.kerneltables import KernelFit, KernelTable

Array = NDArray[np.float64]

COLLECTOR = "ai-dynamo/aiconfigurator 095f58a (Apache-2.0)"
COLLECTED = ("h100", "h200", "b200", "gb200", "a100")  # products and layers of experts
BACKENDS = {
    "cudnn": "cudnn", "pyt_cudnn": "cudnn", "flash_attention": "fa2",
    "pyt_flash_attention": "fa2", "flash_attention_4": "fa4", "pyt_math": "math",
}  # fmt: skip
NORMS = {"pytorch": "eager", "torch_compile": "compiled", "cudnn": "te"}
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
ATTENTION_SIZES = ("batch", "heads", "kv_heads", "seq", "head_dim", "v_head_dim")
BACKWARD_FLOP = 2.5
STEPS_LAYERS, STEPS_HEADS, STEPS_KV, STEPS_DIM = 16, 32, 8, 64  # of llama32_1b_h200_steps.csv


def collected(folder: Path, gpu: str, kind: str) -> pd.DataFrame:
    """Return what `COLLECTOR` holds of one kind, such as gemm; empty where there is none."""
    name = gpu if gpu == "gb200" else f"{gpu}_sxm"
    found = sorted((folder / "kernel_tables").glob(f"{name}__*__{kind}*_perf.parquet"))
    if not found:
        return pd.DataFrame()
    table = pd.read_parquet(found[0])
    return table.assign(seconds=table.latency * 1e-3)


def add_work(rows: pd.DataFrame) -> pd.DataFrame:
    """Add attention's score-matrix elements and its operations; of a window only what it leaves."""
    seq = rows.seq.astype(float)
    window = rows.window.where((rows.window > 0) & (rows.window < seq), seq)
    pairs = np.where(rows.full, seq * seq, window * seq - 0.5 * window * window)
    scores = rows.batch * rows.heads * pairs
    flop = 2.0 * scores * (rows.head_dim + rows.v_head_dim)
    return rows.assign(scores=scores, flop=np.where(rows.backward, BACKWARD_FLOP, 1.0) * flop)


def attention(folder: Path, gpu: str) -> pd.DataFrame:
    """Training kernels of attention: backend, dtype, full, backward, deterministic, sizes."""
    if gpu == "mi300x":
        wide = pd.read_csv(folder / "kernel_tables" / "mi300x_attention_fwd_bwd.csv")
        both = [
            wide.assign(backward=name == "bwd", seconds=wide[f"{name}_ms"] * 1e-3)
            for name in ("fwd", "bwd")
        ]
        rows = pd.concat(both).assign(
            backend="fa2", dtype="bf16", window=0.0, full=lambda x: ~x.causal, deterministic=False
        )
    else:
        rows = pd.read_csv(folder / "attention_training" / "attention.csv")
        rows = rows[rows.device == gpu]
        rows = rows.assign(
            backend=rows.backend.map(BACKENDS), dtype=rows.dtype.replace(DTYPES),
            full=rows["mask"] == "full", backward=rows["pass"] == "bwd", seq=rows.seq_q,
            window=rows.window.fillna(0.0), seconds=rows.time_ms * 1e-3,
        )  # fmt: skip
        rows = rows[rows.seq_q == rows.seq_kv]
        # between two releases of cuDNN the fp8 backward on H200 became 1.5 times as long
        newest = rows.groupby("dtype").cudnn.transform("max")
        rows = rows[(rows.device != "h200") | (rows.dtype != "fp8") | (rows.cudnn == newest)]
        # B200's shortest takes what the next does in fixed time: the host, not the kernel
        rows = rows[(rows.device != "b200") | (rows.backend != "cudnn") | (rows.seq > 2048)]
    rows = rows.rename(columns={"dim_qk": "head_dim", "dim_v": "v_head_dim"})
    return add_work(rows[(rows.seconds > 0.0) & np.isfinite(rows.seconds)])


def inference_attention(folder: Path, gpu: str) -> pd.DataFrame:
    """TensorRT-LLM's causal forward, by many shapes; latent attention's beside, from 2,048 on."""
    rows = collected(folder, gpu, "context_attention")
    rows = rows[
        (rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16") & (rows.isl >= 512)
        & (rows.batch_size <= 16) & (rows.batch_size * rows.isl >= 2048) & (rows.num_heads >= 2)
    ]  # fmt: skip
    rows = rows.rename(
        columns={"batch_size": "batch", "num_heads": "heads", "num_key_value_heads": "kv_heads",
                 "isl": "seq", "window_size": "window"}
    )  # fmt: skip
    rows = rows[(rows.window == 0) & (rows.head_dim <= 256)]
    rows = rows.assign(v_head_dim=rows.head_dim)
    latent = collected(folder, gpu, "context_mla")
    if len(latent):
        latent = latent[
            (latent.kv_cache_dtype == "bfloat16") & (latent.isl >= 2048) & (latent.batch_size <= 16)
        ]
        latent = latent.rename(columns={"batch_size": "batch", "num_heads": "heads", "isl": "seq"})
        latent = latent.assign(kv_heads=latent.heads, head_dim=192, v_head_dim=128, window=0)
        rows = pd.concat([rows, latent])
    return add_work(rows.assign(full=False, backward=False))


def step_attention(folder: Path) -> pd.DataFrame:
    """Forward and backward of attention of a layer, over cuDNN's: differences between steps."""
    steps = pd.read_csv(folder / "attention_training" / "llama32_1b_h200_steps.csv")
    wide = steps.pivot_table(index=["batch_size", "seq_len"], columns="backend", values="step_s")
    rows = pd.DataFrame(
        {name: (wide[name] - wide.cudnn) / STEPS_LAYERS for name in ("flash", "efficient")}
    ).reset_index()
    rows = rows.rename(columns={"batch_size": "batch", "seq_len": "seq"})
    return rows.assign(
        heads=STEPS_HEADS, kv_heads=STEPS_KV, head_dim=STEPS_DIM, v_head_dim=STEPS_DIM
    )


def h100_attention(folder: Path) -> pd.DataFrame:
    """CuDNN's causal attention on H100 at its power limit: alone, and inside a step."""
    series = pd.read_parquet(folder / "h100_device" / "kernel_series.parquet")
    alone = series[(series.kind == "attn") & (series.call % 64 != 0)]
    alone = alone[~alone.kernel.astype(str).str.contains("bwd|backward")]
    median = float(alone.duration_us.median()) * 1e-6
    # the README of h100_device: backward alone; of the eager step, with the backward's helpers
    shapes = [
        (1, 16, 16, 8192, False, median), (1, 16, 16, 8192, True, 1.477e-3),
        (2, 16, 8, 4096, False, 276e-6), (2, 16, 8, 4096, True, (779 + 86) * 1e-6),
    ]  # fmt: skip
    names = ["batch", "heads", "kv_heads", "seq", "backward", "seconds"]
    rows = pd.DataFrame(shapes, columns=names)
    return add_work(rows.assign(head_dim=128, v_head_dim=128, window=0.0, full=False))


def h100_norms() -> pd.DataFrame:
    """PyTorch's RMSNorm on H100 at its power limit: alone, and in a step (README of h100_device).

    A step's norms of 8,192 x 2,048 move 2 passes at 2.4 TB/s forward, 5 at 2.0 TB/s backward.
    """
    n_bytes = 2.0 * 8192 * 2048
    rows = [
        ("forward", 8192, 16384, 288.9e-6), ("forward", 8192, 2048, 2.0 * n_bytes / 2.4e12),
        ("backward", 8192, 2048, 5.0 * n_bytes / 2.0e12),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["way", "rows", "columns", "seconds"])


def products(folder: Path, gpu: str) -> pd.DataFrame:
    """MI300X's products: dtype, backward (both gradients together), m, n, k."""
    wide = pd.read_csv(folder / "kernel_tables" / f"{gpu}_gemm_fwd_bwd.csv")
    both = [
        wide.assign(backward=name == "bwd", seconds=wide[f"{name}_ms"] * 1e-3)
        for name in ("fwd", "bwd")
    ]
    rows = pd.concat(both)
    work = 2.0 * rows.m.astype(float) * rows.n * rows.k
    return rows.assign(flop=np.where(rows.backward, 2.0, 1.0) * work)


def grouped_products(folder: Path) -> pd.DataFrame:
    """MI300X's grouped products: dtype, backward, experts, m of each, n, k."""
    wide = pd.read_csv(folder / "kernel_tables" / "mi300x_grouped_gemm_fwd_bwd.csv")
    both = [
        wide.assign(backward=name == "bwd", seconds=wide[f"{name}_ms"] * 1e-3)
        for name in ("fwd", "bwd")
    ]
    rows = pd.concat(both)
    rows = rows[(rows.dtype == "bf16") | ~rows.backward]
    work = 2.0 * rows.experts.astype(float) * rows.m * rows.n * rows.k
    return rows.assign(flop=np.where(rows.backward, 2.0, 1.0) * work)


def expert_layers(folder: Path, gpu: str) -> pd.DataFrame:
    """Experts' MLPs: dtype, distribution, experts here, m of each, hidden, width, gates, sweep.

    A sweep is what was collected in one go: one model and split, by tokens.
    """
    rows = collected(folder, gpu, "moe")
    rows = rows[
        ~rows.kernel_source.str.contains("min_latency") & (rows.moe_dtype != "w4a8_mxfp4_mxfp8")
    ]
    rows = rows.assign(
        experts=rows.num_experts / rows.moe_ep_size,
        m=rows.num_tokens.astype(float) * rows.topk / rows.num_experts,
        width=rows.inter_size / rows.moe_tp_size,
        gates=np.where(rows.kernel_source.str.contains("nongated"), 1.0, 2.0),
        dtype=rows.moe_dtype.replace(DTYPES),
    )
    keys = ["hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size"]
    rows = rows[(rows.width >= 128) & (rows.m >= 8)]
    model = rows[keys[:4]].astype(str).agg("-".join, axis=1)
    split = rows[keys[4:]].astype(str).agg("-".join, axis=1)
    return rows.rename(columns={"hidden_size": "hidden"}).assign(
        model=model, sweep=model + "/" + split
    )


def norms(folder: Path, gpu: str) -> pd.DataFrame:
    """Norms of H200 and GB200: norm, backend, backward, rows, columns."""
    wide = pd.read_csv(folder / "attention_training" / "norms.csv")
    wide = wide[wide.device == gpu]
    both = [
        wide.assign(backward=name == "bwd", seconds=wide[f"{name}_time_ms"] * 1e-3)
        for name in ("fwd", "bwd")
    ]
    rows = pd.concat(both).dropna(subset=["seconds"])
    return rows.assign(norm=rows.norm_type, backend=rows.backend.map(NORMS))


SCORE_BYTES = 2.0  # of the score matrix that an unfused product writes or reads
UNFUSED_PRODUCTS = {False: 2.0, True: 4.0}  # forward, backward


def a100_unfused(folder: Path, products: KernelTable, copy: KernelFit) -> pd.DataFrame:
    """Causal attention of A100 kernel by kernel: Megatron's softmax as measured, and products.

    A batched product has the rate of one whose rows are those of all heads, and moves the scores.
    """
    rows = streamed(folder, "a100", "ScaledUpperTriangMaskedSoftmax")
    rows = rows.rename(columns={"b": "batch", "h": "heads", "l": "seq"})
    both = [rows.assign(head_dim=float(dim), v_head_dim=float(dim)) for dim in (64, 128)]
    rows = pd.concat(both).assign(kv_heads=lambda x: x.heads, window=0.0, full=False)
    byte_s = next(term.coefficient for term in copy.terms if term.powers)
    seconds = [
        UNFUSED_PRODUCTS[r.backward]
        * max(
            products.seconds(m=r.batch * r.heads * r.seq, n=r.seq, k=r.head_dim),
            SCORE_BYTES * byte_s * r.batch * r.heads * r.seq**2,
        )
        for r in rows.itertuples()
    ]
    return add_work(rows.assign(softmax=rows.seconds, seconds=rows.seconds + seconds))


def streamed(folder: Path, gpu: str, kind: str) -> pd.DataFrame:
    """estimate-train-time's memory-bound kernels of A100: backward, rows, columns."""
    who = {"a100": "Perlmutter__NVIDIAA100-SXM4-80GB", "gh200": "Vista__NVIDIAGH200120GB"}[gpu]
    wide = pd.read_csv(folder / "kernel_tables" / "ett" / f"{who}_{kind}_fp16.csv").dropna()
    both = [
        wide.assign(backward=name == "B", seconds=wide[f"{name}_dur(us)"] * 1e-6)
        for name in ("F", "B")
    ]
    rows = pd.concat(both)
    return rows.assign(rows=rows.b * rows.l, columns=rows.dim) if "dim" in rows else rows


DISTURBED = {"gb200": ["Qwen/Qwen3.5-4B"]}  # 1.7 times as long as a model of the same sizes


def a100_linear(folder: Path) -> pd.DataFrame:
    """Linear layers of A100 by estimate-train-time: backward (both gradients), m, n, k."""
    sides = {  # output and input width over hidden; which of them tensor parallelism divides
        "linear1": (3.0, 1.0, "n"), "linear2": (1.0, 1.0, "k"), "linear3": (4.0, 1.0, "n"),
        "linear4": (1.0, 4.0, "k"),
    }  # fmt: skip
    out = []
    for kind, (n, k, split) in sides.items():
        rows = streamed(folder, "a100", kind)
        rows = rows.assign(m=rows.rows, n=n * rows.dim, k=k * rows.dim)
        out.append(rows.assign(**{split: rows[split] / rows.mp}))
    return pd.concat(out)


RECURRENT = {"gated_delta": "gdn", "kda": "kda", "mamba2": "mamba2"}


def recurrent(folder: Path, gpu: str, kind: str) -> pd.DataFrame:
    """Forward of a recurrent layer, its kernels added: tokens, seq, heads, head_dim, state."""
    rows = collected(folder, gpu, RECURRENT[kind])
    if not len(rows):
        return rows
    rows = rows[(rows.seq_len >= 512) & ~rows.model_name.isin(DISTURBED.get(gpu, []))].rename(
        columns={"num_tokens": "tokens", "seq_len": "seq", "num_v_heads": "heads",
                 "nheads": "heads", "head_v_dim": "head_dim", "d_state": "state",
                 "n_groups": "groups"}
    )  # fmt: skip
    keys = ["tokens", "seq", "heads", "head_dim", "model_name"]
    keys += ["state", "groups"] * (kind == "mamba2")
    parts = rows.groupby([*keys, "kernel_source"]).seconds.mean().reset_index()
    both = parts.groupby(keys).seconds.agg(["sum", "size"]).reset_index()
    return both[both["size"] == both["size"].max()].rename(columns={"sum": "seconds"})
