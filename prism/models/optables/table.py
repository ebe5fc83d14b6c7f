"""A job with `model.layers`, made of a profile's passes.

Products, attention, norms, convolutions, embeddings and losses keep their shapes, from which their
times on any device follow. Kernels bound by memory keep their time as passes over the stream of a
layer, at the rate of a copy: where kernels are slower than a copy, more of them. What has no shape
keeps its duration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError, option
from prism.common.text import format_count, format_duration
from prism.distributions.library import load_library
from prism.jobs.devices import DEVICES, LIBRARIES, device_key
from prism.jobs.job import Job, job_from_dict
from prism.jobs.ops import BF16_BYTES
from prism.models.optables.launches import WORK, Group, Launch, Passes, find_groups, read_passes
from prism.workload.kernelcost import kernel_cost

MEMORY = frozenset({"elementwise", "norm", "embedding", "loss"})
_BF16 = "c10::BFloat16"
_ATTENTION = {"cudnn": "cudnn", "flash": "fa2", "efficient": "efficient"}
_MASK_AT = {"cudnn": 6, "flash": 4, "efficient": 6}  # is_causal among the inputs


@dataclass(frozen=True)
class OpTable:
    """What was made of a profile."""

    source: str
    job: Job  # of the GPU that was profiled; checked
    values: dict[str, Any]  # what the job file says, by block
    # name, repetitions and kinds of ops of each layer
    layers: tuple[tuple[str, int, tuple[str, ...]], ...]
    notes: tuple[str, ...]  # what the profile does not say, and what was made of it


def op_table(path: str | Path, device: str | None = None) -> OpTable:
    """Make a job with a table of ops of a PyTorch profiler's trace of training steps on one GPU.

    It needs host ops; ``record_shapes=True`` gives the shapes. `device` is the GPU that was
    profiled, where the trace does not name it.
    """
    passes = read_passes(path)
    key = device or device_key(passes.device)
    if key not in DEVICES:
        named = passes.device or "no device"
        raise PrismError(
            f"{passes.source}: names {named}; give {option('device')}, one of {', '.join(DEVICES)}"
        )
    return _Maker(passes, key).make()


@dataclass
class _Maker:
    passes: Passes
    device: str
    missing: Counter[str] = field(default_factory=Counter)  # classes without shapes

    def __post_init__(self) -> None:
        self.library = load_library(LIBRARIES.get(self.device, "h100-healthy"))
        dims = [launch.dims for launch in self.passes.forward if launch.kernel_class == "attention"]
        of_attention = Counter((d[0][0], d[0][2]) for d in dims if d and len(d[0]) == 4)
        looked_up = Counter(
            d[1] for d in (x.dims for x in self.passes.forward if x.kernel_class == "embedding")
            if len(d) > 1 and len(d[1]) == 2
        )  # fmt: skip
        found = (looked_up or of_attention).most_common(1)
        self.batch, self.seq = found[0][0] if found else (1, 1)
        widths = Counter(
            launch.dims[0][-1] for launch in self.passes.forward
            if launch.kernel_class == "norm" and launch.dims and launch.dims[0]
        )  # fmt: skip
        products = Counter(d[1] for d in map(_product_dims, self.passes.forward) if d is not None)
        found_width = (widths or products).most_common(1)
        self.width = found_width[0][0] if found_width else 1

    def make(self) -> OpTable:
        """Make the job."""
        forward, backward = self.passes.forward, self.passes.backward
        places, behind = _places(_groups(forward)), _places(_groups(backward)[::-1])
        repeats = [[g.repeats for i, g in x.items() if i % 2] for x in (places, behind)]
        mirrored = repeats[0] == repeats[1]
        layers = []
        total = sum(x.seconds for x in forward)
        for i in sorted({*places, *(behind if mirrored else ())}):
            own = _mean_of(forward, places.get(i))
            if mirrored:
                gradients = _mean_of(backward, behind.get(i))
            else:  # in proportion
                share = sum(x.seconds for x in own) / total
                gradients = [x._replace(seconds=x.seconds * share) for x in backward]
            layer: dict[str, Any] = {"name": f"part_{i // 2}"}
            if i % 2:
                name = f"layer_{i // 2 + 1}" if len(repeats[0]) > 1 else "layer"
                layer = {"name": name, "repeat": places[i].repeats}
            elif repeats[0] and i in (0, 2 * len(repeats[0])):
                at = "last" if i else "first"
                layer = {"name": at, "at": at}
            if ops := self._ops(own, gradients):
                layers.append(layer | {"ops": ops})
        if not any(op["op"] in ("gemm", "embedding_bag") for x in layers for op in x["ops"]):
            each = _round(self.passes.beside_s / self.passes.microbatches)
            op = {"op": "kernel", "name": "optimizer", "seconds": 0.0, "backward": each}
            layers[-1]["ops"].append(op)
        values = self._values(layers)
        job = job_from_dict(values, Path(self.passes.source).name)
        shown = tuple(
            (x["name"], x.get("repeat", 1), tuple(op["op"] for op in x["ops"])) for x in layers
        )
        return OpTable(self.passes.source, job, values, shown, self._notes(mirrored))

    def _values(self, layers: list[dict[str, Any]]) -> dict[str, Any]:
        compiled = any("triton" in x.op or x.op.startswith("## Call") for x in self.passes.forward)
        products = [x for x in self.passes.forward if x.kernel_class == "gemm"]
        whole = all(set(x.types[:2]) <= {_BF16, ""} for x in products)
        kinds = Counter(k for x in self.passes.forward if x.kernel_class == "attention"
                        for k in _ATTENTION if k in x.op)  # fmt: skip
        parallelism: dict[str, Any] = {
            "microbatches": self.passes.microbatches, "microbatch_size": self.batch,
            "framework": "compiled" if compiled else "eager",
        }  # fmt: skip
        if kinds:
            parallelism["attention"] = _ATTENTION[kinds.most_common(1)[0][0]]
        if whole:  # weights in bf16 have gradients and states in bf16
            parallelism |= {"gradient_dtype": "bf16", "optimizer_dtype": "bf16"}
        return {
            "model": {"seq_len": self.seq, "hidden_size": self.width, "layers": layers},
            "parallelism": parallelism,
            "cluster": {"nodes": 1, "gpus_per_node": 1, "device": self.device},
        }

    def _ops(self, forward: Sequence[Launch], backward: Sequence[Launch]) -> list[dict[str, Any]]:
        """Turn a layer's kernels into ops: those with shapes, and between them the others."""
        ops: list[dict[str, Any]] = []
        lost = {prod(x.dims[0]) for x in forward if _loss(self, x) is not None}
        forward, backward = (
            [x for x in part if not _casts(x, lost)] for part in (forward, backward)
        )
        open_: list[Launch] = []
        shaped = Counter[str]()
        names = Counter[str]()

        def named(op: dict[str, Any], name: str) -> dict[str, Any]:
            names[name] += 1
            last = f"_{names[name]}" * (names[name] > 1)
            return {"op": op["op"], "name": f"{name}{last}"} | op

        def close() -> None:
            if open_:
                seconds: dict[str, float] = {}
                for launch in open_:
                    name = _short(launch.op)
                    seconds[name] = seconds.get(name, 0.0) + launch.seconds
                name = "_".join(sorted(seconds, key=lambda n: -seconds[n])[:2])
                op = {"op": "elementwise", "seconds": sum(seconds.values()), "launches": len(open_)}
                ops.append(named(op, name or "elementwise"))
                open_.clear()

        for launch in forward:
            made = _SHAPED.get(launch.kernel_class, _no_shape)(self, launch)
            if made is not None:
                again = ops and not open_ and launch.kernel_class in ("embedding", "loss")
                if again and made.items() <= ops[-1].items():  # two kernels of one op
                    continue
                close()
                shaped[launch.kernel_class] += 1
                ops.append(named(made, _short(launch.op)))
            elif launch.kernel_class in WORK:
                close()
                self.missing[launch.kernel_class] += 1
                ops.append(named({"op": "kernel", "seconds": launch.seconds}, _short(launch.op)))
            elif not _clears(launch):
                open_.append(launch)
        close()
        return self._with_backward(ops, backward, shaped)

    def _with_backward(
        self, ops: list[dict[str, Any]], backward: Sequence[Launch], shaped: Counter[str]
    ) -> list[dict[str, Any]]:
        """Divide what backward takes beside the gradients of ops with shapes among the others."""
        work = sum(x.seconds for x in backward if x.kernel_class in WORK - set(shaped))
        others = [
            x for x in backward
            if x.kernel_class not in WORK | set(shaped) and not _clears(x)
            and not ("attention" in shaped and "attention" in x.op.lower())  # its helpers
        ]  # fmt: skip
        rest = sum(x.seconds for x in others)
        timed = [op for op in ops if op["op"] == "kernel"]
        between = [op for op in ops if op["op"] == "elementwise"]
        if rest and not between:
            between = [{"op": "elementwise", "name": "gradients", "seconds": 0.0, "launches": 0}]
            ops = ops + between
        for group, seconds in ((timed, work), (between, rest)):
            total = sum(op["seconds"] for op in group)
            for op in group:
                op["backward"] = seconds * (op["seconds"] / total if total else 1 / len(group))
        no_rows = not any(self.passes.forward[i].dims for i in range(len(self.passes.forward)))
        for op in between:
            forward, back = op.pop("seconds"), op.pop("backward")
            if no_rows:
                del op["launches"]
                op |= {"op": "kernel", "seconds": _round(forward), "backward": _round(back)}
                continue
            n = op.pop("launches")
            op |= {
                "width": "hidden", "passes": self._passes(forward), "backward": self._passes(back),
                "launches": n, "backward_launches": round(len(others) * back / rest) if rest else 0,
            }  # fmt: skip
        for op in timed:
            op |= {key: _round(op[key]) for key in ("seconds", "backward")}
        return ops

    def _passes(self, seconds: float) -> float:
        """How often a copy would read or write a layer's stream in that time."""
        if seconds <= 0.0:
            return 0.0
        low, high = 0.0, seconds * 100e12  # no memory is faster [byte]
        for _ in range(60):
            middle = 0.5 * (low + high)
            slow = kernel_cost(self.library, "memory", bytes=middle).seconds > seconds
            low, high = (low, middle) if slow else (middle, high)
        return _round(low / (BF16_BYTES * self.batch * self.seq * self.width))

    def rows(self, n: int) -> int | str:
        """Write rows by the names that --set can vary."""
        tokens = self.batch * self.seq
        if n == tokens and tokens > 1:
            return "batch * seq"
        return f"{n // tokens} * batch * seq" if tokens > 1 and n % tokens == 0 else n

    def size(self, n: int) -> int | str:
        """Write a width by its name."""
        return "hidden" if n == self.width else n

    def _notes(self, mirrored: bool) -> tuple[str, ...]:
        notes = list(self.passes.notes)
        if self.missing:
            told = ", ".join(f"{format_count(n, 'kernel')} of {c}" for c, n in
                             sorted(self.missing.items()))  # fmt: skip
            notes.append(
                f"{told} of a microbatch's forward have no shapes: they keep their durations on "
                "any device; profile with record_shapes=True"
            )
        if not mirrored:
            notes.append(
                "backward does not repeat as forward does: its time is divided in proportion to "
                "forward's"
            )
        if self.passes.collective_s:
            notes.append(
                f"collectives of {format_duration(self.passes.collective_s)} a step are left out: "
                "set the layout, from which they follow"
            )
        notes += [
            "how tensor parallelism cuts a product is not in a profile: add split: columns or rows "
            "to each gemm before tp is raised",
            "what elementwise ops keep for backward is not in a profile: memory is a lower bound; "
            "add keeps",
            "the optimizer and its states are assumed: parallelism.optimizer, optimizer_dtype",
        ]
        return tuple(notes)


def _groups(launches: Sequence[Launch]) -> list[Group]:
    works = [launch.kernel_class in WORK for launch in launches]
    return find_groups([launch.kind for launch in launches], works)


def _places(groups: Sequence[Group]) -> dict[int, Group]:
    """Give groups places: odd ones repeat, even ones lie before, between and behind those."""
    places, i = dict[int, Group](), 0
    for group in groups:
        i += (group.repeats > 1) != i % 2 or 2 * (group.repeats > 1 and i in places)
        places[i] = group
    return places


def _mean_of(launches: Sequence[Launch], group: Group | None) -> list[Launch]:
    """One of a group's repetitions, with mean times."""
    if group is None:
        return []
    first, length, n = group
    stretch = launches[first : first + length * n]
    return [
        launch._replace(seconds=sum(x.seconds for x in stretch[i::length]) / n)
        for i, launch in enumerate(stretch[:length])
    ]


def _clears(launch: Launch) -> bool:
    """Whether a product or attention clears memory for itself, which its time holds."""
    return launch.kernel_class == "memset" and bool(launch.dims)


def _casts(launch: Launch, logits: set[int]) -> bool:
    """Whether a kernel casts or fills as many values as a loss reads, which the loss brings."""
    dims = launch.dims[0] if launch.dims else ()
    return launch.kernel_class == "elementwise" and bool(dims) and prod(dims) in logits


def _short(op: str) -> str:
    name = op.rpartition("::")[2].strip("_") or "kernel"
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)[:40]


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------ ops with shapes
def _product_dims(launch: Launch) -> tuple[int, int, int] | None:
    """Rows, columns of the operand and of the result of a product with a weight."""
    if launch.kernel_class != "gemm":
        return None
    matrices = [d for d in launch.dims if len(d) >= 2]
    if len(matrices) < 2 or len(matrices[1]) != 2:
        return None
    *lead, k = matrices[0]
    n = prod(matrices[1]) // k if k and prod(matrices[1]) % k == 0 else 0
    return (prod(lead), k, n) if n and prod(lead) else None


def _gemm(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    found = _product_dims(launch)
    if found is None:
        return None
    m, k, n = found
    return {"op": "gemm", "m": maker.rows(m), "n": maker.size(n), "k": maker.size(k)}


def _attention(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    dims = launch.dims
    known = "scaled_dot_product" in launch.op  # others order batch, heads and length otherwise
    if not known or len(dims) < 3 or any(len(d) != 4 for d in dims[:3]):
        return None
    (b, heads, queries, head), (_, kv_heads, keys, _), (*_, v_head) = dims[:3]
    at = next((_MASK_AT[k] for k in _MASK_AT if k in launch.op), -1)
    full = at >= 0 and at < len(launch.inputs) and launch.inputs[at] == "False"
    op: dict[str, Any] = {"op": "attention", "heads": heads, "head_dim": head}
    op |= {"kv_heads": kv_heads} if kv_heads != heads else {}
    op |= {"v_head_dim": v_head} if v_head != head else {}
    op |= {"queries": queries} if queries != maker.seq else {}
    op |= {"keys": keys} if keys != queries else {}
    op |= {"samples": b} if b != maker.batch else {}
    return op | ({"mask": "full"} if full else {})


def _norm(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    if not launch.dims or not launch.dims[0]:
        return None
    *lead, width = launch.dims[0]
    rows = maker.rows(prod(lead))
    op: dict[str, Any] = {"op": "norm", "width": maker.size(width)}
    return op | ({"rows": rows} if rows != "batch * seq" else {})


def _embedding(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    if len(launch.dims) < 2 or len(launch.dims[0]) != 2 or not launch.dims[1]:
        return None
    rows, dim = launch.dims[0]
    samples = maker.rows(prod(launch.dims[1]))
    op: dict[str, Any] = {"op": "embedding_bag", "rows": rows, "dim": maker.size(dim)}
    return op | ({"samples": samples} if samples != "batch * seq" else {})


def _loss(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    known = launch.kernel_class == "loss" and "softmax" in launch.op
    if not known or not launch.dims or len(launch.dims[0]) != 2:
        return None
    rows, width = launch.dims[0]
    return {"op": "loss", "rows": maker.rows(rows), "width": width}


def _no_shape(maker: _Maker, launch: Launch) -> dict[str, Any] | None:
    return None


_SHAPED: dict[str, Callable[[_Maker, Launch], dict[str, Any] | None]] = {
    "gemm": _gemm, "attention": _attention, "norm": _norm, "embedding": _embedding, "loss": _loss,
}  # fmt: skip
