"""Durations of kernels by shape of every device, fitted to measured ones or carried over.

`kernels` returns a device's; `groups` the fits that rest on rows of its own, for validation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import kernelrows
import numpy as np
import pandas as pd
from kernelrows import ATTENTION_SIZES, COLLECTOR
from tables import gemm_tables

from prism.cluster.power import SILICON
from prism.distributions.kerneltables import (
    FitTerm,
    KernelFit,
    KernelTable,
    fit_kernel,
    fit_terms,
    term_values,
)
from prism.jobs.devices import DEVICES

CUDNN = "NVIDIA/cudnn-frontend (MIT), short runs near the full clock"
TURBO = "AMD-AGI/Primus-Turbo 221d75f (MIT)"
ETT = "DebarghaG/estimate-train-time 1ac4d5e (MIT)"
OWN = "H100 at its limit of 700 W (h100_device)"

Table = KernelTable | KernelFit
Powers = Sequence[Mapping[str, float]]

# Whose kernels a device without its own is given.
RELATIVE = {
    "h100": "h200", "h200": "h100", "b200": "gb200", "b300": "b200", "gb300": "gb200",
    "gb200": "b200",
}  # fmt: skip

ATTENTION_TERMS: Powers = (
    {},
    {"flop": 1.0},
    {"scores": 1.0},  # exponentials, whatever the head size
    {"batch": 1.0, "heads": 1.0, "seq": 1.0, "head_dim": 1.0},  # diagonal tiles, prologue
    {"batch": 1.0, "kv_heads": 1.0, "seq": 1.0, "head_dim": 1.0},
    {"batch": 1.0, "heads": 1.0, "seq": 1.0},
    {"seq": 1.0, "head_dim": 1.0},  # one tile alone, where tiles do not fill the GPU
    {"scores": 1.0, "head_dim": 3.0},  # tiles that overflow registers
)
GEMM_TERMS: Powers = (
    {},
    {"flop": 1.0},
    {"m": 1.0, "k": 1.0},
    {"n": 1.0, "k": 1.0},
    {"m": 1.0, "n": 1.0},
    {"k": 1.0},
)
GROUPED_TERMS: Powers = (
    {"flop": 1.0},
    {"experts": 1.0, "n": 1.0, "k": 1.0},  # weights, and tiles half filled
    {"experts": 1.0, "m": 1.0, "k": 1.0},
    {"experts": 1.0, "m": 1.0, "n": 1.0},
    {"n": 1.0, "k": 1.0},
    {"k": 1.0},
    {"experts": 1.0, "k": 1.0},
    {"experts": 1.0, "n": 1.0},
    {"experts": 1.0},
)
NORM_TERMS: Powers = (
    {},
    {"rows": 1.0, "columns": 1.0},
    {"rows": 1.0},
    {"columns": 1.0},
    {"rows": 1.0, "columns": 2.0},  # rows that do not fit into one block
)
RECURRENT_TERMS: Powers = (
    {},
    {"tokens": 1.0, "heads": 1.0, "head_dim": 1.0},
    {"tokens": 1.0, "head_dim": 1.0},
    {"tokens": 1.0},
    {"seq": 1.0},  # chunks of one sequence come after each other
)

SHAPE_SHARE = 0.3  # of another kernel's shapes in a fit, where they lie outside its own rows
SLOW_SWEEP = 0.3  # log of measured over fitted, from which on a sweep had an untuned kernel
STREAM_SHARE = 0.8  # of the memory bandwidth, of what moves experts' tokens


@dataclass(frozen=True)
class Group:
    """Rows of one kernel on one device, and how they are fitted."""

    gpu: str
    name: str
    rows: pd.DataFrame  # sizes, seconds
    fit: Callable[[pd.DataFrame], KernelFit]
    folds: str  # column whose values are left out one after the other
    fastest: float = 0.0  # of rows that are whole layers of experts: no product's rate is above

    def predict(self, known: pd.DataFrame, rows: pd.DataFrame) -> np.ndarray:
        """Durations of rows by a fit of others [s]."""
        if self.fastest:
            fit, rest = _fit_layers(self.gpu, known, "", self.fastest)
            return np.asarray(_both_products(fit, rows) + rest(rows))
        return predicted(self.fit(known), rows)


def predicted(table: Table, rows: pd.DataFrame) -> np.ndarray:
    """Durations of rows [s]."""
    names = [str(c) for c in rows.columns if c in _SIZES]
    records = rows[names].to_dict("records")
    return np.array([table.seconds(**{str(k): float(v) for k, v in r.items()}) for r in records])


_SIZES = {
    *ATTENTION_SIZES, "scores", "flop", "m", "n", "k", "experts", "rows", "columns", "bytes",
    "tokens", "state", "groups",
}  # fmt: skip


def _columns(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: rows[name].to_numpy(np.float64) for name in names}


def _plain(terms: Powers, names: Sequence[str], source: str) -> Callable[[pd.DataFrame], KernelFit]:
    """Fit of rows as they are; sizes beside `names` are derived and have no ends."""
    derived = [n for n in ("flop", "scores") if any(n in term for term in terms)]

    def fit(rows: pd.DataFrame) -> KernelFit:
        text = source.format(n=len(rows))
        found = fit_kernel(terms, _columns(rows, [*names, *derived]), rows.seconds, text)
        return replace(found, ends={name: found.ends[name] for name in names})

    return fit


# attention


def _shape_grid(low: float, full: bool, backward: bool) -> pd.DataFrame:
    """Sizes of training that few kernels were measured at: small heads and short sequences."""
    rows = [
        (batch, heads, min(heads, kv), seq, dim, dim)
        for batch, heads, kv, seq, dim in product(
            (1, 4), (4, 16, 64), (2, 64), (512, 1024, 2048, 4096, 8192), (64, 128, 256)
        )
    ]
    rows += [(b, h, h, s, 192, 128) for b, h, s in product((1, 4), (4, 16, 64), (2048, 8192))]
    table = pd.DataFrame(rows, columns=list(ATTENTION_SIZES)).drop_duplicates()
    return kernelrows.add_work(table.assign(window=0.0, full=full, backward=backward))


class Kernels:
    """All fits of the measured data in a folder, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shape = cache(self._shape)
        self.attention = cache(self._attention)
        self.groups = cache(self._groups)
        self.singles = cache(lambda gpu: gemm_tables(folder, gpu)[0])

    # shape dependence from inference kernels

    def _shape(self, gpu: str) -> KernelFit:
        """Causal forward by shape, of TensorRT-LLM's kernels on a device of the same chip."""
        rows = kernelrows.inference_attention(self.folder, gpu)
        if gpu == "a100":  # one head size: others as on H100
            other = kernelrows.inference_attention(self.folder, "h100")
            same = other[other.head_dim == 128]
            rate = np.mean(np.log(self._fit_shape(rows, gpu, same) / same.seconds))
            other = other[other.head_dim != 128].assign(seconds=lambda x: x.seconds * np.exp(rate))
            rows = pd.concat([rows, other])
        return self._shape_fit(rows, gpu)

    def _shape_fit(self, rows: pd.DataFrame, gpu: str) -> KernelFit:
        source = f"{{n}} forwards of TensorRT-LLM on {gpu.upper()}"
        return _plain(ATTENTION_TERMS, ATTENTION_SIZES, source)(rows)

    def _fit_shape(self, rows: pd.DataFrame, gpu: str, at: pd.DataFrame) -> np.ndarray:
        return predicted(self._shape_fit(rows, gpu), at)

    def _attention_fit(
        self, gpu: str, source: str, full: bool, backward: bool
    ) -> Callable[[pd.DataFrame], KernelFit]:
        """Fit of training kernels whose small shapes are those of inference kernels, scaled."""
        shape = self.shape({"a100": "a100", "b200": "b200", "gb200": "b200"}.get(gpu, "h100"))
        around = _shape_grid(0.0, full, backward)

        def fit(rows: pd.DataFrame) -> KernelFit:
            ratio = float(np.exp(np.mean(np.log(rows.seconds / predicted(shape, rows)))))
            known = around.head_dim.isin(rows.head_dim.unique())
            known &= around.batch * around.heads >= (rows.batch * rows.heads).min()
            rest = around[~(known & (around.flop >= 0.5 * rows.flop.min()))]
            rest = rest.assign(seconds=ratio * predicted(shape, rest))
            both = pd.concat([rows, rest])
            share = np.r_[
                np.full(len(rows), 1.0 / len(rows)), np.full(len(rest), SHAPE_SHARE / len(rest))
            ]
            names = [*ATTENTION_SIZES, "flop", "scores"]
            text = f"{source.format(n=len(rows))}; small shapes: {shape.source}"
            found = fit_kernel(ATTENTION_TERMS, _columns(both, names), both.seconds, text, share)
            error = np.log(predicted(found, rows) / rows.seconds)
            ends = {
                name: (min(float(rows[name].min()), shape.ends[name][0]),
                       max(float(rows[name].max()), shape.ends[name][1]))
                for name in ATTENTION_SIZES
            }  # fmt: skip
            return replace(found, ends=ends, n=len(rows), sd=round(float(error.std()), 4))

        return fit

    def _attention(self, gpu: str) -> tuple[list[Group], dict[str, KernelFit]]:
        """Return groups of attention, and deterministic backwards by their ratio."""
        rows = kernelrows.attention(self.folder, gpu)
        whose = TURBO if gpu == "mi300x" else CUDNN
        whose += ", A100 PCIe" * (gpu == "a100")
        groups, fixed = [], {}
        keys = ["backend", "dtype", "full", "backward"]
        usual = rows[~rows.deterministic.astype(bool)]
        # MI300X runs another kernel where values have fewer dimensions than keys
        usual = usual.assign(latent=(usual.head_dim != usual.v_head_dim) & (gpu == "mi300x"))
        for (backend, dtype, full, backward, latent), own in usual.groupby([*keys, "latent"]):
            mask, way = "full" if full else "causal", "backward" if backward else "forward"
            name = f"attention/{backend}/{dtype}/{mask}/{way}{'/latent' if latent else ''}"
            source = f"measured: {{n}} kernels on {gpu.upper()}; {whose}"
            if backend == "math":
                fit = _plain(({}, {"scores": 1.0}), ATTENTION_SIZES, source)
            else:
                fit = self._attention_fit(gpu, source, bool(full), bool(backward))
            groups.append(Group(gpu, name, own, fit, "heads" if latent else "seq"))
            both = self._deterministic(rows, backend, dtype) if backward and not latent else None
            if both is not None:
                found = fit(own)
                note = f"{found.source}; deterministic {both[0]:.2f} times, {both[1]}"
                fixed[name.replace("backward", "deterministic")] = found.scaled(both[0], note)
        return groups, fixed

    @staticmethod
    def _deterministic(rows: pd.DataFrame, backend: str, dtype: str) -> tuple[float, str] | None:
        own = rows[(rows.backend == backend) & (rows.dtype == dtype) & rows.backward]
        keys = ["full", "batch", "heads", "kv_heads", "seq", "head_dim"]
        if "cudnn" in own:
            keys.append("cudnn")
        wide = own.assign(det=own.deterministic.astype(bool)).pivot_table(
            index=keys, columns="det", values="seconds"
        )
        if wide.shape[1] < 2:
            return None
        ratio = np.log(wide[True] / wide[False]).dropna()
        return float(np.exp(ratio.mean())), f"{len(ratio)} pairs"

    # all groups with rows of the device's own

    def _groups(self, gpu: str) -> list[Group]:
        out: list[Group] = []
        if gpu in ("a100", "h200", "b200", "gb200", "mi300x"):
            out += self.attention(gpu)[0]
        if gpu == "mi300x":
            out += self._turbo()
        if gpu in kernelrows.COLLECTED:
            out += self._experts(gpu)
        if gpu in ("h200", "gb200"):
            rows = kernelrows.norms(self.folder, gpu)
            rows = rows[rows.norm == "rms_norm"]
            for (backend, backward), own in rows.groupby(["backend", "backward"]):
                name = f"rms_norm/{backend}/{'backward' if backward else 'forward'}"
                source = f"measured: {{n}} norms on {gpu.upper()}; {CUDNN}"
                fit = _plain(NORM_TERMS, ("rows", "columns"), source)
                out.append(Group(gpu, name, own, fit, "model"))
        if gpu == "a100":
            out += self._streamed()
        if gpu in ("h100", "h200", "b200", "gb200"):
            for kind in ("gated_delta", "kda"):
                rows = kernelrows.recurrent(self.folder, gpu, kind)
                source = f"measured: {{n}} forwards of all kernels on {gpu.upper()}; {COLLECTOR}"
                fit = _plain(RECURRENT_TERMS, ("tokens", "seq", "heads", "head_dim"), source)
                out.append(Group(gpu, f"{kind}/forward", rows, fit, "seq"))
        return out

    def _turbo(self) -> list[Group]:
        out = []
        for (dtype, backward), own in kernelrows.products(self.folder, "mi300x").groupby(
            ["dtype", "backward"]
        ):
            name = f"gemm/{dtype}{'/backward' if backward else ''}"
            what = " with quantizing" if dtype == "fp8" else ""
            source = f"measured: {{n}} products{what} on MI300X; {TURBO}"
            fit = _plain(GEMM_TERMS, ("m", "n", "k"), source)
            out.append(Group("mi300x", name, own, fit, "model"))
        for (dtype, backward), own in kernelrows.grouped_products(self.folder).groupby(
            ["dtype", "backward"]
        ):
            name = f"grouped_gemm/{dtype}/{'backward' if backward else 'forward'}"
            source = f"measured: {{n}} grouped products on MI300X; {TURBO}"
            fit = _plain(GROUPED_TERMS, ("experts", "m", "n", "k"), source)
            out.append(Group("mi300x", name, own, fit, "case"))
        return out

    def _streamed(self) -> list[Group]:
        out = []
        source = f"measured: {{n}} kernels on A100; {ETT}"
        for kind, name in (("layernorm", "layer_norm/eager"), ("RMSlayernorm", "rms_norm/unfused")):
            for backward, own in kernelrows.streamed(self.folder, "a100", kind).groupby("backward"):
                fit = _plain(NORM_TERMS, ("rows", "columns"), source)
                way = "backward" if backward else "forward"
                out.append(Group("a100", f"{name}/{way}", own, fit, "dim"))
        rows = kernelrows.streamed(self.folder, "a100", "res_add")
        rows = rows[~rows.backward].assign(bytes=lambda x: 6.0 * x.rows * x["columns"])

        def fit(rows: pd.DataFrame) -> KernelFit:
            fixed = self._fixed()
            text = f"{source.format(n=len(rows))}; fixed time of a norm on H200"
            found = _plain(({"bytes": 1.0},), ("bytes",), text)(
                rows.assign(seconds=rows.seconds - fixed.coefficient)
            )
            return replace(found, terms=(fixed, *found.terms))

        out.append(Group("a100", "memory/copy", rows, fit, "dim"))
        every = kernelrows.a100_unfused(self.folder, self.singles("a100")["gemm/bf16"], fit(rows))
        for backward, own in every.groupby("backward"):
            name = f"attention/math/bf16/causal/{'backward' if backward else 'forward'}"
            out.append(Group("a100", name, own, _fit_unfused, "seq"))
        return out

    def _fixed(self) -> FitTerm:
        """Return the fixed time of a memory-bound kernel: a fused norm's on H200."""
        rows = kernelrows.norms(self.folder, "h200")
        own = rows[(rows.norm == "rms_norm") & (rows.backend == "te") & ~rows.backward]
        fit = _plain(NORM_TERMS, ("rows", "columns"), "")(own)
        return next(term for term in fit.terms if not term.powers)

    # experts

    def _experts(self, gpu: str) -> list[Group]:
        """Return grouped products from layers of experts: two products and what moves tokens."""
        every = kernelrows.expert_layers(self.folder, gpu)
        even = "power_law_1.01" if gpu == "a100" else "balanced"
        out = []
        for dtype, rows in every[every.distribution == even].groupby("dtype"):
            fastest = self._fastest(gpu, str(dtype))
            kept, left = self._tuned(gpu, rows, fastest)
            source = (
                f"fitted: {len(kept)} layers of two products on {gpu.upper()}, moving tokens and "
                f"activation taken out, {100 * left:.0f} % with untuned kernels left out; "
                f"{COLLECTOR}"
            )
            if gpu == "a100":
                source = f"{source}; experts of unequal load (power law 1.01)"

            fit = partial(_fit_one, gpu, source, fastest)
            name = f"grouped_gemm/{dtype}/forward"
            out.append(Group(gpu, name, kept, fit, "model", fastest))
        return out

    def _fastest(self, gpu: str, dtype: str) -> float:
        """Rate that one of a hundred single products is above [flop/s]."""
        return float(np.quantile(self.singles(gpu)[f"gemm/{dtype}"].rate, 0.99))

    def _tuned(self, gpu: str, rows: pd.DataFrame, fastest: float) -> tuple[pd.DataFrame, float]:
        """Rows without the sweeps that run on a kernel far slower than all others of the kind."""
        keep = np.ones(len(rows), bool)
        for _ in range(4):
            fit, rest = _fit_layers(gpu, rows[keep], "", fastest)
            error = np.log(rows.seconds / (_both_products(fit, rows) + rest(rows)))
            slow = error.groupby(rows.sweep).transform("median") > SLOW_SWEEP
            keep = ~slow.to_numpy()
        return rows[keep], 1.0 - float(keep.mean())


def _fit_unfused(rows: pd.DataFrame) -> KernelFit:
    """Fit of A100's attention kernel by kernel; each softmax is in the rows of two head sizes."""
    n = len(rows) // rows.head_dim.nunique()
    source = (
        f"measured: {n} of Megatron's fused scale, mask and softmax on A100 in fp16; {ETT}; "
        "with batched products over all scores by the table of products"
    )
    terms: Powers = ({}, {"scores": 1.0}, {"flop": 1.0})
    return replace(_plain(terms, ATTENTION_SIZES, source)(rows), n=n)


def _products_of(rows: pd.DataFrame) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Sizes of the two products of a layer."""
    experts, m = rows.experts.to_numpy(float), rows.m.to_numpy(float)
    width, hidden = rows.width.to_numpy(float), rows.hidden.to_numpy(float)
    up = {"experts": experts, "m": m, "n": rows.gates.to_numpy(float) * width, "k": hidden}
    down = {"experts": experts, "m": m, "n": hidden, "k": width}
    for one in (up, down):
        one["flop"] = 2.0 * experts * m * one["n"] * one["k"]
    return up, down


def _fit_one(gpu: str, source: str, fastest: float, rows: pd.DataFrame) -> KernelFit:
    return _fit_layers(gpu, rows, source, fastest)[0]


def _both_products(fit: KernelFit, rows: pd.DataFrame) -> np.ndarray:
    powers, factors = [t.powers for t in fit.terms], [t.coefficient for t in fit.terms]
    up, down = (term_values(powers, each, len(rows)) for each in _products_of(rows))
    return np.asarray((up + down) @ np.array(factors))


def _fit_layers(
    gpu: str, rows: pd.DataFrame, source: str, fastest: float
) -> tuple[KernelFit, Callable[[pd.DataFrame], np.ndarray]]:
    """Fit of one product, and what else a layer takes: fixed, by tokens, and bytes moved.

    No product is faster than the `fastest` single one [flop/s]: what was collected with small or
    equal numbers as operands draws less power, and runs faster than training does.
    """
    up, down = _products_of(rows)
    design = term_values(GROUPED_TERMS, up, len(rows)) + term_values(GROUPED_TERMS, down, len(rows))
    moved = _moved(gpu, rows)
    rest = np.c_[np.ones(len(rows)), rows.num_tokens * rows.hidden]
    seconds = rows.seconds.to_numpy()
    octave = np.round(np.log2(rows.m)).astype(int)
    share = 1.0 / octave.map(octave.value_counts()).to_numpy()  # each octave of m the same
    alone = np.maximum(seconds - moved, 0.3 * seconds)
    least = np.zeros(design.shape[1] + rest.shape[1])
    least[0] = 1.0 / fastest  # of the flop
    found = fit_terms(np.c_[design, rest], alone, share, least)
    terms = tuple(
        FitTerm(float(f"{c:.6g}"), dict(p))
        for c, p in zip(found[: len(GROUPED_TERMS)], GROUPED_TERMS, strict=True)
        if c > 0.0
    )
    fixed, token = found[len(GROUPED_TERMS) :]
    ends = {
        name: (float(min(up[name].min(), down[name].min())),
               float(max(up[name].max(), down[name].max())))
        for name in ("experts", "m", "n", "k")
    }  # fmt: skip
    fit = KernelFit(terms, ends, source, len(rows))

    def other(at: pd.DataFrame) -> np.ndarray:
        return np.asarray(_moved(gpu, at) + fixed + token * at.num_tokens * at.hidden)

    error = np.log((_both_products(fit, rows) + other(rows)) / seconds)
    return replace(fit, sd=round(float(error.std()), 4)), other


def _moved(gpu: str, rows: pd.DataFrame) -> np.ndarray:
    """Time of permuting, activation and combining in bf16, by their bytes [s]."""
    tokens = rows.experts * rows.m
    n_bytes = 2.0 * tokens * (4.0 * rows.hidden + (rows.gates + 1.0) * rows.width)
    return np.asarray(n_bytes / (STREAM_SHARE * DEVICES[gpu].memory_bytes_per_s))


# carried over from relatives

ASSUMED = "assumption, carried over from"
STEPS_MHZ, FULL_MHZ = 1500.0, SILICON["h200"].attention_mhz  # locked in the 18 steps; short runs
UNMEASURED_BACKWARD = 2.5  # of recurrent layers, over the forward


def _carry(table: KernelFit, owner: str, ratio: float, how: str) -> KernelFit:
    """Return a relative's fit, `ratio` times as long."""
    text = table.source.removeprefix("measured: ").removeprefix("fitted: ")
    note = f"{ASSUMED} {owner.upper()}: {text}; {how}, {ratio:.3g} times as long"
    return table.scaled(ratio, note)


def _by_memory(owner: str, gpu: str) -> tuple[float, str]:
    ratio = DEVICES[owner].memory_bytes_per_s / DEVICES[gpu].memory_bytes_per_s
    return ratio, "by the memory bandwidth"


def _by_peak(owner: str, gpu: str, dtype: str) -> tuple[float, str]:
    ratio = DEVICES[owner].flop_per_s(dtype) / DEVICES[gpu].flop_per_s(dtype)
    return ratio, "by the data sheets' peaks"


def _mean_ratio(seconds: pd.Series, of: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(seconds.to_numpy() / of))))


def _turned(fit: KernelFit) -> tuple[FitTerm, ...]:
    """Terms of both gradients of a grouped product, as two products of a forward's kind."""
    turns = {"m": "m", "n": "k", "k": "n"}, {"m": "k", "n": "n", "k": "m"}
    out = []
    for turn in turns:
        for term in fit.terms:
            powers = {turn.get(name, name): p for name, p in term.powers.items()}
            half = 0.5 if "flop" in powers else 1.0  # flop are those of both
            out.append(FitTerm(float(f"{half * term.coefficient:.6g}"), powers))
    return tuple(out)


class Carried(Kernels):
    """Kernels of every device: its own, and what others give it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.own = cache(self._own)
        self.kernels = cache(self._kernels)

    def _kernels(self, gpu: str) -> dict[str, Table]:
        """Return all kernels of a device by name."""
        out: dict[str, Table] = dict(self.own(gpu))
        for part in (self._attentions, self._norms, self._copy, self._grouped, self._recurrent):
            out |= {name: fit for name, fit in part(gpu).items() if name not in out}
        return dict(sorted(out.items()))

    # attention

    def _attentions(self, gpu: str) -> dict[str, KernelFit]:
        out: dict[str, KernelFit] = {}
        if gpu == "h200":
            out |= self._hopper_flash()
        if gpu == "h100":
            h200 = {n: f for n, f in self.kernels("h200").items() if isinstance(f, KernelFit)}
            forward, backward = self._h100_over_h200()
            for name, fit in h200.items():
                if name.startswith("attention/") and "/math/" not in name:
                    slow = forward if name.endswith("forward") else backward
                    ratio = slow if name.split("/")[1] in ("cudnn", "fa4") else 1.0
                    out[name] = _carry(fit, "h200", ratio, f"four kernels of {OWN}")
        if gpu in ("b200", "gb200"):
            owner = RELATIVE[gpu]
            rows = self.attention("b200")[0]
            ratio, how = _by_peak(owner, gpu, "bf16")
            pairs = [
                _mean_ratio(g.rows.seconds, predicted(self.own("gb200")[g.name], g.rows))
                for g in rows
                if "/cudnn/" in g.name
            ]
            for name, fit in self.own(owner).items():
                if name.startswith("attention/cudnn/") and gpu == "b200":
                    ratio, how = float(np.exp(np.mean(np.log(pairs)))), "14 kernels on both"
                if name.startswith("attention/") and "/math/" not in name:
                    out[name] = _carry(fit, owner, ratio, how)
        if gpu in ("b300", "gb300"):
            owner = RELATIVE[gpu]
            for name, fit in self.kernels(owner).items():
                if name.startswith("attention/") and isinstance(fit, KernelFit):
                    out[name] = _again(fit, owner)
        factor, n = self._efficient()
        flash = {**self.own(gpu), **out}
        if gpu not in ("mi300x", "b300", "gb300"):
            for name, fit in flash.items():
                kind, backend, *rest = name.split("/")
                if (kind, backend) == ("attention", "fa2") and "deterministic" not in rest:
                    note = f"{ASSUMED} FlashAttention-2, {factor:.2f} times as long, from {n} steps"
                    note += " of a job on H200; " + fit.source
                    out["/".join([kind, "efficient", *rest])] = fit.scaled(factor, note)
        ratio, how = _by_memory("b200", gpu)
        for name, fit in self.own("b200").items():
            if "/math/" in name:
                own = self.own(gpu).get(name)
                own = out[name] = own or _carry(fit, "b200", ratio, how)
                note = f"{ASSUMED} the causal mask, which it computes in full: {own.source}"
                terms = tuple(
                    replace(t, coefficient=t.coefficient * (0.5 if t.powers else 1.0))
                    for t in own.terms
                )
                out[name.replace("causal", "full")] = replace(own, terms=terms, source=note)
        return out

    def _h100_over_h200(self) -> tuple[float, float]:
        """How many times longer cuDNN's attention takes on H100 than on H200: forward, backward."""
        rows = kernelrows.h100_attention(self.folder)
        own = self.own("h200")
        out = []
        for backward, part in rows.groupby("backward"):
            fit = own[f"attention/cudnn/bf16/causal/{'backward' if backward else 'forward'}"]
            out.append(_mean_ratio(part.seconds, predicted(fit, part)))
        return out[0], out[1]

    def step_rows(self, backend: str) -> pd.DataFrame:
        """Forward and backward of a layer at the full clock: cuDNN's and the steps' difference."""
        rows = kernelrows.step_attention(self.folder)
        own, clock = self.own("h200"), STEPS_MHZ / FULL_MHZ
        seconds = clock * rows[backend].to_numpy()
        for way in ("forward", "backward"):
            both = self.with_work(rows, way == "backward")
            seconds = seconds + predicted(own[f"attention/cudnn/bf16/causal/{way}"], both)
        return rows.assign(seconds=seconds)

    @staticmethod
    def with_work(rows: pd.DataFrame, backward: bool) -> pd.DataFrame:
        """Add a causal pass and its work."""
        return kernelrows.add_work(rows.assign(window=0.0, full=False, backward=backward))

    def _hopper_flash(self) -> dict[str, KernelFit]:
        """FlashAttention-2 on Hopper: A100's, by its differences from cuDNN's in six steps."""
        flash = {n: f for n, f in self.own("a100").items() if n.startswith("attention/fa2/")}
        rows = self.step_rows("flash")
        both = sum(
            predicted(flash[f"attention/fa2/bf16/causal/{way}"],
                      self.with_work(rows, way == "backward"))
            for way in ("forward", "backward")
        )  # fmt: skip
        ratio = _mean_ratio(rows.seconds, np.asarray(both))
        how = "six steps of a job on H200"
        return {name: _carry(fit, "a100", ratio, how) for name, fit in flash.items()}

    def _efficient(self) -> tuple[float, int]:
        """How many times longer memory-efficient attention takes than FlashAttention-2."""
        rows = self.step_rows("efficient")
        return _mean_ratio(rows.seconds, self.step_rows("flash").seconds.to_numpy()), len(rows)

    # what memory binds

    def _norms(self, gpu: str) -> dict[str, KernelFit]:
        out = {}
        owner = gpu if gpu in ("h200", "gb200") else ("h200" if gpu in _OLDER else "gb200")
        ratio, how = _by_memory(owner, gpu)
        for name, fit in self.own(owner).items():
            if name.startswith("rms_norm/"):
                out[name] = fit if owner == gpu else _carry(fit, owner, ratio, how)
        if gpu == "h100":
            for way, rows in kernelrows.h100_norms().groupby("way"):
                fit = self.own(owner)[f"rms_norm/eager/{way}"]
                times = _mean_ratio(rows.seconds, predicted(fit, rows))
                out[f"rms_norm/eager/{way}"] = _carry(fit, owner, times, f"{len(rows)} of {OWN}")
        layer = kernelrows.norms(self.folder, owner)
        for _, row in layer[layer.norm == "layer_norm"].iterrows():
            name = f"{row.backend}/{'backward' if row.backward else 'forward'}"
            fit = self.own(owner)[f"rms_norm/{name}"]
            times = row.seconds / fit.seconds(
                rows=float(row["rows"]), columns=float(row["columns"])
            )
            note = f"{ASSUMED} RMSNorm on {owner.upper()}, {times:.2f} times as long by one kernel"
            out[f"layer_norm/{name}"] = fit.scaled(times * ratio, f"{note}; {fit.source}")
        for name, fit in self.own("a100").items():
            if name.startswith("rms_norm/unfused") and gpu != "a100":
                out[name] = _carry(fit, "a100", *_by_memory("a100", gpu))
        return out

    def _copy(self, gpu: str) -> dict[str, KernelFit]:
        series = pd.read_parquet(self.folder / "h100_device" / "kernel_series.parquet")
        rows = series[(series.kind == "copy") & (series.call % 64 != 0)]
        seconds, n_bytes = float(rows.duration_us.median()) * 1e-6, 2.0 * 2.0 * 8192 * 16384
        a100 = self.own("a100")["memory/copy"]
        fixed = self._fixed()
        rate = n_bytes / (seconds - fixed.coefficient)
        share = rate / DEVICES["h100"].memory_bytes_per_s
        rate = share * DEVICES[gpu].memory_bytes_per_s
        note = f"measured: copy of 8,192 x 16,384 on {OWN}; fixed time of a norm on H200"
        if gpu != "h100":
            note = f"{ASSUMED} H100: {100 * share:.0f} % of the memory bandwidth"
        terms = fixed, FitTerm(float(f"{1.0 / rate:.6g}"), {"bytes": 1.0})
        return {"memory/copy": KernelFit(terms, a100.ends, note, len(rows))}

    # experts, recurrent layers

    def _grouped(self, gpu: str) -> dict[str, KernelFit]:
        out: dict[str, KernelFit] = {}
        own = {n: f for n, f in self.own(gpu).items() if n.startswith("grouped_gemm/")}
        if gpu in ("b300", "gb300"):
            owner = RELATIVE[gpu]
            for name, fit in self.kernels(owner).items():
                kind, dtype, *_ = name.split("/")
                if kind == "grouped_gemm" and isinstance(fit, KernelFit):
                    out[name] = _carry(fit, owner, *_by_peak(owner, gpu, dtype))
            return out
        amd = self.own("mi300x")
        if gpu == "mi300x":
            bf16, fp8 = (own[f"grouped_gemm/{d}/forward"] for d in ("bf16", "fp8"))
            rows = next(
                g for g in self.groups("mi300x") if g.name == "grouped_gemm/fp8/forward"
            ).rows
            ratio = _mean_ratio(pd.Series(predicted(fp8, rows)), predicted(bf16, rows))
            back = own["grouped_gemm/bf16/backward"]
            note = f"{ASSUMED} bf16, {ratio:.2f} times as long as the forwards; {back.source}"
            return {"grouped_gemm/fp8/backward": back.scaled(ratio, note)}
        rows = next(g for g in self.groups("mi300x") if g.name == "grouped_gemm/bf16/backward").rows
        forward = amd["grouped_gemm/bf16/forward"]
        turned = replace(forward, terms=_turned(forward))
        ratio = _mean_ratio(rows.seconds, predicted(turned, rows))
        for name, fit in own.items():
            note = f"{ASSUMED} MI300X: both gradients are two forwards of their shapes, "
            note += f"{ratio:.2f} times as long; {fit.source}"
            both = replace(fit, terms=_turned(fit)).scaled(ratio, note)
            ends = {k: v for k, v in fit.ends.items() if k not in ("n", "k", "m")}
            out[name.replace("forward", "backward")] = replace(both, ends={**fit.ends, **ends})
        return out

    def _recurrent(self, gpu: str) -> dict[str, KernelFit]:
        out: dict[str, KernelFit] = {}
        owner = gpu if gpu in ("h100", "h200", "b200", "gb200") else RELATIVE.get(gpu, "h100")
        ratio, how = _by_memory(owner, gpu)
        for kind in ("gated_delta", "kda"):
            fit = self.own(owner)[f"{kind}/forward"]
            out[f"{kind}/forward"] = fit if owner == gpu else _carry(fit, owner, ratio, how)
        out["mamba2/forward"] = self._mamba2(owner, out["gated_delta/forward"], ratio)
        for kind in ("gated_delta", "kda", "mamba2"):
            fit = out[f"{kind}/forward"]
            text = f"assumption: {UNMEASURED_BACKWARD} times the forward; {fit.source}"
            out[f"{kind}/backward"] = fit.scaled(UNMEASURED_BACKWARD, text)
        return out

    def _mamba2(self, owner: str, delta: KernelFit, ratio: float) -> KernelFit:
        """Mamba 2: its convolution as collected, its scan as the gated delta rule's."""
        rows = kernelrows.recurrent(self.folder, owner, "mamba2")
        names = ("tokens", "seq", "heads", "head_dim", "state", "groups")
        conv = _plain(RECURRENT_TERMS, names, "")(rows).scaled(ratio, "")
        terms = list(conv.terms)
        for term in delta.terms:
            powers = dict(term.powers)
            if powers == {"tokens": 1.0, "heads": 1.0, "head_dim": 1.0}:
                powers["state"] = 1.0
                term = FitTerm(float(f"{term.coefficient / 128.0:.6g}"), powers)
            terms.append(term)
        note = "assumption: the scan as the gated delta rule's, per element of the state; "
        return KernelFit(tuple(terms), conv.ends, note + delta.source, len(rows), conv.sd)

    def _own(self, gpu: str) -> dict[str, KernelFit]:
        found = {group.name: group.fit(group.rows) for group in self.groups(gpu)}
        if gpu in ("a100", "h200", "b200", "gb200", "mi300x"):
            found |= self.attention(gpu)[1]
        return found


_OLDER = ("a100", "h100", "h200", "mi300x")


def _again(fit: KernelFit, owner: str) -> KernelFit:
    """Return a fit of a device of the same chip."""
    if fit.source.startswith("assumption"):
        return fit
    return _carry(fit, owner, 1.0, "the same")
