"""Nominal duration of one kernel by its shape, from the measured tables of a library.

Nominal is the mean of the kernel on its own; gaps between kernels are not part of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prism.common.errors import PrismError
from prism.common.text import format_share
from prism.distributions.kerneltables import KernelFit, KernelTable
from prism.distributions.library import Library
from prism.jobs.devices import DEVICES, device_key

NUMBER_BYTES = {
    "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "mxfp8": 1.0, "nvfp4": 0.5,
}  # fmt: skip
"""Bytes of a number of an operand, by dtype."""

GEMM_LARGE_S = 1e-3
"""Products from here on are distributed as ``residual/gemm_large``: profiles resolve 1 us."""

BACKENDS = {
    "attention": ("cudnn", "fa2", "fa3", "fa4", "efficient", "math"),
    "rms_norm": ("eager", "compiled", "te", "unfused"),
    "layer_norm": ("eager", "compiled", "te"),
}
"""Implementations of a kind of kernel, the default first; other kinds have one."""

STANDS_IN = {
    ("attention", "cudnn"): ("fa4", "fa2"),
    ("attention", "fa2"): ("efficient", "cudnn"),
    ("attention", "fa3"): ("cudnn", "fa2"),
    ("attention", "fa4"): ("cudnn", "fa2"),
    ("attention", "efficient"): ("fa2", "cudnn"),
    ("rms_norm", "eager"): ("compiled", "te"),
    ("rms_norm", "compiled"): ("te", "eager"),
    ("rms_norm", "te"): ("compiled", "eager"),
    ("rms_norm", "unfused"): ("eager", "compiled", "te"),
    ("layer_norm", "eager"): ("compiled", "te"),
    ("layer_norm", "compiled"): ("te", "eager"),
    ("layer_norm", "te"): ("compiled", "eager"),
    "mxfp8": ("fp8_block", "fp8", "bf16"),
    "fp8_block": ("fp8", "mxfp8", "bf16"),
    "fp8": ("fp8_block", "mxfp8", "bf16"),
    "nvfp4": ("bf16",),
}
"""What is taken, in this order, where a library has no table of a backend or dtype."""

CARRIED = "assumption"  # begins the source of a table that is not the device's own

DETERMINISTIC = 1.16
"""How many times longer a deterministic backward takes where nothing was measured: an assumption,
between 1.14 and 1.18 of cuDNN on H200 and GB200."""

SHEET_FLOP, SHEET_BYTES, SHEET_S = 0.6, 0.8, 2e-6
"""Shares of the data sheet's rates and fixed time of a kernel without any table: assumptions."""

TILE = 128.0
"""Rows, columns and depth of a product below which it takes no less time: half-filled tiles. The
smallest in the tables."""

Table = KernelTable | KernelFit


@dataclass(frozen=True)
class KernelCost:
    """What one kernel takes."""

    seconds: float  # mean [s]
    flop: float  # useful operations
    bytes: float  # memory traffic
    source: str
    extrapolated: bool  # sizes outside of what was measured, or a table that stands in
    residual: str  # library entry of its distribution


@dataclass(frozen=True)
class Kind:
    """Sizes of a kind of kernel, and what follows from them."""

    sizes: tuple[str, ...]
    flop: Callable[[Mapping[str, float]], float]  # of a forward
    bytes: Callable[[Mapping[str, float], float, bool], float]  # by sizes, bytes a number, backward
    backward_flop: float = 2.0  # over those of the forward
    residual: str = "residual/memory"


def _gemm_bytes(s: Mapping[str, float], size: float, backward: bool) -> float:
    m, n, k, groups = s["m"], s["n"], s["k"], s.get("experts", 1.0)
    if backward:  # each operand is read, the gradient of the output twice; float32 weight gradient
        return groups * (size * (2.0 * m * n + m * k + k * n) + 2.0 * m * k + 8.0 * k * n)
    return groups * (size * (m * k + k * n) + 2.0 * m * n)


def _attention_flop(s: Mapping[str, float]) -> float:
    """Both products; of a causal mask or a window only what it leaves."""
    seq, window = s["seq"], s["window"]
    pairs = seq * seq if s["full"] else 0.5 * seq * seq
    if 0.0 < window < seq:
        # a causal row i sees min(i, window) keys; a full one as many on both sides
        pairs = (window * seq - 0.5 * window * window) * (2.0 if s["full"] else 1.0)
    return 2.0 * s["batch"] * s["heads"] * pairs * (s["head_dim"] + s["v_head_dim"])


def _attention_bytes(s: Mapping[str, float], size: float, backward: bool) -> float:
    tokens = s["batch"] * s["seq"]
    query = tokens * s["heads"] * (s["head_dim"] + s["v_head_dim"])
    keys = tokens * s["kv_heads"] * (s["head_dim"] + s["v_head_dim"])
    return size * (2.0 if backward else 1.0) * (query + keys)


def _norm_bytes(s: Mapping[str, float], size: float, backward: bool) -> float:
    return (3.0 if backward else 2.0) * size * s["rows"] * s["columns"]


def _recurrent_flop(s: Mapping[str, float]) -> float:
    """State update and read-out: two products of a token's vectors with the state, each 2 flop."""
    return 4.0 * s["tokens"] * s["heads"] * s["head_dim"] * s.get("state", s["head_dim"])


def _recurrent_bytes(s: Mapping[str, float], size: float, backward: bool) -> float:
    return (2.0 if backward else 1.0) * size * 4.0 * s["tokens"] * s["heads"] * s["head_dim"]


def _product_flop(s: Mapping[str, float]) -> float:
    return 2.0 * s.get("experts", 1.0) * s["m"] * s["n"] * s["k"]


def _no_flop(s: Mapping[str, float]) -> float:
    return 0.0


_RECURRENT = ("tokens", "seq", "heads", "head_dim")
KINDS = {
    "gemm": Kind(("m", "n", "k"), _product_flop, _gemm_bytes, residual=""),
    "grouped_gemm": Kind(("experts", "m", "n", "k"), _product_flop, _gemm_bytes, residual=""),
    "attention": Kind(
        ("batch", "heads", "kv_heads", "seq", "head_dim", "v_head_dim"),
        _attention_flop, _attention_bytes, 2.5, "residual/attention",
    ),
    "rms_norm": Kind(("rows", "columns"), _no_flop, _norm_bytes),
    "layer_norm": Kind(("rows", "columns"), _no_flop, _norm_bytes),
    "memory": Kind(("bytes",), _no_flop, lambda s, size, backward: s["bytes"]),
    "gated_delta": Kind(_RECURRENT, _recurrent_flop, _recurrent_bytes, 2.5, "residual/compute"),
    "kda": Kind(_RECURRENT, _recurrent_flop, _recurrent_bytes, 2.5, "residual/compute"),
    "mamba2": Kind(
        (*_RECURRENT, "state", "groups"), _recurrent_flop, _recurrent_bytes, 2.5,
        "residual/compute",
    ),
}  # fmt: skip
_OPTIONAL = {"kv_heads": "heads", "v_head_dim": "head_dim", "seq": "tokens"}  # same as another
_DEFAULT = {"groups": 8.0}


def kernel_cost(
    library: Library, kind: str, *, backend: str = "", dtype: str = "bf16",
    backward: bool = False, mask: str = "causal", window: float = 0.0,
    deterministic: bool = False, **sizes: float,
) -> KernelCost:  # fmt: skip
    """Duration, work and traffic of one kernel of a library's device.

    Its sizes are keyword arguments. ``kv_heads`` is ``heads``, ``v_head_dim`` is ``head_dim`` and
    ``seq`` of a recurrent layer is ``tokens`` where not given. ``m`` of ``grouped_gemm`` is the
    tokens of each expert. The backward of a matrix product is both gradients together; a `window` >
    0 is as many keys behind each query. `backend` is the first of `BACKENDS` where empty, `dtype`
    one of `NUMBER_BYTES`.
    """
    about = KINDS.get(kind)
    if about is None:
        raise _unknown("kind", kind, KINDS)
    known = BACKENDS.get(kind, ("",))
    if backend and backend not in known:
        raise _unknown(f"{kind}: backend", backend, known)
    if dtype not in NUMBER_BYTES:
        raise _unknown(f"{kind}: dtype", dtype, NUMBER_BYTES)
    device = DEVICES.get(device_key(library.device))
    if dtype != "bf16" and device is not None and not device.flop_per_s(dtype):
        raise PrismError(f"{kind}: {device.name} has no {dtype} arithmetic")
    s = _complete(kind, about, sizes)
    if kind == "attention":
        if mask not in ("causal", "full"):
            raise _unknown("attention: mask", mask, ("causal", "full"))
        s["full"], s["window"] = float(mask == "full"), window
    flop = about.flop(s)
    n_bytes = about.bytes(s, NUMBER_BYTES[dtype], backward)
    if backward:
        flop *= about.backward_flop
    if kind == "attention":
        s["scores"] = about.flop(s) / (2.0 * (s["head_dim"] + s["v_head_dim"]))
        del s["full"], s["window"]
    latent = s.get("v_head_dim") != s.get("head_dim")
    seconds, source, extrapolated = 0.0, "", False
    for part in _parts(library, kind, backend, dtype, mask, backward, deterministic, latent):
        own = s if part.turn is None else {name: s[part.turn[name]] for name in part.turn}
        seconds += part.factor * _part_seconds(part, own, part.share * flop)
        extrapolated |= part.stands_in or not part.table.covers(**own)
        source = source or part.source
    if not source:
        seconds, source = _from_sheet(library, kind, dtype, flop, n_bytes)
        extrapolated = True
    residual = about.residual
    if not residual:
        residual = f"residual/gemm_{'large' if seconds >= GEMM_LARGE_S else 'small'}"
    return KernelCost(seconds, flop, n_bytes, source, extrapolated, residual)


def _part_seconds(part: _Part, sizes: Mapping[str, float], flop: float) -> float:
    """Duration [s]; of a product no less than of a tile, nor than a kernel's fixed time."""
    if not part.least_s:
        return part.table.seconds(**sizes, flop=flop)
    if isinstance(part.table, KernelTable):
        for name in ("m", "n", "k"):
            if sizes[name] < TILE:
                flop *= TILE / sizes[name]
        sizes = {name: max(size, TILE) for name, size in sizes.items()}
    return max(part.least_s, part.table.seconds(**sizes, flop=flop))


def _complete(kind: str, about: Kind, sizes: Mapping[str, float]) -> dict[str, float]:
    """Sizes with those that may be left out; refuse unknown, missing and wrong ones."""
    for name, size in sizes.items():
        if name not in about.sizes:
            raise _unknown(f"{kind}: size", name, about.sizes)
        if not 0.0 < size < 1e18:
            raise PrismError(f"{kind}: {name} is {size:g}, expected more than 0")
    out: dict[str, float] = {}
    for name in about.sizes:
        found = (sizes.get(name), out.get(_OPTIONAL.get(name, "")), _DEFAULT.get(name))
        given = [size for size in found if size is not None]
        if not given:
            raise PrismError(f"{kind}: no {name}; expected {', '.join(about.sizes)}")
        out[name] = float(given[0])
    return out


def _unknown(what: str, got: str, known: Iterable[str]) -> PrismError:
    names = list(known)
    near = difflib.get_close_matches(got, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return PrismError(
        f"unknown {what} {got!r}; known: {', '.join(n or 'none' for n in names)}{hint}"
    )


@dataclass(frozen=True)
class _Part:
    """A table that gives a kernel's duration or a part of it."""

    table: Table
    source: str
    stands_in: bool
    factor: float = 1.0
    share: float = 1.0  # of the flop
    turn: Mapping[str, str] | None = None  # sizes of the table by sizes of the kernel
    least_s: float = 0.0  # duration of the smallest product; 0 of other kinds [s]


_DGRAD = {"m": "m", "n": "k", "k": "n"}
_WGRAD = {"m": "k", "n": "n", "k": "m"}
_CACHE: dict[tuple[object, ...], tuple[Library, tuple[_Part, ...]]] = {}


def _parts(
    library: Library, kind: str, backend: str, dtype: str, mask: str, backward: bool,
    deterministic: bool, latent: bool,
) -> tuple[_Part, ...]:  # fmt: skip
    """Tables of a kernel, looked up once for a library."""
    key = (id(library), kind, backend, dtype, mask, backward, deterministic, latent)
    found = _CACHE.get(key)
    if found is None or found[0] is not library:
        if len(_CACHE) > 4096:
            _CACHE.clear()
        parts = _find(library, kind, backend, dtype, mask, backward, deterministic, latent)
        found = _CACHE[key] = (library, parts)
    return found[1]


def _find(
    library: Library, kind: str, backend: str, dtype: str, mask: str, backward: bool,
    deterministic: bool, latent: bool,
) -> tuple[_Part, ...]:  # fmt: skip
    names = _candidates(library, kind, backend, dtype, mask, backward)
    device = DEVICES.get(device_key(library.device))
    for name, d in names.items():
        table, factor, note = library.tables.get(name) or library.kernels.get(name), 1.0, ""
        if table is None:
            continue
        if kind == "attention":
            if deterministic and backward:
                own = library.kernels.get(name.replace("/backward", "/deterministic"))
                if own is None:
                    factor, note = (
                        DETERMINISTIC,
                        f"{CARRIED}, deterministic {DETERMINISTIC} times: ",
                    )
                table = own or table
            table = library.kernels.get(f"{name}/latent", table) if latent else table
        if d != dtype and kind.endswith("gemm") and device is not None:
            factor *= device.flop_per_s(d) / device.flop_per_s(dtype)
        if name != next(iter(names)):
            note = f"{CARRIED}, {name} stands in: {note}"
        source = note + table.source
        stands_in = source.startswith(CARRIED)
        if kind == "gemm":
            least = _fixed_s(library)
            own = library.kernels.get(f"{name}/backward") if backward else None
            if own is not None:
                return (_Part(own, note + own.source, stands_in, factor, least_s=least),)
            turns = (_DGRAD, _WGRAD) if backward else (None,)
            share = 1.0 / len(turns)
            return tuple(_Part(table, source, stands_in, factor, share, t, least) for t in turns)
        return (_Part(table, source, stands_in, factor),)
    return ()


def _candidates(
    library: Library, kind: str, backend: str, dtype: str, mask: str, backward: bool
) -> dict[str, str]:
    """Names of tables that give a kernel, the right one first, and the dtype of each."""
    way, dtypes = "backward" if backward else "forward", (dtype, *STANDS_IN.get(dtype, ()))
    if kind == "gemm":
        return {f"gemm/{d}": d for d in dtypes}
    if kind == "grouped_gemm":
        return {f"{kind}/{d}/{way}": d for d in dtypes}
    if kind == "memory":
        return {"memory/copy": dtype}
    if kind not in BACKENDS:
        return {f"{kind}/{way}": dtype}
    backends = (backend, *STANDS_IN.get((kind, backend), ()))
    if not backend:  # the first that was measured on the device
        backends = tuple(sorted(BACKENDS[kind], key=lambda b: not _measured(library, kind, b)))
    if kind != "attention":
        return {f"{kind}/{b}/{way}": dtype for b in backends}
    masks = (mask, "full" if mask == "causal" else "causal")
    return {f"{kind}/{b}/{d}/{m}/{way}": d for d in dtypes for b in backends for m in masks}


def _measured(library: Library, kind: str, backend: str) -> bool:
    """Whether a library has a table of a backend."""
    start = f"{kind}/{backend}/"
    return any(name.startswith(start) for name in (*library.kernels, *library.tables))


def _fixed_s(library: Library) -> float:
    """Return the fixed time of a kernel [s], that of a copy."""
    copy = library.kernels.get("memory/copy")
    if not isinstance(copy, KernelFit):
        return SHEET_S
    return sum(term.coefficient for term in copy.terms if not term.powers) or SHEET_S


def _from_sheet(
    library: Library, kind: str, dtype: str, flop: float, n_bytes: float
) -> tuple[float, str]:
    """Duration [s] of a kernel that a library has no table of, and its source."""
    device = DEVICES.get(device_key(library.device))
    peak = device.flop_per_s(dtype) if device is not None else 0.0
    if device is None or (flop and not peak):
        known = ", ".join(sorted({*library.kernels, *library.tables})) or "none"
        raise PrismError(f"library {library.name}: no table of {kind} in {dtype}; known: {known}")
    compute, memory = (
        flop / (SHEET_FLOP * peak),
        n_bytes / (SHEET_BYTES * device.memory_bytes_per_s),
    )
    note = f"{CARRIED}: {format_share(SHEET_FLOP)} of the peak, {format_share(SHEET_BYTES)} of the "
    return SHEET_S + max(compute, memory), f"{note}memory bandwidth of the data sheet"
