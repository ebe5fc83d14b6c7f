"""What a step costs, written down apart from prism: NCCL's collectives and a dense transformer.

Plain Python of the published formulas, on links and a device without measured tables, so that
every duration follows from a rate, and seconds of a step by class of kernel add up.
"""

import math

import prism

PEAK, PEAK_FP8 = 1307e12, 2615e12  # MI300X, dense [flop/s]
MEMORY, TDP = 5.3e12, 750.0  # [byte/s], power [W]
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
# base [s]; factors on a step's latency (NVLink, network) and on rates: NCCL 2.27, tuning.cc
_RINGS = (
    (8.4e-6, 1.0, 1.0, 1.0),
    (14e-6, 1.9 / 3.4, 4 / 14, 0.92),
    (6.6e-6, 0.6 / 3.4, 2.7 / 14, 0.5),
)
_TREES = ((8.4e-6, 4 / 3.4, 1.0, 0.92), (14e-6, 1.25 / 3.4, 8.5 / 14, 0.92 * 120 / 128),
          (6.8e-6, 0.6 / 3.4, 5 / 14, 0.92 / 3.8))  # fmt: skip


def value(name):
    """A figure of the library whose efficiencies hold where nothing was measured."""
    return _LIBRARY.value(f"nominal/{name}")


def make_job(layout=None, model=None, cluster=None, *, sizes=SMALL, effects=OFF, **run):
    """Make a job on as many nodes as its layout fills; by default nothing varies."""
    layout = layout or {}
    world = math.prod(layout.get(key, 1) for key in ("tp", "cp", "pp", "dp"))
    machine = {"device": "mi300x", "links": LINKS, "gpus_per_node": min(8, world)}
    machine |= cluster or {}
    machine.setdefault("nodes", world // machine["gpus_per_node"])
    return prism.load_job({
        "model": sizes | (model or {}), "parallelism": layout, "cluster": machine,
        "variability": {"library": None, "effects": effects, "model_error": 0.0}, "run": run,
    })  # fmt: skip


def simulate(job):
    """Simulate 64 steps, which are all alike where nothing varies."""
    return prism.simulate(job, replicates=64, seed=1)


def classes(job):
    """Seconds of a step on its critical path by class of kernel."""
    return prism.summary(simulate(job))["critical_path"]


def ring(n_bytes, n, k=1, op_kind="all_gather", slower=1.0, nvlink=NVLINK, network=NETWORK):
    """NCCL's fastest algorithm over n ranks in k domains [s]; `slower` is how uplinks are."""
    inside = n / k
    sending = max(n_bytes * (inside - 1) / inside / nvlink[0],
                  n_bytes * (k - 1) / k / inside / network[0] * slower)  # fmt: skip
    least = n_bytes * (k - 1) / k / 20e9  # the protocol LL has no more than 20 GB/s a node
    phases, times = 2.0 if op_kind == "all_reduce" else 1.0, []
    for i, (base, near, far, rate) in enumerate(_RINGS):
        steps = (n - k) * nvlink[1] * near + (k - 1) * network[1] * far
        times.append(base + phases * (steps + max(sending / rate, least * (i == 2))))
    for i, (base, near, far, rate) in enumerate(_TREES * (op_kind == "all_reduce")):
        steps = (inside - 1) * nvlink[1] * near + math.log2(k) * network[1] * far
        times.append(base + 2.0 * (steps + max(sending / rate, least * (i == 2))))
    if op_kind != "all_reduce" and n == k > 1:
        steps = (math.log2(k) / 3.5 + n * 2.8 / 14) * network[1]
        times.append(8e-6 + steps + sending / 0.75)
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


class Kernels:
    """Seconds by class of one microbatch, forward and backward, as kernels are added."""

    def __init__(self, framework="megatron", precision="bf16"):
        self.seconds, self.precision = {}, precision
        self.derate, self.traffic, self.attention = (
            value(f"{name}_{framework}") for name in ("derate", "traffic", "attention")
        )

    def add(self, name, seconds):
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return seconds

    def move(self, n_bytes, name="memory", traffic=None):
        n_bytes *= self.traffic if traffic is None else traffic
        rate = MEMORY * value("memory_efficiency")
        return self.add(name, value("kernel_launch_s") + n_bytes / rate)

    def cast(self, values):
        if self.precision == "fp8":  # read 2 bytes, write 1
            rate = MEMORY * value("cast_efficiency")
            self.add("memory", value("kernel_launch_s") + 3.0 * values / rate)

    def product(self, name, m, n, k, adds=False, precision=None):
        size, peak = (1.0, PEAK_FP8) if (precision or self.precision) == "fp8" else (2.0, PEAK)
        rate = peak * value("gemm_efficiency_max") * self.derate
        flop = 2.0 * m * n * k + value("gemm_half_flop")
        n_bytes = size * (m * k + k * n) + (8.0 if adds else 2.0) * m * n
        moved = value("kernel_launch_s") + n_bytes / MEMORY / value("memory_efficiency")
        return self.add(name, max(value("kernel_launch_s") / self.derate + flop / rate, moved))

    def attend(self, flop, name="attention_efficiency"):
        rate = PEAK * value(name) * self.derate * self.attention
        return self.add("attention", value("kernel_launch_s") + flop / rate)


def microbatch(model, layout):
    """Seconds by class of a microbatch's forward and backward on one GPU of a tp x cp group."""
    tp, cp, b = (layout.get(key, 1) for key in ("tp", "cp", "microbatch_size"))
    recompute, framework = layout.get("recompute", "none"), layout.get("framework", "megatron")
    spread = layout.get("sequence_parallel", True)
    out = Kernels(framework, layout.get("precision", "bf16"))
    h, f, heads = model["hidden_size"], model["ffn_size"] / tp, model["n_heads"] / tp
    head = model.get("head_size") or model["hidden_size"] / model["n_heads"]
    t, vocab = b * model["seq_len"] / cp, model["vocab_size"] / tp
    r = t / tp if spread else t
    q, keys = heads * head, max(1.0, model.get("n_kv_heads", model["n_heads"]) / tp) * head
    up = (2 if model.get("gated_mlp", True) else 1) * f
    flop, eight = b * attention_flop(model) / tp / cp, out.precision == "fp8"

    def gather(scale=1.0):
        if spread and tp > 1:
            out.add("tp_all_gather", ring(2.0 * t * h * scale, tp))

    def leave(hidden_s=None):
        if tp > 1:
            op_kind = "reduce_scatter" if spread else "all_reduce"
            whole = ring(2.0 * t * h, tp, op_kind=op_kind)
            seen = whole if hidden_s is None else max(whole - hidden_s, 0.2 * whole)
            out.add(f"tp_{op_kind}", seen)

    def context():
        if cp > 1:  # one class for gathering keys and scattering their gradients
            nodes = max(1, tp * cp // 8)
            out.add("cp_all_gather", ring(2.0 * t * cp * 2 * keys, cp, nodes))

    def enter():
        out.cast(r * h)
        gather(0.5 if eight else 1.0)

    def rope():
        if model.get("rope", True):
            out.move(4 * t * (q + keys))

    def forward(last=True):
        out.move(4 * r * h)
        enter()
        out.product("gemm_attention", t, q + 2 * keys, h)
        rope()
        context()
        out.attend(flop)
        out.cast(t * q)
        out.product("gemm_attention", t, h, q)
        leave()
        out.move(6 * r * h)
        out.move(4 * r * h)
        enter()
        out.product("gemm_mlp", t, up, h)
        out.move(2 * t * (up + f))
        out.cast(t * f)
        if last:
            out.product("gemm_mlp", t, h, f)
            leave()
            out.move(6 * r * h)

    def selected():
        """Every second product of q, k, v, out, gate, up, down, and what is no product."""
        out.move(4 * r * h)
        enter()
        out.product("gemm_attention", t, keys, h)
        rope()
        out.product("gemm_attention", t, h, q)
        out.move(6 * r * h)
        out.move(4 * r * h)
        enter()
        if model.get("gated_mlp", True):
            out.product("gemm_mlp", t, f, h)
        out.move(2 * t * (up + f))

    def gradients(name, n, k, leaves=False, precision=None):
        out.product(name, t, k, n, precision=precision)
        weight = out.product(name, k, n, t, adds=True, precision=precision)
        if leaves:
            leave(weight)

    for _ in range(model["n_layers"]):
        forward()
        if recompute == "full":  # torch stops before the last product, Megatron does not
            forward(last=framework == "megatron")
        elif recompute == "selective":
            selected()
        enter()
        gradients("gemm_mlp", h, f)
        out.move(2 * t * (2 * up + f))
        out.cast(t * up)
        gradients("gemm_mlp", up, h, leaves=True)
        out.move(6 * r * h)
        out.move(6 * r * h)
        enter()
        gradients("gemm_attention", h, q)
        context()
        out.attend(2.5 * flop, "attention_backward_efficiency")
        context()
        rope()
        out.cast(t * (q + 2 * keys))
        gradients("gemm_attention", q + 2 * keys, h, leaves=True)
        out.move(6 * r * h)
        out.move(6 * r * h)
    out.move(4 * t * h, "embedding")
    leave()
    gather()
    out.move(10 * t * h, "embedding")
    out.move(4 * r * h)
    gather()
    out.product("loss", t, vocab, h, precision="bf16")
    out.move(16 * t * vocab, "loss")
    if tp > 1:
        out.add("tp_all_reduce", ring(12.0 * t, tp, op_kind="all_reduce"))
    out.move(6 * t * vocab, "loss")
    gradients("loss", vocab, h, leaves=True, precision="bf16")
    out.move(6 * r * h)
    return out.seconds


def step(model, layout):
    """Seconds by class of a step without a pipeline, gradients reduced after the backward."""
    out = {name: s * layout.get("microbatches", 1) for name, s in microbatch(model, layout).items()}
    tp, cp, dp = (layout.get(key, 1) for key in ("tp", "cp", "dp"))
    out["optimizer"] = Kernels().move(30.0 * parameters(model) / tp, traffic=1.0)
    world = tp * cp * dp
    if world > 1:
        out["world_all_reduce"] = ring(4.0, world, max(1, world // 8), "all_reduce")
    if tp > 1 and layout.get("sequence_parallel", True):
        size = 4.0 * 2 * model["hidden_size"] * model["n_layers"]  # norms' gradients
        out["tp_all_reduce"] += ring(size, tp, op_kind="all_reduce")
    return out
