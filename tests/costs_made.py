"""What a step costs, written down apart from prism: NCCL's collectives and a dense transformer.

Plain Python of which kernels a layer has in each framework, with which sizes. One kernel's duration
is asked of `prism.kernel`, collectives follow from published formulas; seconds by class add up.
"""

import csv
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import prism

PEAK, PEAK_FP8 = 1307e12, 2615e12  # MI300X, dense [flop/s]
TDP = 750.0  # power [W]
NVLINK, NETWORK = (400e9, 5e-6), (40e9, 20e-6)  # rate [byte/s], latency of a step [s]
LINKS = {
    name: {"bandwidth_gbytes_per_s": 2e-9 * rate, "efficiency": 0.5, "latency_us": 1e6 * latency}
    for name, (rate, latency) in (("nvlink", NVLINK), ("network", NETWORK))
}
OFF = {
    "rank": {"cv": 0.0}, "step": {"cv": 0.0}, "jitter": {"mean_s": 0.0}, "call": {"cv": 0.0},
    "regime": {"probability": 0.0}, "stall": {"rate_per_hour": 0.0}, "microbatch": {"cv": 0.0},
    "residual": {"cv": 0.0},
}  # fmt: skip
SMALL = {"n_layers": 2, "hidden_size": 1024, "ffn_size": 2816, "n_heads": 16, "n_kv_heads": 8,
         "vocab_size": 8192, "seq_len": 4096}  # fmt: skip
_LIBRARY = prism.load_library("mi300x-healthy")
with open(Path(__file__).parents[1] / "experiments" / "library" / "transports.csv") as _file:
    _NCCL = {r["figure"]: float(r["value"]) for r in csv.DictReader(_file)
             if r["transport"] == "all"}  # fmt: skip


def value(name):
    """A figure of the device's library."""
    return _LIBRARY.value(f"nominal/{name}")


def make_job(layout=None, model=None, cluster=None, *, sizes=SMALL, effects=OFF, **run):
    """Make a job on nodes that its layout fills; launches are free, nothing varies unless told."""
    layout = layout or {}
    world = math.prod(layout.get(key, 1) for key in ("tp", "cp", "pp", "dp"))
    machine = {"device": "mi300x", "links": LINKS, "gpus_per_node": min(8, world)}
    machine |= cluster or {}
    machine.setdefault("nodes", world // machine["gpus_per_node"])
    return prism.load_job({
        "model": sizes | (model or {}), "parallelism": layout, "cluster": machine,
        "variability": {"library": None, "host_scale": 1e-9, "effects": effects,
                        "model_error": 0.0},
        "run": run,
    })  # fmt: skip


def simulate(job):
    """Simulate 64 steps, which are all alike where nothing varies."""
    return prism.simulate(job, replicates=64, seed=1)


def classes(job):
    """Seconds of a step on its critical path by class of kernel."""
    return prism.summary(simulate(job))["critical_path"]


def ring(n_bytes, n, k=1, op_kind="all_gather", slower=1.0, nvlink=NVLINK, network=NETWORK):
    """NCCL's ring or tree over n ranks in k domains [s]; `slower` is how uplinks are."""
    f, g, step = _NCCL, n / k, 0.43 * nvlink[1]
    hop, far = (network[1], 1.0) if k > 1 else (nvlink[1], 0.0)

    def wires(sent, passed):
        return far * math.hypot(sent * slower / g / network[0], passed / f["channels_bytes_per_s"])

    def filled(x):
        return (x / (x + 32e6)) ** f["power"]

    moved, phases = n_bytes * (n - 1) / n, 2.0 if op_kind == "all_reduce" else 1.0
    steps = (k - 1) * hop + (n - k) * step * f["beyond" if k > 1 else "within"]
    steps *= f["least"] + (1.0 - f["least"]) * filled(n_bytes / n)
    sending = max(wires(moved, moved), n_bytes * (g - 1) / g / nvlink[0])
    times = [hop + phases * (steps / math.sqrt(1.0 + (k - 1) / 100) + sending)]
    if op_kind == "all_reduce":
        levels = far * (1.0 + math.log2(k)) * hop * f["level"] * filled(n_bytes)
        sent = n_bytes * min(k, 4) / 2
        inside = 2.0 * n_bytes * min(g - 1, 1.0) / nvlink[0] / f["chain_rate"]
        chain = 2.0 * (g - 1) * step * f["chain"]
        times.append(hop + levels + chain + max(wires(sent, 2.0 * (sent - n_bytes)), inside))
    return min(times)


def parameters(model, layers=None):
    """Parameters of a dense transformer: layers, both tables (tied: one), the last norm."""
    h, f, heads = model["hidden_size"], model["ffn_size"], model["n_heads"]
    head = model.get("head_size") or h // heads
    keys = model.get("n_kv_heads", heads) * head
    layer = 2 * h * heads * head + 2 * h * keys + 2 * h
    layer += (3 if model.get("gated_mlp", True) else 2) * h * f
    tables = (1 if model.get("tied_embeddings") else 2) * model["vocab_size"] * h
    return (model["n_layers"] if layers is None else layers) * layer + tables + h


def attention_flop(model):
    """Flop of one layer's causal attention forward, of one sequence."""
    s = model["seq_len"]
    w = min(model.get("window") or s, s)
    head = model.get("head_size") or model["hidden_size"] // model["n_heads"]
    return 2.0 * model["n_heads"] * head * (2 * s * w - w * w)


class Framework(NamedTuple):
    """What a framework launches: passes over bfloat16 values and launches, forward, backward."""

    norm: str | tuple[float, float] = "te"  # backend, or passes
    norm_launches: tuple[float, float] = (1, 1)
    rope: tuple[float, ...] = (2, 2, 1, 1)
    swiglu: tuple[float, ...] = (3, 5, 1, 1)
    residual: tuple[float, ...] = (3, 3, 1, 1)
    repeat: tuple[float, ...] = (0, 0, 0, 0)
    layout: tuple[float, ...] = (0, 0, 0, 0)
    loss: tuple[float, float] = (6, 6)  # bytes a logit
    cast: tuple[float, float] = (0, 0)  # of a logit to float32, and its gradient back
    table: tuple[float, float] = (4, 10)  # bytes of an embedded value
    attention: tuple[float, float] = (1, 1)  # launches
    product: tuple[float, float] = (1, 2)
    one_product: bool = True  # of q, k and v, and of gate and up
    adds_up: bool = True  # the product adds to the weight gradients of earlier microbatches
    early: bool = True  # recomputation stops before a layer's last product
    optimizer: float = 0.74  # of a copy's rate


EAGER = Framework(
    norm="eager", norm_launches=(1, 2), rope=(20.1, 24.2, 16, 24), swiglu=(4.75, 8.7, 2, 3),
    residual=(2.8, 2.7, 1, 1), repeat=(4.3, 3.8, 2, 2), layout=(2.3, 5.0, 1, 3),
    loss=(15, 16.5), cast=(9.9, 11.2), table=(4, 60), attention=(2, 4), product=(1.9, 3.7),
    one_product=False, adds_up=False,
)  # fmt: skip
FRAMEWORKS = {
    "megatron": Framework(early=False, optimizer=1.0),  # its loss is one kernel by default
    "eager": EAGER,
    "compiled": Framework(
        norm=(2.4, 4.2), norm_launches=(1, 2), rope=(2.7, 2.7, 3, 4), swiglu=(2.9, 4.8, 1, 1),
        residual=(1.3, 1.3, 0, 0), repeat=(2, 2, 0, 0), layout=(0.3, 0, 0, 0), loss=(5.6, 5.7),
        attention=(2, 4), product=(1.9, 3.7), one_product=False, adds_up=False,
    ),
    "nanotron": Framework(
        rope=EAGER.rope, swiglu=EAGER.swiglu, residual=EAGER.residual, layout=EAGER.layout,
        loss=EAGER.loss, cast=EAGER.cast, table=EAGER.table, product=EAGER.product, adds_up=False,
    ),
    "transformers": EAGER._replace(
        norm=(18, 38), norm_launches=(6, 14), rope=(10, 15, 5, 9), cast=(17.9, 19.2)
    ),
}  # fmt: skip
GELU = (2, 3, 1, 1)
# a step within its power limit multiplies as fast as its tables, 1.14 times the speed back to back
# at the TDP, and attends faster than its own, which are 1.10 times that; it follows the clock,
# which is the power 1 / .95 of the products' speed
ATTENTION_AT_CAP = (1.10 / 1.14) ** (1 / 0.95)


@cache
def mean(kind, **sizes):
    """Mean duration of one kernel on its own, of MI300X's measured tables [s]."""
    return prism.kernel(kind, "mi300x", **sizes)["mean"]


class Kernels:
    """Seconds by class of one microbatch, forward and backward, as kernels are added."""

    def __init__(self, framework="megatron", precision="bf16"):
        self.seconds, self.precision, self.framework = {}, precision, FRAMEWORKS[framework]
        self.speed = value("speed_nanotron") if framework == "nanotron" else 1.0

    def add(self, name, seconds):
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    def launch(self, n):
        """Nothing runs between two kernels."""
        self.add("launch_gaps", n * value("kernel_launch_s"))

    def move(self, n_bytes, name="memory", launches=1):
        if n_bytes > 0.0:
            self.launch(launches)
            return self.add(name, mean("memory", bytes=n_bytes))
        return 0.0

    def pointwise(self, passes, values, backward):
        self.move(2.0 * passes[backward] * values, launches=passes[2 + backward])

    def norm(self, rows, width, backward):
        backend, launches = self.framework.norm, self.framework.norm_launches[backward]
        if isinstance(backend, tuple):
            return self.move(2.0 * backend[backward] * rows * width, launches=launches)
        self.launch(launches)
        sizes = {"rows": rows, "columns": width, "backend": backend, "backward": bool(backward)}
        return self.add("memory", mean("rms_norm", **sizes))

    def product(self, name, m, n, k, precision=None):
        self.launch(self.framework.product[0])
        own = mean("gemm", m=m, n=n, k=k, dtype=precision or self.precision)
        return self.add(name, own / self.speed)

    def gradient(self, name, m, n, k, weight=False, precision=None):
        """Half of the gradients of a forward [m, k] x [k, n], which were measured together.

        A weight's is read and written in float32 where added up.
        """
        self.launch(self.framework.product[1] / 2)
        dtype = precision or self.precision
        own = mean("gemm", m=m, n=n, k=k, dtype=dtype, backward=True) / 2 / self.speed
        if weight and self.framework.adds_up:
            own += mean("memory", bytes=(8.0 - 2.0) * n * k)
        return self.add(name, own)

    def attend(self, backward, **sizes):
        self.launch(self.framework.attention[backward])
        own = mean("attention", backend="fa2", backward=bool(backward), **sizes)
        return self.add("attention", ATTENTION_AT_CAP * own / self.speed)


def on_one_gpu(model, layout):
    """Widths of one GPU's queries, keys (as wide as the values) and feed-forward layer."""
    tp = layout.get("tp", 1)
    head = model.get("head_size") or model["hidden_size"] / model["n_heads"]
    keys = max(1.0, model.get("n_kv_heads", model["n_heads"]) / tp) * head
    return model["n_heads"] / tp * head, keys, model["ffn_size"] / tp


def held(model, layout):
    """Parameters on one GPU of a tp group: norms whole, and a key head at least."""
    h, (q, keys, f) = model["hidden_size"], on_one_gpu(model, layout)
    layer = h * (2 * q + 2 * keys + (3 if model.get("gated_mlp", True) else 2) * f) + 2 * h
    tables = (1 if model.get("tied_embeddings") else 2) * model["vocab_size"] * h
    return model["n_layers"] * layer + tables / layout.get("tp", 1) + h


def microbatch(model, layout):
    """Seconds by class of a microbatch's forward and backward on one GPU of a tp x cp group."""
    tp, cp, b = (layout.get(key, 1) for key in ("tp", "cp", "microbatch_size"))
    recompute, spread = layout.get("recompute", "none"), layout.get("sequence_parallel", True)
    out = Kernels(layout.get("framework", "megatron"), layout.get("precision", "bf16"))
    how, eight = out.framework, out.precision == "fp8"  # products quantize their operands
    h, (q, keys, f) = model["hidden_size"], on_one_gpu(model, layout)
    t, vocab = b * model["seq_len"] / cp, model["vocab_size"] / tp
    r, gated = t / tp if spread else t, model.get("gated_mlp", True)
    heads, activation = model["n_heads"] / tp, how.swiglu if gated else GELU
    head = q / heads
    attention = {"batch": b, "heads": heads / cp, "kv_heads": keys / head / cp,
                 "seq": model["seq_len"], "head_dim": head}  # fmt: skip
    attention |= {"window": model["window"]} if model.get("window") else {}
    apart = {True: ((q + 2 * keys,), ((2 if gated else 1) * f,)),
             False: ((q, keys, keys), (f,) * (2 if gated else 1))}  # fmt: skip
    qkv, up = apart[how.one_product]
    adding = {"fp32": 10.0, "bf16": 6.0 * (1 - 1 / layout.get("microbatches", 1))}
    adding = adding[layout.get("gradient_dtype", "fp32")]

    def gather(scale=1.0):
        if spread and tp > 1:
            out.add("tp_all_gather", ring(2.0 * t * h * scale, tp))

    def leave(hidden_s=0.0):
        """Reduce beside weight gradients of some duration, which it makes longer."""
        if tp > 1:
            op_kind = "reduce_scatter" if spread else "all_reduce"
            whole = ring(2.0 * t * h, tp, op_kind=op_kind)
            seen = whole - (1.0 - value("overlap_cost")) * min(whole, hidden_s)
            out.add(f"tp_{op_kind}", seen)

    def context():
        if cp > 1:  # one class for gathering keys and scattering their gradients
            nodes = max(1, tp * cp // 8)
            out.add("cp_all_gather", ring(2.0 * t * cp * 2 * keys, cp, nodes))

    def enter():
        gather(0.5 if eight else 1.0)

    def heads_made(backward):
        """Rotate queries and keys, repeat keys and values, lay them out."""
        if model.get("rope", True):
            out.pointwise(how.rope, t * (q + keys), backward)
        if keys < q:
            out.pointwise(how.repeat, t * 2 * q, backward)
        out.pointwise(how.layout, t * (q + 2 * keys), backward)

    def products(name, widths, depth):
        for width in widths:
            out.product(name, t, width, depth)

    def forward(last=True):
        out.norm(r, h, 0)
        enter()
        products("gemm_attention", qkv, h)
        heads_made(0)
        context()
        out.attend(0, **attention)
        products("gemm_attention", (h,), q)
        leave()
        out.pointwise(how.residual, r * h, 0)
        out.norm(r, h, 0)
        enter()
        products("gemm_mlp", up, h)
        out.pointwise(activation, t * f, 0)
        if last:
            products("gemm_mlp", (h,), f)
            leave()
            out.pointwise(how.residual, r * h, 0)

    def selected():
        """Every second product of q, k, v, out, gate, up, down, and what is no product."""
        out.norm(r, h, 0)
        enter()
        products("gemm_attention", (keys,), h)
        heads_made(0)
        products("gemm_attention", (h,), q)
        out.pointwise(how.residual, r * h, 0)
        out.norm(r, h, 0)
        enter()
        products("gemm_mlp", (f,) if gated else (), h)
        out.pointwise(activation, t * f, 0)

    def gradients(name, widths, k, leaves=False, precision=None):
        """Of the operand, by each product and summed; of the weights, added to earlier ones."""
        for width in widths:
            out.gradient(name, t, width, k, precision=precision)
        for _ in widths[1:]:
            out.pointwise(how.residual, t * k, 1)
        weights = [out.gradient(name, t, n, k, True, precision) for n in widths]
        if leaves:
            leave(sum(weights))
        if not how.adds_up:
            out.move(adding * sum(widths) * k)

    for _ in range(model["n_layers"]):
        forward()
        if recompute == "full":
            forward(last=not how.early)
        elif recompute == "selective":
            selected()
        enter()
        gradients("gemm_mlp", (h,), f)
        out.pointwise(activation, t * f, 1)
        gradients("gemm_mlp", up, h, leaves=True)
        out.norm(r, h, 1)
        out.pointwise(how.residual, r * h, 1)
        enter()
        gradients("gemm_attention", (h,), q)
        context()
        out.attend(1, **attention)
        context()
        heads_made(1)
        gradients("gemm_attention", qkv, h, leaves=True)
        out.norm(r, h, 1)
        out.pointwise(how.residual, r * h, 1)
    out.move(how.table[0] * t * h, "embedding")
    leave()
    gather()
    out.move(how.table[1] * t * h, "embedding")
    out.norm(r, h, 0)
    gather()
    out.product("loss", t, vocab, h, precision="bf16")
    out.move(how.cast[0] * t * vocab)
    out.move(how.loss[0] * t * vocab, "loss")
    if tp > 1:
        out.add("tp_all_reduce", ring(12.0 * t, tp, op_kind="all_reduce"))
    out.move(how.loss[1] * t * vocab, "loss")
    out.move(how.cast[1] * t * vocab)
    gradients("loss", (vocab,), h, leaves=True, precision="bf16")
    out.norm(r, h, 1)
    return out.seconds


def step(model, layout):
    """Seconds by class of a step without a pipeline, gradients reduced after the backward."""
    out = {name: s * layout.get("microbatches", 1) for name, s in microbatch(model, layout).items()}
    tp, cp, dp = (layout.get(key, 1) for key in ("tp", "cp", "dp"))
    rate = FRAMEWORKS[layout.get("framework", "megatron")].optimizer
    each = 28.0 if layout.get("gradient_dtype") == "bf16" else 30.0  # of Adam in float32
    out["optimizer"] = mean("memory", bytes=each * held(model, layout) / rate)
    world = tp * cp * dp
    if world > 1:
        out["world_all_reduce"] = ring(4.0, world, max(1, world // 8), "all_reduce")
    if tp > 1 and layout.get("sequence_parallel", True):
        size = 4.0 * model["hidden_size"] * (2 * model["n_layers"] + 1)  # norms' gradients
        out["tp_all_reduce"] += ring(size, tp, op_kind="all_reduce")
    return out
