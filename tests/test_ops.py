"""What a step's cost does as sizes and hardware change, and the work of a layer's passes.

Continuity, order and sums; seconds by class against a transformer written down apart are in
`test_workload.py`.
"""

import math
from collections import Counter
from itertools import pairwise

import costs_made as made
import pytest
from costs_made import FRAMEWORKS, SMALL, classes, make_job, parameters
from drawn_steps import draw_steps
from hypothesis import given, settings
from hypothesis import strategies as st

import prism

# ------------------------------------------------------------------ sizes and hardware, H100
SIZES = {"n_layers": 1, "hidden_size": 4096, "ffn_size": 14_336, "n_heads": 32, "n_kv_heads": 8,
         "head_size": 128, "vocab_size": 32_000, "seq_len": 4096}  # fmt: skip
LINKS = {
    "nvlink": {"bandwidth_gbytes_per_s": 450.0, "efficiency": 0.8, "latency_us": 3.4},
    "network": {"bandwidth_gbytes_per_s": 50.0, "efficiency": 0.5, "latency_us": 14.0},
}
SIZE_KEYS = ("hidden_size", "ffn_size", "n_heads", "seq_len", "vocab_size", "microbatch_size")
# one percent of a size: attention grows with its square; a table's rate dips by up to 12 % between
# sizes that were measured, which are a factor of two apart, so that a little more may be cheaper
JUMP, DIP = 0.02, 0.002


def ideal(model=None, layout=None, cluster=None, device="h100"):
    links = {kind: dict(link) for kind, link in LINKS.items()}
    machine = {"device": device, "links": links} | (cluster or {})
    layout = {"microbatches": 1} | (layout or {})
    job = make_job(layout, model, machine, sizes=SIZES)
    return float(draw_steps(job, 64, 1).ideal_step_time)


def sized(key, value, more=None):
    """A model and a layout with one size changed; heads stay 128 wide."""
    if key == "microbatch_size":
        return {"seq_len": 1024}, {key: value} | (more or {})
    own = {key: value} | ({"n_kv_heads": value} if key == "n_heads" else {})
    return own, more or {}


@settings(max_examples=60)
@given(
    key=st.sampled_from(SIZE_KEYS), log_size=st.floats(0.0, 1.0),
    framework=st.sampled_from(sorted(FRAMEWORKS)),
    device=st.sampled_from(["h100", "h200", "a100", "b200", "mi300x"]), slow=st.booleans(),
)  # fmt: skip
def test_one_percent_of_a_size_is_no_jump(key, log_size, framework, device, slow):
    low, high = {"hidden_size": (1024, 12_288), "ffn_size": (2048, 49_152), "n_heads": (100, 200),
                 "seq_len": (1024, 32_768), "vocab_size": (8_000, 200_000),
                 "microbatch_size": (100, 200)}[key]  # fmt: skip
    size = round(low * (high / low) ** log_size)
    more = round(1.01 * size)
    clock = {"clock_mhz": 400.0} if slow else {}
    a, b = (ideal(*sized(key, n, {"framework": framework}), clock, device) for n in (size, more))
    assert abs(math.log(b / a)) < JUMP * math.log(more / size) / math.log(1.01)
    assert b > a * (1.0 - DIP)


@settings(max_examples=20)
@given(
    key=st.sampled_from(["seq_len", "microbatch_size"]), step=st.integers(0, 4),
    framework=st.sampled_from(sorted(FRAMEWORKS)), limit=st.sampled_from([None, 350.0]),
)  # fmt: skip
def test_twice_the_tokens_take_longer(key, step, framework, limit):
    size = {"seq_len": 512, "microbatch_size": 1}[key] * 2**step
    power = {"power_limit_w": limit} if limit else {}
    a, b = (ideal(*sized(key, n, {"framework": framework}), power) for n in (size, 2 * size))
    assert b > 1.1 * a


@settings(max_examples=30)
@given(
    what=st.sampled_from(["nvlink", "network", "power_limit_w", "clock_mhz"]),
    at=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3, unique=True),
    layout=st.sampled_from([
        {"tp": 8}, {"tp": 4, "cp": 2}, {"tp": 2, "pp": 2, "dp": 4, "microbatches": 4},
        {"dp": 16}, {"dp": 16, "data_parallel": "fsdp"}, {"tp": 8, "dp": 2, "microbatches": 2},
    ]),
)  # fmt: skip
def test_faster_hardware_is_never_slower(what, at, layout):
    """Also a link's, though GPUs that wait less have less power for each second of work."""
    found = []
    for share in sorted(at):
        cluster = {
            "power_limit_w": {what: 175.0 + 525.0 * share},
            "clock_mhz": {what: 300.0 + 1680.0 * share},
        }.get(what)
        if cluster is None:
            bandwidth = {"nvlink": 50.0, "network": 2.0}[what] * 50.0**share
            own = LINKS[what] | {"bandwidth_gbytes_per_s": bandwidth}
            cluster = {"links": LINKS | {what: own}}
        found.append(ideal({"n_layers": 2}, layout, cluster))
    assert all(later <= earlier * (1.0 + 1e-5) for earlier, later in pairwise(found))


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_group_of_more_gpus_computes_less_on_each(framework):
    kinds = ("gemm_attention", "gemm_mlp", "attention", "loss")
    own = [
        classes(make_job({"tp": tp, "framework": framework}, sizes=SIZES)) for tp in (1, 2, 4, 8)
    ]
    for kind in kinds:
        seconds = [found[kind] for found in own]
        assert seconds == sorted(seconds, reverse=True)
    assert own[3]["gemm_mlp"] == pytest.approx(own[0]["gemm_mlp"] / 8, rel=0.25)


# ------------------------------------------------------------- parameters, flop, MI300X
H, L = SMALL["hidden_size"], SMALL["n_layers"]
PER_FLOP = made.mean("gemm", m=4096, n=4096, k=4096) / (2.0 * 4096**3)  # forward, of any shape


def updated(job):
    """Parameters that each rank updates, by rank: of the time of an update of 30 bytes each."""
    found = prism.timeline(job)
    first, second = (made.mean("memory", bytes=x) for x in (1e9, 2e9))
    names, out = found["label"].values[found["event_name"].values], Counter()
    for row, name, seconds in zip(
        found["event_row"].values, names, found["duration"].values, strict=True
    ):
        if str(name).startswith("optimizer"):
            out[int(row)] += (1e9 + (seconds - first) / (second - first) * 1e9) / 30.0
    return list(out.values())


@pytest.mark.parametrize(
    ("layout", "norms"),
    [
        ({"tp": 4}, 4), ({"pp": 2, "microbatches": 2}, 1),
        ({"tp": 2, "pp": 2, "microbatches": 2}, 2), ({"cp": 2}, 1),
    ],
)  # fmt: skip
def test_all_gpus_together_have_the_models_parameters(layout, norms):
    """With what is there more than once: norms on each rank of a tp group."""
    found = updated(make_job(layout))
    stages, tp = layout.get("pp", 1), layout.get("tp", 1)
    assert len(found) % stages == 0
    total = sum(found) / (len(found) / stages) * tp  # rows of a stage are alike
    more = (norms - 1) * (2 * L + 1) * H
    assert total == pytest.approx(parameters(SMALL) + more, rel=1e-4)


LAYER = parameters(SMALL, 1) - parameters(SMALL, 0) - 2 * H  # matrices'
Q, KEYS, F = H, H / 2, SMALL["ffn_size"]
TOKENS = SMALL["seq_len"]
MATRICES = {  # what each is from and to: one product of q, k and v, and of gate and up, or apart
    True: ((H, Q + 2 * KEYS), (Q, H), (H, 2 * F), (F, H)),
    False: ((H, Q), (H, KEYS), (H, KEYS), (Q, H), (H, F), (H, F), (F, H)),
}


@pytest.mark.parametrize(
    ("layout", "again"),
    [
        ({}, 0.0),
        ({"recompute": "full"}, LAYER - F * H),  # PyTorch needs the last product's result no more
        ({"recompute": "full", "framework": "eager"}, LAYER - F * H),
        # of q, k, v, out, gate, up, down every second one: k, out, up
        ({"recompute": "selective"}, H * (KEYS + Q + F)),
        ({"recompute": "selective", "framework": "compiled"}, H * (KEYS + Q + F)),
    ],
)
def test_a_backward_has_both_gradients_of_each_matrix_and_what_is_computed_again(layout, again):
    """Forward in seconds of its flop; no weight gradient is added up by its product here."""
    layout = {"framework": "nanotron"} | layout
    shapes = MATRICES[FRAMEWORKS[layout["framework"]].one_product]
    assert sum(n * k for k, n in shapes) == LAYER
    both = [made.mean("gemm", m=TOKENS, n=n, k=k, backward=True) for k, n in shapes]
    forward = 2.0 * TOKENS * (LAYER + again) * PER_FLOP
    found = classes(make_job(layout))
    speed = made.value("speed_nanotron") if layout["framework"] == "nanotron" else 1.0
    expected = L * (forward + sum(both)) / speed
    assert found["gemm_attention"] + found["gemm_mlp"] == pytest.approx(expected, rel=1e-5)


def test_megatron_computes_all_of_a_layer_again():
    plain, full = (classes(make_job({"recompute": r})) for r in ("none", "full"))
    more = sum(full[kind] - plain[kind] for kind in ("gemm_attention", "gemm_mlp"))
    assert more / PER_FLOP == pytest.approx(L * 2.0 * TOKENS * LAYER, rel=1e-4)
    attention = {"batch": 1, "heads": 16, "kv_heads": 8, "seq": TOKENS, "head_dim": H / 16}
    once = made.ATTENTION_AT_CAP * made.mean("attention", backend="fa2", **attention)
    assert full["attention"] - plain["attention"] == pytest.approx(L * once, rel=1e-4)


# ------------------------------------------------------------------------------- optimizers
BF16 = {"gradient_dtype": "bf16", "optimizer_dtype": "bf16"}


@pytest.mark.parametrize(
    ("layout", "each"),
    [
        # two states, master copy and weight: read and written in float32; gradient; bf16 weight
        ({}, 30.0), (BF16, 14.0), ({"optimizer": "sgd"} | BF16, 6.0),
        ({"gradient_dtype": "bf16"}, 28.0), ({"optimizer_dtype": "bf16"}, 16.0),
        ({"optimizer": "sgd"}, 14.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_bytes_of_an_update(layout, each, framework):
    found = classes(make_job({"framework": framework} | layout))["optimizer"]
    moved = each * parameters(SMALL) / FRAMEWORKS[framework].optimizer
    assert found == pytest.approx(made.mean("memory", bytes=moved), rel=1e-5)


def test_muon_makes_each_matrix_orthogonal_in_five_steps_of_three_products():
    found = classes(make_job({"optimizer": "muon"} | BF16, {"tied_embeddings": True}))["optimizer"]
    tied = parameters(SMALL | {"tied_embeddings": True})
    update = made.mean("memory", bytes=10.0 * tied)  # one state
    shapes = [(H, Q), (H, KEYS), (H, KEYS), (Q, H), (H, F), (H, F), (F, H)]
    seconds = 0.0
    for shape in shapes:
        a, b = sorted(shape)
        seconds += sum(
            made.mean("gemm", m=m, n=n, k=k) for m, n, k in ((a, a, b), (a, a, a), (a, b, a))
        )
    assert found == pytest.approx(update + L * 5 * seconds, rel=1e-5)
    # ranks that share the states share the products, too
    layout = {"optimizer": "muon", "dp": 8, "data_parallel": "zero1"} | BF16
    shared = classes(make_job(layout, {"tied_embeddings": True}))["optimizer"]
    eighth = made.mean("memory", bytes=10.0 * tied / 8) + L * 5 * seconds / 8
    assert shared == pytest.approx(eighth, rel=1e-5)
