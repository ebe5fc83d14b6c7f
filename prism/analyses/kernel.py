"""One kernel or collective on a device: what it takes, how it varies, from which source.

Its mean is `prism.workload.kernelcost`'s or `collectivecost`'s, its spread that of the library's
distribution of such kernels, which has mean 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prism.analyses.kernels.call import FIGURES, RATES, SWITCHES, rate_key, read_call
from prism.common.results import Result
from prism.distributions.library import Library

if TYPE_CHECKING:
    import xarray as xr


def kernel(
    kind: str,
    device: str | None = None,
    *,
    library: str | os.PathLike[str] | Library | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Find what one kernel or collective takes on a device, and how it varies.

    Parameters
    ----------
    kind : str
        ``gemm``, ``grouped_gemm``, ``attention``, ``rms_norm``, ``layer_norm``, ``memory``,
        ``gated_delta``, ``kda``, ``mamba2`` or ``collective``.
    device : str, optional
        As a job names it; the library's where None.
    library : str, path or Library, optional
        Set of distributions and tables; DEVICE-healthy where None.
    **sizes
        Of ``gemm`` m, n, k; of ``grouped_gemm`` experts, m (tokens of each expert), n, k; of
        ``attention`` batch, heads, kv_heads (heads), seq, head_dim, v_head_dim (head_dim), mask
        ("causal" or "full"), window (0: none), deterministic (False); of norms rows, columns; of
        ``memory`` bytes, read and written; of the recurrent layers tokens, seq (tokens), heads,
        head_dim, of ``mamba2`` also state and groups (8).
        All but ``memory``: dtype ("bf16", "fp8", "fp8_block", "mxfp8", "nvfp4") and backward
        (False; True is the backward alone, of products both gradients). Attention and norms:
        backend, for attention "cudnn", "fa2", "fa3", "fa4", "efficient" or "math", for norms
        "eager", "compiled", "te" or, for rms_norm, "unfused"; the first that the library has tables
        of.
        Of ``collective`` op ("all_reduce", "all_gather", "reduce_scatter", "alltoall" or
        "sendrecv", every rank to the next), bytes as nccl-tests counts them, ranks, nodes (as few
        as hold the ranks; of 4 GPUs on GB200 and GB300, else 8), nvlink_domain_gpus and
        network_gbit of a GPU (the device's), transport ("infiniband", "roce", "efa", "tcpx" or
        "slingshot").

    Returns
    -------
    dict
        ``kind``, ``device``, ``library``, ``sizes`` and options as taken; ``mean``, ``p5``,
        ``p50``, ``p95`` [s], ``cv`` [1]; ``tflops`` [1e12 flop/s], of kernels without products
        ``bytes_per_s``, of collectives also ``bus_bytes_per_s``, nccl-tests' busbw; ``of_peak``,
        the share of the data sheet's rate; ``source`` and ``extrapolated`` (whether sizes lie
        outside of what was measured, or there is no table); ``distribution`` and its source;
        ``backends``, the same figures of others of the kind.

    Raises
    ------
    PrismError
        Unknown kind, device, library, option or number format; a size that is missing or none.

    Examples
    --------
    >>> import prism
    >>> found = prism.kernel("gemm", device="h100", m=8192, n=8192, k=8192, dtype="bf16")
    >>> found["p5"] < found["p50"] < found["p95"]
    True
    >>> round(2 * 8192**3 / found["mean"] / 1e12 / found["tflops"], 9), found["extrapolated"]
    (1.0, False)
    """
    call = read_call(kind, device, library, sizes)
    return _assemble(call.about, call.rows())


def kernel_result(
    kind: str,
    device: str | None = None,
    *,
    library: str | os.PathLike[str] | Library | None = None,
    **sizes: Any,
) -> KernelRates:
    """Do as `kernel`, with rates along the main size.

    Dims are ``backend``, the one asked for first, and ``size``.
    """
    import xarray as xr

    call = read_call(kind, device, library, sizes)
    rows, about = call.rows(), call.about
    main, at, rate, measured = call.curve([row["backend"] for row in rows])
    found = {
        key: ("backend", [row[key] for row in rows], {"units": _units(key)})
        for key in (*FIGURES, *RATES)
        if key in rows[0]
    }
    dataset = xr.Dataset(
        {
            **found,
            "source": ("backend", np.array([row["source"] for row in rows], object)),
            "extrapolated": ("backend", np.array([row["extrapolated"] for row in rows], np.int8)),
            "given": ("given_size", list(about["sizes"].values()), {"units": "1"}),
            "rate": (("backend", "size"), rate, {"units": _units(rate_key(rows[0]))}),
            "measured": (("backend", "size"), measured.astype(np.int8), {"units": "1"}),
        },
        coords={
            "backend": np.array([row["backend"] for row in rows], object),
            "given_size": np.array(list(about["sizes"]), object),
            "size": ("size", at, {"units": "byte" if main == "bytes" else "1", "name": main}),
        },
    )
    kept = {k: int(v) if isinstance(v, bool) else v for k, v in about.items() if k != "sizes"}
    attrs = kept | {"kind": "kernel", "kernel": about["kind"]}
    return KernelRates(dataset.assign_attrs(attrs))


class KernelRates(Result):
    """A kernel's duration by backend, and its ``rate`` [backend, size] along its main size."""

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`; those of `prism.kernel`."""
        return _figures(self.dataset)


def _figures(result: xr.Dataset) -> dict[str, Any]:
    about: dict[str, Any] = {}
    for key, value in result.attrs.items():
        if key in (*_ABOUT, "kernel"):
            about[str(key)] = value.item() if isinstance(value, np.generic) else value
    about["kind"] = about.pop("kernel")
    for name in SWITCHES:
        if name in about:
            about[name] = bool(about[name])
    names = map(str, result["given_size"].values)
    about["sizes"] = dict(zip(names, result["given"].values.tolist(), strict=True))
    rows = []
    for i, backend in enumerate(map(str, result["backend"].values)):
        row: dict[str, Any] = {"backend": backend}
        for key in (*FIGURES, *RATES):
            if key in result:
                row[key] = float(result[key].values[i])
        row["source"] = str(result["source"].values[i])
        row["extrapolated"] = bool(result["extrapolated"].values[i])
        rows.append(row)
    return _assemble(about, rows)


_ABOUT = (
    "kind", "device", "library", "op", "transport", "sizes", "backend", "dtype", "pass", "mask",
    "window", "deterministic", "distribution", "distribution_source",
)  # fmt: skip


def _assemble(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what was asked and what was found."""
    named = {key: about[key] for key in _ABOUT if key in about}
    named["sizes"] = {name: _whole(size) for name, size in about["sizes"].items()}
    last = {key: named.pop(key) for key in ("distribution", "distribution_source")}
    own = {key: value for key, value in rows[0].items() if key != "backend"}
    if len(rows) > 1:
        last["backends"] = [dict(row) for row in rows]
    return named | own | last


def _whole(size: float) -> float:
    return int(size) if size == int(size) else float(size)


def _units(key: str) -> str:
    units = {"cv": "1", "of_peak": "1", "tflops": "1e12 flop/s"}
    return units.get(key, "byte/s" if key.endswith("bytes_per_s") else "s")
