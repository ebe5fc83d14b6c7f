"""`prism kernel`: one kernel or collective, against the library's tables and distributions."""

import json
import math

import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import prism
import prism.plots

GEMM = {"m": 4096, "n": 8192, "k": 2048}
ATTENTION = {"batch": 2, "heads": 32, "seq": 4096, "head_dim": 128}
REDUCE = {"op": "all_reduce", "bytes": 2**26, "ranks": 8}
CASES = {
    "gemm": GEMM,
    "grouped_gemm": {"experts": 8} | GEMM,
    "attention": ATTENTION,
    "rms_norm": {"rows": 8192, "columns": 4096},
    "layer_norm": {"rows": 8192, "columns": 4096},
    "memory": {"bytes": 2**28},
    "gated_delta": {"tokens": 8192, "heads": 32, "head_dim": 128},
    "kda": {"tokens": 8192, "heads": 32, "head_dim": 128},
    "mamba2": {"tokens": 8192, "heads": 32, "head_dim": 128, "state": 128},
    "collective": REDUCE,
}
FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}
HELD = 2e-4  # logarithms of rates are held to 1e-4
TILES = 0.12  # of a product that grows: it may fill a GPU's last round of tiles, and take less


def words(kind, device, sizes):
    """The same as a command's words."""
    flags = [f"--{k.replace('_', '-')}" for k, v in sizes.items() if v is True]
    rest = [(f"--{k.replace('_', '-')}", v) for k, v in sizes.items() if v is not True]
    return ["kernel", kind, "--device", device, *flags, *(word for pair in rest for word in pair)]


@pytest.mark.parametrize("device", ["a100", "h100", "b200", "gb300", "mi300x"])
@pytest.mark.parametrize("kind", CASES)
def test_figures_of_every_kind_are_consistent(kind, device):
    found = prism.kernel(kind, device=device, **CASES[kind])
    assert (found["kind"], found["device"]) == (kind, device)
    assert 0.0 < found["p5"] < found["p50"] < found["p95"]
    assert found["p5"] < found["mean"] < found["p95"] and found["cv"] > 0.0
    assert found["source"] and type(found["extrapolated"]) is bool
    assert found["sizes"].items() >= {k: v for k, v in CASES[kind].items() if k != "op"}.items()
    assert ("tflops" in found) is (kind.endswith("gemm") or "head_dim" in found["sizes"])
    assert ("tflops" in found) is not ("bytes_per_s" in found)
    assert ("bus_bytes_per_s" in found) is (kind == "collective")
    if kind != "grouped_gemm":  # its fits are of layers, and reach 1.1 times the peak
        assert found.get("of_peak", 0.5) < 1.0
    assert ("backends" in found) <= (kind in ("attention", "rms_norm", "layer_norm"))


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp8_block"])
def test_a_product_takes_what_the_library_s_table_says(dtype):
    library, name = prism.load_library("h100-healthy"), f"gemm/{dtype}"
    table = library.kernels.get(name) or library.tables[name]
    found = prism.kernel("gemm", device="h100", dtype=dtype, **GEMM)
    flop = 2.0 * math.prod(GEMM.values())
    assert found["mean"] == pytest.approx(table.seconds(flop=flop, **GEMM))
    assert found["tflops"] == pytest.approx(flop / found["mean"] / 1e12)
    assert found["source"] == table.source and not found["extrapolated"]
    assert prism.kernel("gemm", device="h100", m=2**19, n=8192, k=8192)["extrapolated"]


def test_the_spread_is_the_library_s_distribution():
    library = prism.load_library("h100-healthy")
    for kind, sizes in CASES.items():
        found = prism.kernel(kind, library=library, **sizes)
        spread = library.distribution(found["distribution"])
        expected = found["mean"] * spread.ppf([0.05, 0.5, 0.95])
        assert [found[key] for key in ("p5", "p50", "p95")] == pytest.approx(expected.tolist())
        assert found["cv"] == spread.cv
        assert found["distribution_source"] == library.source(found["distribution"])


def test_work_of_attention_counts_what_the_mask_leaves():
    causal, full, back = (
        prism.kernel("attention", device="h100", **ATTENTION, **more)
        for more in ({}, {"mask": "full"}, {"backward": True})
    )
    products = 4.0 * 2 * 32 * 4096**2 * 128
    work = [1e12 * found["tflops"] * found["mean"] for found in (causal, full, back)]
    assert work == pytest.approx([products / 2, products, 1.25 * products])
    slow = prism.kernel("attention", device="h100", **ATTENTION, backward=True, deterministic=True)
    assert slow["mean"] >= back["mean"] and back["pass"] == "backward"
    assert causal["sizes"]["kv_heads"] == 32 and causal["sizes"]["v_head_dim"] == 128


def test_backends_stand_side_by_side_as_each_alone():
    """Where the library has tables of several."""
    for device in ("h100", "b200", "mi300x"):
        found = prism.kernel("attention", device=device, **ATTENTION)
        rows = found.get("backends", [])
        assert [row["mean"] for row in rows[:1]] in ([], [found["mean"]])
        assert len({row["backend"] for row in rows}) == len(rows)
        for row in rows:
            alone = prism.kernel("attention", device=device, backend=row["backend"], **ATTENTION)
            assert row == {key: alone[key] for key in row}


@pytest.mark.parametrize("op", FACTORS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_collective_inside_a_host_takes_what_the_table_says(op, ranks):
    table = prism.load_library("h100-healthy").tables[
        "nvlink/all_to_all" if op == "alltoall" else f"nvlink/{op}"
    ]
    found = prism.kernel("collective", device="h100", **REDUCE | {"op": op, "ranks": ranks})
    n_bytes = float(REDUCE["bytes"])
    assert found["mean"] == pytest.approx(n_bytes / table(ranks=ranks, bytes=n_bytes))
    assert found["bytes_per_s"] == pytest.approx(n_bytes / found["mean"])
    bus = FACTORS[op] * (ranks - 1) / ranks
    assert found["bus_bytes_per_s"] == pytest.approx(bus * found["bytes_per_s"])
    assert not found["extrapolated"] and found["source"] == table.source


def test_every_rank_to_the_next_takes_a_hop_of_the_network():
    value = prism.load_library("h100-healthy").value("nominal/network_efficiency")
    both = [
        prism.kernel("collective", device="h100", op=op, bytes=1e9, nodes=4, network_gbit=200)
        for op in ("sendrecv", "p2p")
    ]
    assert both[0] == both[1] and both[0]["op"] == "sendrecv"
    assert both[0]["mean"] == pytest.approx(1e9 / (25e9 * value), rel=1e-3)
    assert both[0]["bus_bytes_per_s"] == both[0]["bytes_per_s"]
    near = prism.kernel("collective", device="h100", op="sendrecv", bytes=1e9, nodes=1)
    assert near["mean"] < both[0]["mean"] / 5


@pytest.mark.parametrize(
    ("device", "given", "hosts"),
    [
        ("h100", {"ranks": 4}, (4, 1, 8)),
        ("h100", {"ranks": 16}, (16, 2, 8)),
        ("h100", {"nodes": 4}, (32, 4, 8)),
        ("h100", {"ranks": 16, "nodes": 16}, (16, 16, 8)),
        ("h100", {"ranks": 32, "nvlink_domain_gpus": 32}, (32, 4, 32)),
        ("gb200", {"nodes": 4}, (16, 4, 72)),
        ("gb200", {"nodes": 32}, (128, 32, 64)),
        ("gb300", {"ranks": 144}, (144, 36, 72)),
    ],
)
def test_ranks_and_nodes(device, given, hosts):
    q = {"op": "all_gather", "bytes": 2**20}
    found = prism.kernel("collective", device=device, **q, **given)["sizes"]
    assert (found["ranks"], found["nodes"], found["nvlink_domain_gpus"]) == hosts


def test_other_hosts_use_the_network():
    """One rank of each host, of each rack; and the network's rate counts where it is used."""
    q = {"device": "h100", "op": "all_gather", "bytes": 2**30}
    inside, across = (
        prism.kernel("collective", ranks=8, **q, **more) for more in ({}, {"nodes": 8})
    )
    assert across["mean"] > 5 * inside["mean"]
    slow = prism.kernel("collective", ranks=8, nodes=8, network_gbit=100, **q)
    assert slow["mean"] == pytest.approx(4 * across["mean"], rel=0.02)
    assert prism.kernel("collective", ranks=8, network_gbit=100, **q)["mean"] == inside["mean"]
    q |= {"device": "gb200", "op": "sendrecv"}
    rack, racks = (prism.kernel("collective", ranks=n, nodes=n, **q) for n in (16, 36))
    assert rack["bus_bytes_per_s"] > 10 * racks["bus_bytes_per_s"]


TRANSPORTS = "InfiniBand", "RoCE", "EFA", "TCPX", "Slingshot"  # by latency


def test_transports_differ_in_latency_and_say_what_they_rest_on():
    q = {"device": "h100", "op": "all_reduce", "nodes": 2}
    found = [
        prism.kernel("collective", bytes=2**16, transport=name.lower(), **q) for name in TRANSPORTS
    ]
    assert found[0] == prism.kernel("collective", bytes=2**16, **q)
    assert sorted(found, key=lambda each: each["mean"]) == found
    for name, each in zip(TRANSPORTS, found, strict=True):
        assert name in each["source"] and each["extrapolated"] == (name == "Slingshot")
    for more in ({"bytes": 2**40}, {"nodes": 64}, {"op": "alltoall", "transport": "efa"}):
        assert prism.kernel("collective", **{"bytes": 2**20} | q | more)["extrapolated"], more


GROWS = {
    "gemm": {"m": 15, "n": 15, "k": 15},
    "grouped_gemm": {"experts": 8, "m": 13, "n": 14, "k": 14},
    "attention": {"batch": 4, "heads": 7, "seq": 17, "head_dim": 8},
    "rms_norm": {"rows": 20, "columns": 15},
    "memory": {"bytes": 34},
    "mamba2": {"tokens": 17, "heads": 7, "head_dim": 8, "state": 8},
}
"""Octaves that sizes are drawn from."""


@settings(max_examples=examples(60))
@given(data=st.data(), device=st.sampled_from(["a100", "h100", "b200", "gb200"]))
def test_larger_takes_no_less(data, device):
    kind = data.draw(st.sampled_from(sorted(GROWS)))
    sizes = {k: 2.0 ** data.draw(st.floats(0.0, most)) for k, most in GROWS[kind].items()}
    grown = data.draw(st.sampled_from(sorted(sizes)))
    more = sizes | {grown: sizes[grown] * data.draw(st.floats(1.0, 8.0))}
    a, b = (prism.kernel(kind, device=device, **s)["mean"] for s in (sizes, more))
    assert b >= a * (1.0 - (TILES if kind.endswith("gemm") else HELD))


@settings(max_examples=examples(40))
@given(
    op=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv"]),
    device=st.sampled_from(["a100", "h100", "gb200"]), nodes=st.integers(1, 64),
    n_bytes=st.floats(0.0, 34.0), factor=st.floats(1.0, 8.0), gbit=st.floats(50.0, 1600.0),
)  # fmt: skip
def test_longer_messages_and_slower_networks_take_no_less(op, device, nodes, n_bytes, factor, gbit):
    q = {"op": op, "device": device, "nodes": nodes}
    n_bytes = 2.0**n_bytes
    mean, longer, faster = (
        prism.kernel("collective", bytes=n, network_gbit=g, **q)["mean"]
        for n, g in ((n_bytes, gbit), (factor * n_bytes, gbit), (n_bytes, factor * gbit))
    )
    assert longer >= mean * (1.0 - HELD) and faster <= mean * (1.0 + HELD)


# ------------------------------------------------------------------------------- the command
@pytest.mark.parametrize("kind", CASES)
def test_the_command_prints_the_same(run, kind):
    status, out, _ = run(*words(kind, "h100", CASES[kind]), "--json")
    printed = json.loads(out)
    assert status == 0 and out.count("\n") == 1
    assert printed.items() >= prism.kernel(kind, device="h100", **CASES[kind]).items()
    status, shown, _ = run(*words(kind, "H100", CASES[kind]))
    assert status == 0 and {"mean", "p5", "p50", "p95", "CV"} <= set(shown.split())


def test_options_of_the_command(run):
    norm = {"rows": 4096, "columns": 8192, "backward": True, "backend": "te", "dtype": "bf16"}
    mask = ATTENTION | {"kv_heads": 8, "mask": "full", "deterministic": True, "backward": True}
    for kind, sizes in (("layer_norm", norm), ("attention", mask)):
        printed = json.loads(run(*words(kind, "h100", sizes), "--json")[1])
        assert printed.items() >= prism.kernel(kind, device="h100", **sizes).items()
    size = ("--op", "all_to_all", "--bytes", "64MiB", "--nodes", "2", "--json")
    printed = json.loads(run("kernel", "collective", "--device", "h100", *size)[1])
    assert printed["sizes"]["bytes"] == 2**26 and printed["op"] == "alltoall"


@pytest.mark.parametrize("kind", ["gemm", "attention", "collective"])
def test_folder_of_the_command(run, tmp_path, kind):
    folder = tmp_path / "out"
    assert run(*words(kind, "h100", CASES[kind]), "-o", folder)[0] == 0
    names = {file.name for file in folder.iterdir()}
    assert names == {"result.nc", "summary.json", "kernel.png", "kernel.svg"}
    written = json.loads((folder / "summary.json").read_text())
    loaded = prism.load(folder)
    assert written == prism.summary(loaded)
    assert written.items() >= prism.kernel(kind, device="h100", **CASES[kind]).items()
    main = loaded["size"].attrs["name"]
    at = np.flatnonzero(loaded["size"].values == CASES[kind][main])
    key = "tflops" if "tflops" in written else "bus_bytes_per_s"
    assert loaded["rate"].values[0, at] == pytest.approx([written[key]])
    assert loaded["measured"].values[0, at] == [not written["extrapolated"]]
    assert prism.plots.plot_kernel(loaded).get_xscale() == "log"
    assert run("show", folder)[0] == run("report", folder, "-o", tmp_path / "r.html")[0] == 0


def test_another_library(tmp_path):
    """A file; and one of another device, of which only the spread is taken."""
    sizes = {"m": 8192, "n": 8192, "k": 8192}
    own = prism.kernel("gemm", device="h100", **sizes)
    assert prism.kernel("gemm", library="h100-healthy", **sizes) == own
    other = prism.kernel("gemm", device="v100", library="h100-healthy", **sizes)
    assert other["extrapolated"] and other["cv"] == own["cv"] and other["of_peak"] < 1.0
    stressed = prism.kernel("gemm", device="gb200", library="gb200-stressed", **sizes)
    assert stressed["library"] == "gb200-stressed"


WRONG = [
    ("conv", {}, "gemm"),
    ("gem", GEMM, "gemm"),
    ("gemm", {"m": 1, "n": 1}, "k"),
    ("gemm", GEMM | {"m": 0}, "m"),
    ("gemm", GEMM | {"m": -4}, "m"),
    ("gemm", GEMM | {"m": math.nan}, "m"),
    ("gemm", GEMM | {"m": math.inf}, "m"),
    ("gemm", GEMM | {"dtype": "fp7"}, "fp8"),
    ("gemm", GEMM | {"dtype": "nvfp4"}, "fp8_block"),
    ("gemm", GEMM | {"rows": 4}, "rows"),
    ("gemm", GEMM | {"mask": "full"}, "mask"),
    ("memory", {}, "bytes"),
    ("memory", {"bytes": 8, "backward": True}, "backward"),
    ("rms_norm", {"rows": 8, "columns": 8, "backend": "triton"}, "compiled"),
    ("attention", ATTENTION | {"mask": "window"}, "causal"),
    ("attention", ATTENTION | {"backend": "fa5"}, "fa4"),
    ("collective", {"op": "all_reduce", "bytes": 8}, "ranks"),
    ("collective", {"op": "all_reduce", "ranks": 8}, "bytes"),
    ("collective", {"bytes": 8, "ranks": 8}, "op"),
    ("collective", REDUCE | {"op": "broadcast"}, "reduce_scatter"),
    ("collective", REDUCE | {"ranks": 1}, "ranks"),
    ("collective", REDUCE | {"ranks": 13}, "nodes"),
    ("collective", REDUCE | {"ranks": 32, "nodes": 2}, "nodes"),
    ("collective", REDUCE | {"ranks": 10**12}, "ranks"),
    ("collective", REDUCE | {"transport": "ethernet"}, "roce"),
    ("collective", REDUCE | {"network_gbit": 0}, "network_gbit"),
]


@pytest.mark.parametrize(("kind", "sizes", "named"), WRONG)
def test_wrong_input_ends_with_2_and_names_what_to_change(run, kind, sizes, named):
    with pytest.raises(prism.PrismError, match=named):
        prism.kernel(kind, device="h100", **sizes)
    status, out, err = run(*words(kind, "h100", sizes))
    assert (status, out) == (2, "") and "Traceback" not in err


@pytest.mark.parametrize(
    ("kind", "given", "named"),
    [
        ("gemm", {"device": "h1000"}, "h100"),
        ("gemm", {"device": 7}, "h100"),
        ("gemm", {}, "device"),
        ("gemm", {"device": "v100"}, "library"),
        ("gemm", {"device": "h100", "library": "h100-helthy"}, "h100-healthy"),
        ("gemm", {"device": "a100", "dtype": "fp8"}, "bf16"),
        ("gemm", {"device": "h100", "m": "8"}, "m"),
        ("gemm", {"device": "h100", "m": True}, "m"),
        ("gemm", {"device": "h100", "m": 10**400}, "m"),
        ("gemm", {"device": "h100", "dtype": 8}, "dtype"),
        ("gemm", {"device": "h100", "backward": "yes"}, "backward"),
        (7, {"device": "h100"}, "gemm"),
    ],
)
def test_wrong_arguments_of_python(kind, given, named):
    with pytest.raises(prism.PrismError, match=named):
        prism.kernel(kind, **GEMM | given)


def test_wrong_words_of_the_command(run, tmp_path):
    size = ("--m", "8", "--n", "8", "--k", "8")
    for more in (("--device", "h1000"), (), ("--device", "h100", "--m", "x"),
                 ("--device", "h100", "--bytes", "many"), ("--device", "h100", "--size", "8"),
                 ("--device", "v100"), ("--library", tmp_path / "none.nc")):  # fmt: skip
        status, out, err = run("kernel", "gemm", *size, *more)
        assert (status, out) == (2, "") and err and "Traceback" not in err
