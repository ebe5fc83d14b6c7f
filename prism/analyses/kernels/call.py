"""What is asked of `prism.analyses.kernel`, checked: a kernel with its sizes on a device."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from prism.cluster.machine import Cluster
from prism.cluster.nccl import bus_factor
from prism.cluster.transports import TRANSPORTS
from prism.common import sizes as needs
from prism.common.arrays import Array
from prism.common.errors import PrismError
from prism.distributions.library import Library, library_names, load_library
from prism.jobs.devices import DEVICES, device_key
from prism.workload.collectivecost import (
    OP_NAMES,
    OPS,
    Hosts,
    collective_cost,
    lay_hosts,
)
from prism.workload.kernelcost import BACKENDS, KINDS, NUMBER_BYTES, KernelCost, kernel_cost

COLLECTIVE = "collective"
_COMPUTE = ("dtype", "backward")
_OPTIONS = {
    "attention": (*_COMPUTE, "backend", "mask", "window", "deterministic"),
    "memory": (),
    COLLECTIVE: ("op", "transport"),
} | {kind: (*_COMPUTE, "backend") for kind in BACKENDS if kind != "attention"}
"""What is said of a kind beside its sizes; `_COMPUTE` of those that are not here."""

_HOSTS = ("ranks", "nodes", "nvlink_domain_gpus", "network_gbit")
SWITCHES = ("backward", "deterministic")

MAIN = {
    "gemm": ("m", 2.0**6, 2.0**16), "grouped_gemm": ("m", 2.0**4, 2.0**15),
    "attention": ("seq", 2.0**8, 2.0**17), "rms_norm": ("rows", 2.0**6, 2.0**20),
    "layer_norm": ("rows", 2.0**6, 2.0**20), "memory": ("bytes", 2.0**14, 2.0**33),
    COLLECTIVE: ("bytes", 2.0**10, 2.0**34),
}  # fmt: skip
"""Size that a picture goes along, and the range that it shows at least."""
_TOKENS = ("tokens", 2.0**8, 2.0**18)  # of the kinds that are not there
_AROUND = 8.0  # times smaller and larger than the size asked for that a picture reaches at least
_POINTS = 2  # of a picture's line in an octave

LARGEST = 1e18  # size that can be asked for

FIGURES = ("mean", "p5", "p50", "p95", "cv")
RATES = ("tflops", "bytes_per_s", "bus_bytes_per_s", "of_peak")


@dataclass(frozen=True)
class Call:
    """One kernel as it was asked for."""

    kind: str
    device: str
    library: Library
    sizes: dict[str, float]
    options: dict[str, Any]
    hosts: Hosts | None = None
    cluster: Cluster | None = field(default=None, repr=False)

    def cost(self, backend: str = "", **changed: float) -> KernelCost:
        """Duration, with another backend or size."""
        asked: dict[str, Any] = self.options | self.sizes | changed
        if self.cluster is not None:
            names = asked["op"], asked["bytes"], asked["transport"]
            return collective_cost(self.library, self.cluster, *names)
        if backend:
            asked["backend"] = backend
        return kernel_cost(self.library, self.kind, **asked)

    @cached_property
    def _own_cost(self) -> KernelCost:
        return self.cost()

    @property
    def backend(self) -> str:
        """Backend that is taken; empty where a kind has one only."""
        known = BACKENDS.get(self.kind, ("",))
        return str(self.options.get("backend") or next(iter(self._with_tables()), known[0]))

    def _with_tables(self) -> list[str]:
        """Backends that the library has tables of."""
        tables, kind = (*self.library.kernels, *self.library.tables), self.kind
        known = BACKENDS.get(kind, ())
        return [b for b in known if any(name.startswith(f"{kind}/{b}/") for name in tables)]

    @property
    def about(self) -> dict[str, Any]:
        """What was asked, defaults filled in."""
        residual = self._own_cost.residual
        out: dict[str, Any] = {
            "kind": self.kind, "device": self.device, "library": self.library.name,
            "distribution": residual, "distribution_source": self.library.source(residual),
        }  # fmt: skip
        if self.hosts is not None:
            return out | {
                "sizes": {"bytes": self.sizes["bytes"]} | self.hosts._asdict(),
                "op": OP_NAMES[OPS[self.options["op"]]], "transport": self.options["transport"],
            }  # fmt: skip
        out["sizes"] = _complete_sizes(self.kind, self.sizes)
        if self.backend:
            out["backend"] = self.backend
        allowed = _options_of(self.kind)
        if "dtype" in allowed:
            out["dtype"] = self.options.get("dtype", "bf16")
            out["pass"] = "backward" if self.options.get("backward") else "forward"
        if "mask" in allowed:
            out["mask"] = self.options.get("mask", "causal")
            out["window"] = float(self.options.get("window", 0.0))
            out["deterministic"] = bool(self.options.get("deterministic", False))
        return out

    def rows(self) -> list[dict[str, Any]]:
        """Figures of the backend asked for, then of others that the library has tables of."""
        others = [name for name in self._with_tables() if name != self.backend]
        return [self._row(self.backend, self._own_cost)] + [
            self._row(name, self.cost(name)) for name in others
        ]

    def _row(self, backend: str, cost: KernelCost) -> dict[str, Any]:
        spread = self.library.distribution(cost.residual)
        p5, p50, p95 = (cost.seconds * float(x) for x in spread.ppf([0.05, 0.5, 0.95]))
        times = (cost.seconds, p5, p50, p95, spread.cv)
        return {
            "backend": backend, **dict(zip(FIGURES, times, strict=True)), **self._rates(cost),
            "source": cost.source, "extrapolated": cost.extrapolated,
        }  # fmt: skip

    def _rates(self, cost: KernelCost) -> dict[str, float]:
        if self.hosts is not None:
            rate = cost.bytes / cost.seconds
            bus = bus_factor(OPS[self.options["op"]], self.hosts.ranks)
            return {"bytes_per_s": rate, "bus_bytes_per_s": rate * bus}
        device = DEVICES.get(self.device)
        if cost.flop:
            rate, name, scale = cost.flop / cost.seconds, "tflops", 1e-12
            peak = device.flop_per_s(self.options.get("dtype", "bf16")) if device else 0.0
        else:
            rate, name, scale = cost.bytes / cost.seconds, "bytes_per_s", 1.0
            peak = device.memory_bytes_per_s if device else 0.0
        return {name: scale * rate} | ({"of_peak": rate / peak} if peak else {})

    def curve(self, backends: Sequence[str]) -> tuple[str, Array, Array, Array]:
        """Rates [backend, size] along the main size, and where they are measured."""
        main, low, high = MAIN.get(self.kind, _TOKENS)
        size = self.sizes[main]
        low, high = min(low, size / _AROUND), max(high, size * _AROUND)
        if main == "m":
            low = max(low, 1.0)
        n = math.ceil(_POINTS * math.log2(high / low)) + 1
        at = np.unique(np.append(np.geomspace(low, high, n), size))
        rate, measured = np.empty((2, len(backends), at.size))
        for i, backend in enumerate(backends):
            for j, x in enumerate(at.tolist()):
                cost = self.cost(backend, **{main: x})
                rates = self._rates(cost)
                rate[i, j], measured[i, j] = rates[rate_key(rates)], not cost.extrapolated
        return main, at, rate, measured


def rate_key(row: Mapping[str, Any]) -> str:
    """Find the rate that a picture shows."""
    return next(key for key in ("tflops", "bus_bytes_per_s", "bytes_per_s") if key in row)


def _complete_sizes(kind: str, sizes: Mapping[str, float]) -> dict[str, float]:
    """Sizes of a kernel with those that follow from others, as `kernel_cost` takes them."""
    same = {"kv_heads": "heads", "v_head_dim": "head_dim", "seq": "tokens"}
    out = dict(sizes)
    for name in KINDS[kind].sizes:
        if name not in out:
            out[name] = out[same[name]] if name in same else 8.0
    return {name: out[name] for name in KINDS[kind].sizes}


def _options_of(kind: str) -> tuple[str, ...]:
    return _OPTIONS.get(kind, _COMPUTE)


def read_call(
    kind: str,
    device: str | None,
    library: str | os.PathLike[str] | Library | None,
    given: Mapping[str, Any],
) -> Call:
    """Check what was asked for."""
    known = (*KINDS, COLLECTIVE)
    if not isinstance(kind, str) or kind not in known:
        raise _unknown("kind of kernel", kind, known)
    names = ("bytes", *_HOSTS) if kind == COLLECTIVE else KINDS[kind].sizes
    options: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in names:
            sizes[name] = _number(kind, name, value)
        elif name in _options_of(kind):
            options[name] = _option(kind, name, value)
        else:
            raise _unknown(f"{kind}: size or option", name, (*names, *_options_of(kind)))
    label, found = _find_library(device, library, kind)
    if kind == COLLECTIVE:
        return _collective_call(label, found, sizes, options)
    dtype = options.get("dtype", "bf16")
    sheet = DEVICES.get(label)
    if sheet is not None and dtype in NUMBER_BYTES and not sheet.flop_per_s(dtype):
        has = [name for name in NUMBER_BYTES if sheet.flop_per_s(name)]
        raise PrismError(
            f"{kind}: dtype {dtype}: {label} has no such arithmetic; take {' or '.join(has)}, or "
            "another device"
        )
    call = Call(kind, label, found, sizes, options)
    call.cost()  # checks the sizes
    return call


def _collective_call(
    device: str, library: Library, sizes: dict[str, float], options: dict[str, Any]
) -> Call:
    """Check a collective, and lay out its hosts."""
    missing = [n for n, v in (("op", options.get("op")), ("bytes", sizes.get("bytes"))) if not v]
    if missing:
        raise PrismError(
            f"collective: no {' and no '.join(missing)}; expected op, bytes, and ranks or nodes"
        )
    if options["op"] not in OPS:
        raise _unknown("collective: op", options["op"], OPS)
    transport = options.setdefault("transport", "infiniband")
    if transport not in TRANSPORTS:
        raise _unknown("collective: transport", transport, TRANSPORTS)
    for name in ("ranks", "nodes", "nvlink_domain_gpus"):
        if sizes.get(name, 1.0) % 1.0:
            raise PrismError(f"collective: {name} is {sizes[name]:g}, expected a whole number")
    whole = {name: int(sizes.get(name, 0)) for name in _HOSTS[:3]}
    most = max(whole["ranks"], whole["nodes"])
    needs.check_size("collective", {"GPUs": (most, needs.GPU)}, "ranks and nodes")
    hosts, cluster = lay_hosts(
        library, device, **whole, network_gbit=sizes.get("network_gbit", 0.0), transport=transport
    )
    own = {"bytes": sizes["bytes"]}
    return Call(COLLECTIVE, device, library, own, options, hosts, cluster)


def _find_library(
    device: str | None, library: str | os.PathLike[str] | Library | None, kind: str
) -> tuple[str, Library]:
    """Name of the device, and the library; without tables where they are another device's."""
    key = device.lower() if isinstance(device, str) else ""
    if device is not None and key not in DEVICES:
        raise _unknown("device", device, DEVICES)
    if library is None:
        name = f"{key}-healthy"
        if not key or name not in library_names():
            why = f"{key} has no library of its own" if key else "no device"
            one = "library" if key else f"one of {', '.join(DEVICES)}, or a library"
            raise PrismError(f"{why}; give {one}, such as {'h100-healthy' if key else 'h100'}")
        library = name
    found = library if isinstance(library, Library) else load_library(library)
    own = device_key(found.device)
    if device is None:
        return own or found.device, found
    if own != key and kind != COLLECTIVE:  # where a link is alike, collectives are too
        found = replace(found, device=key, tables={}, kernels={})
    return key, found


def _number(kind: str, name: str, value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise PrismError(f"{kind}: {name} is {value!r}, expected a number above 0")
    number = float(value) if abs(value) < LARGEST else math.inf  # type: ignore[operator]
    if not 0.0 < number < LARGEST:
        raise PrismError(f"{kind}: {name} is {value}, expected more than 0 and less than 1e18")
    return number


def _option(kind: str, name: str, value: Any) -> Any:
    if name in SWITCHES:
        if not isinstance(value, bool | np.bool_):
            raise PrismError(f"{kind}: {name} is {value!r}, expected true or false")
        return bool(value)
    if name == "window":
        return 0.0 if value == 0 and not isinstance(value, bool) else _number(kind, name, value)
    if not isinstance(value, str) or not value:
        raise PrismError(f"{kind}: {name} is {value!r}, expected a word")
    return value


def _unknown(what: str, got: Any, known: Iterable[str]) -> PrismError:
    names = list(known)
    near = difflib.get_close_matches(str(got), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return PrismError(f"unknown {what} {got!r}; known: {', '.join(names)}{hint}")
