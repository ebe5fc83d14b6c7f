"""Embedding tables of unequal work: closed forms, what ranks and places it, what is refused."""

import pytest

import prism

SILENT = {
    "rank": {"cv": 0.0, "lemon_fraction": 0.0}, "step": {"cv": 0.0}, "jitter": {"mean_s": 0.0},
    "call": {"cv": 0.0}, "regime": {"probability": 0.0}, "stall": {"rate_per_hour": 0.0},
    "microbatch": {"cv": 0.0}, "residual": {"scale": 0.0}, "run": {"cv": 0.0},
}  # fmt: skip
RANKS = 8
# Criteo's tables as in experiments/jobs/dlrm-dcnv2-h100-8.yaml
LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def table(lookups=16, rows=100_000, **keys):
    return {"rows": rows, "lookups": lookups, **keys}


EVEN = [table()] * RANKS
OVERSIZED = [table(128), *[table()] * (RANKS - 1)]


def job(tables, effects=SILENT, bag=None, **cluster):
    """Eight GPUs in four nodes that hold tables between them, and a dense layer."""
    bag = {"op": "embedding_bag", "dim": 128, "samples": "batch", "spread": "ep", **(bag or {})}
    sums = {"op": "collective", "kind": "all_to_all", "bytes": "batch * 4096", "group": "ep"}
    ops = [bag | {"tables": tables}, sums]
    dense = {"op": "gemm", "m": "batch", "n": 1024, "k": 1024}
    return prism.load_job({
        "model": {"layers": [{"ops": ops}, {"repeat": 2, "ops": [dense]}]},
        "parallelism": {"dp": RANKS, "ep": RANKS, "microbatch_size": 8192, "optimizer": "sgd"},
        "cluster": {"nodes": 4, "gpus_per_node": 2, **cluster},
        "variability": {"effects": effects, "model_error": 0.0, "host_scale": 1e-9},
        "run": {"failures": "none"},
    })  # fmt: skip


def estimate(made):
    return prism.summary(prism.estimate(made, replicates=64, seed=1))


def step(made):
    return estimate(made)["step_time"]["mean"]


def traffic(lookups):
    """Bytes over the width that forward and backward move for a sample."""
    return 4 * lookups + 2, 8 * lookups + 2


def busiest(lookups):
    """Share of the busiest rank over the mean by the largest-first rule, forward and backward."""
    loads = [[0.0, 0.0] for _ in range(RANKS)]
    for n in sorted(lookups, reverse=True):
        least = min(loads, key=sum)
        for way, more in enumerate(traffic(n)):
            least[way] += more
    return [max(x) / (sum(x) / RANKS) for x in zip(*loads, strict=True)]


@pytest.mark.parametrize("lookups", [(16,) * 9, (128, *[16] * 7), LOOKUPS], ids=len)
@pytest.mark.parametrize("slow", [1.0, 1.25])
def test_a_step_takes_the_longest_of_its_ranks(lookups, slow):
    spread = [table(n, shard="row") for n in lookups]
    whole = estimate(job(spread))["critical_path"]["embedding"]
    ways = [sum(x) for x in zip(*map(traffic, lookups), strict=True)]
    seconds = [slow * whole * way / sum(ways) for way in ways]
    known = {"node_slowdowns": {"0": {"memory": slow}}} if slow > 1.0 else {}  # with the busiest
    more = sum(s * (x - 1.0) for s, x in zip(seconds, busiest(lookups), strict=True))
    longest = step(job(spread, **known)) + more
    assert step(job([table(n) for n in lookups], **known)) == pytest.approx(longest, rel=1e-4)


def test_rows_on_all_ranks_are_one_table():
    several = estimate(job([table(n, shard="row") for n in (4, 12)]))
    one = {"op": "embedding_bag", "dim": 128, "samples": "2 * batch", "lookups": 8, "rows": 200_000,
           "spread": "ep"}  # fmt: skip
    layers = job(EVEN).model_dump()["model"]["layers"]
    first = {**layers[0], "ops": [one, *layers[0]["ops"][1:]]}
    other = estimate(job(EVEN).replace({"model.layers": [first, *layers[1:]]}))
    assert several["step_time"]["mean"] == pytest.approx(other["step_time"]["mean"], rel=1e-6)
    assert several["memory"]["gib"] == pytest.approx(other["memory"]["gib"])


def test_even_tables_are_as_fast_as_their_rows_on_all_ranks():
    assert step(job(EVEN)) == step(job(EVEN, bag={"shard": "row"}))


def test_the_fullest_rank_counts_and_the_model_has_all_tables():
    def held(tables):
        return prism.memory(job(tables))["parts"]["parameters"]

    more = held([table(rows=500_000), *EVEN[1:]]) - held(EVEN)
    assert more == pytest.approx(4 * 128 * 400_000 / 2**30)
    two = held([table(rank=5), table(rank=5), *EVEN[2:]]) - held(EVEN)
    assert two == pytest.approx(4 * 128 * 100_000 / 2**30)


def test_a_given_rank_is_slow_where_its_node_is():
    def slowed(node):
        tables = [table(128, rank=5), *EVEN[1:]]
        return step(job(tables, node_slowdowns={str(node): {"memory": 1.5}}))

    times = [slowed(node) for node in range(4)]
    assert times[0] == times[1] == times[3] < 0.75 * times[2]  # ranks 4 and 5 are on node 2


@pytest.mark.parametrize("node", [0, 3])
def test_a_slow_node_is_placed_away_from_an_oversized_table(node):
    slow = {node: prism.NodeSlowdown(memory=1.25)}
    placed = prism.summary(prism.place(job(OVERSIZED, {}), nodes=slow, seed=1))
    assert len(placed["placements"]) == 2 and placed["worst_over_best_p95"] > 1.1
    assert (placed["best"] == placed["current"]) == (node == 3)  # rank 0 has it, on node 0


def test_even_tables_give_no_place_to_move_to():
    slow = {0: prism.NodeSlowdown(memory=1.25)}
    placed = prism.summary(prism.place(job(EVEN, {}), nodes=slow, seed=1))
    assert len(placed["placements"]) == 1 and placed["best"] == placed["current"]


def test_the_table_is_what_a_ranking_names():
    slow = {"node_slowdowns": {"0": {"memory": 1.25}}}
    uneven, even = (prism.rank(job(x, {}, **slow), seed=1).causes for x in (OVERSIZED, EVEN))
    assert uneven.index[0] == "embedding" and even.index[0] != "embedding"
    assert "tables" not in even.index
    assert uneven.p95_reduction.idxmax() == "tables"
    levels = [step(job(x, **slow)) for x in (EVEN, OVERSIZED)]
    shared = step(job(OVERSIZED, bag={"shard": "row"}, **slow))
    assert levels[0] < shared < levels[1]
    assert uneven.p95_reduction["tables"] == pytest.approx(1.0 - shared / levels[1], abs=0.02)


WRONG = [
    ({"rows": 9}, EVEN, "model.layers.0.ops.0"),
    ({"lookups": 9}, EVEN, "model.layers.0.ops.0"),
    ({"spread": "tp"}, EVEN, "model.layers.0.ops.0"),
    ({"shard": "column"}, EVEN, "model.layers.0.ops.0.shard"),
    ({}, [table(rank=8)], "model.layers.0.ops.0.tables.0.rank"),
    ({}, [table(rank=1, shard="row")], "model.layers.0.ops.0"),
    ({}, [table(rows="nix")], "model.layers.0.ops.0.tables.0.rows"),
    ({}, [table(dim=0.5)], "model.layers.0.ops.0.tables.0.dim"),
    ({}, [table(lookups=-1)], "model.layers.0.ops.0.tables.0.lookups"),
    ({}, [], "model.layers.0.ops.0"),
]


@pytest.mark.parametrize(("bag", "tables", "key"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_tables_are_named_with_their_place(bag, tables, key):
    with pytest.raises(prism.PrismError) as error:
        job(tables, bag=bag)
    assert all(line.startswith(f"job: {key}") for line in error.value.args), error.value.args
