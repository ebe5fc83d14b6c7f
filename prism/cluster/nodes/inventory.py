"""Inventories: how slow each node was measured to be, from what operators have at hand."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prism.cluster.nodemap import KINDS, NodeSlowdown, slow_by_kind
from prism.cluster.nodes.burnin import NODE_COLUMNS, UNKNOWN, find_column, read_burn_in
from prism.cluster.nodes.hosts import Measured, find_nodes, known_labels, read_host_list
from prism.common.errors import PrismError, option
from prism.common.text import format_count
from prism.traces import find_recording
from prism.traces.choose import check_column, chosen_rows
from prism.traces.file import RawTable
from prism.traces.formats.nccltests import BandwidthTest, BandwidthTests

Path = str | os.PathLike[str]
LEAST, MOST = 1e-3, 1e3  # slowdowns outside of this are errors
FASTER = 0.8  # a node so much faster than the others was probably meant to be slower
NOTICED = 1e-3  # a node that differs by less is as the others: the tolerance of `prism place`
LARGE = 0.25  # message sizes from this share of the largest on say how fast a link is
NOTABLE = 1.05  # slowdown of a pair of nodes from which on it matters which of the two is slow


@dataclass(frozen=True, eq=False)
class Inventory(Mapping[int, NodeSlowdown]):
    """Slow nodes of a cluster; a mapping from node to its slowness."""

    nodes: dict[int, NodeSlowdown]
    """Slowness by node; nodes that are as fast as they should be are left out."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Host names by node, where names are known."""
    measured: frozenset[int] = frozenset()
    """The nodes that were measured, slow or not."""
    notes: tuple[str, ...] = ()
    """What was assumed or left out."""

    def __getitem__(self, node: int) -> NodeSlowdown:
        return self.nodes[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)


def read_inventory(
    path: Path | Sequence[Path],
    n_nodes: int,
    gpus_per_node: int = 8,
    *,
    kind: str | None = None,
    hosts: Sequence[str] | Path | None = None,
    column: str | None = None,
    where: Mapping[str, str] | None = None,
) -> Inventory:
    r"""Read how slow nodes are; what a file is, is found by content.

    Parameters
    ----------
    path : path or sequence of paths
        A table (CSV, parquet, JSON rows as SuperBench writes them) with a column of nodes and
        either factors (``slowdown``, ``compute``, ``memory``, ``network``, ``everything``) or times
        or rates of GPUs; or output of nccl-tests per node or per pair of nodes, a file or a folder
        of files. Several say different things of the same nodes.
    n_nodes, gpus_per_node : int
        Of the cluster that the job runs on.
    kind : str, optional
        What a plain ``slowdown`` or a time slows; ``compute`` where not given.
    hosts : sequence of str, or path, optional
        Host names [node] in rank order, a host file, or a list such as ``"node[001-064]"``.
    column, where
        Of a table, the measurement (else the one that is typical of `kind`), and which rows to
        keep.

    Returns
    -------
    Inventory
        A mapping from node to `NodeSlowdown` that `place` takes as ``nodes``, with the names of
        hosts (``hosts``) and what was assumed (``notes``).

    Raises
    ------
    PrismError
        If the file is none of these, a node is unknown or there twice, a slowdown is not above
        0, or nothing is left.

    Examples
    --------
    >>> import prism
    >>> from pathlib import Path
    >>> _ = Path("nodes.csv").write_text("node,slowdown\nn3,1.25\nn5,1.1\n")
    >>> found = prism.read_inventory("nodes.csv", 8, hosts="n[0-7]")
    >>> found[3].compute, found.hosts[3]
    (1.25, 'n3')
    """
    if isinstance(hosts, str | os.PathLike):
        hosts = read_host_list(os.fspath(hosts), n_nodes)
    paths = [path] if isinstance(path, str | os.PathLike) else path
    return merge_inventories({
        str(one): _read(one, n_nodes, gpus_per_node, kind, hosts, column, dict(where or {}))
        for one in paths
    })  # fmt: skip


def _read(
    path: Path, n_nodes: int, gpus_per_node: int, kind: str | None, hosts: Sequence[str] | None,
    column: str | None, where: dict[str, str],
) -> Inventory:  # fmt: skip
    """Read what one file says."""
    source = str(path)
    found = find_recording(path)
    if found.holds == "collectives":
        if column is not None or where or kind not in (None, "network"):
            raise PrismError(
                f"{source}: is output of nccl-tests, which has no columns and measures the "
                f"network; leave {option('column')}, {option('where')} and {option('kind')} out"
            )
        measured = _solve(found.read(), source)
    else:
        measured = _from_table(
            found.files[0].table, kind or "compute", column, where, gpus_per_node
        )
    factors, notes = measured.factors, list(measured.notes)
    if measured.others and hosts is not None:
        ours = known_labels(factors, hosts)
        if ours and len(ours) < len(factors):
            n_others = format_count(len(factors) - len(ours), "measured node")
            notes.append(f"{n_others} not among the job's hosts left out")
            factors = {label: factors[label] for label in ours}
    nodes = find_nodes(list(factors), n_nodes, hosts, measured.locate)
    slow = {nodes.index[label]: slow_by_kind(x) for label, x in factors.items()}
    notes += [nodes.note] * bool(nodes.note) + _remarks(slow, n_nodes)
    return Inventory(
        {node: slow[node] for node in sorted(slow) if slow[node] != NodeSlowdown()},
        nodes.hosts, frozenset(nodes.index[label] for label, x in factors.items() if x),
        tuple(f"{source}: {note}" for note in notes),
    )  # fmt: skip


def merge_inventories(inventories: Mapping[str, Inventory]) -> Inventory:
    """Join what several files, by name, say of the same cluster: of its GPUs and of its network.

    Raises
    ------
    PrismError
        If two files say how slow the same part of the same node is.
    """
    nodes: dict[int, NodeSlowdown] = {}
    said: dict[tuple[int, str], str] = {}
    for source, inventory in inventories.items():
        for node, slow in inventory.items():
            default = NodeSlowdown()._asdict()
            changed = {name: x for name, x in slow._asdict().items() if x != default[name]}
            for name in changed:
                if (node, name) in said:
                    raise PrismError(
                        f"{source}: node {node}: its {name} is in {said[node, name]} too; keep one"
                    )
                said[node, name] = source
            nodes[node] = nodes.get(node, NodeSlowdown())._replace(**changed)
    each = list(inventories.values())
    return Inventory(
        {node: nodes[node] for node in sorted(nodes)},
        {node: name for one in each for node, name in one.hosts.items()},
        frozenset().union(*(one.measured for one in each)),
        tuple(note for one in each for note in one.notes),
    )


def _remarks(slow: Mapping[int, NodeSlowdown], n_nodes: int) -> list[str]:
    """Say what a reader may have meant otherwise."""
    notes = []
    fast = [node for node, s in slow.items() if min(s.compute, s.network) < FASTER]
    if fast:
        s = slow[fast[0]]
        notes.append(
            f"node {fast[0]} has a factor of {min(s.compute, s.network):g}, faster than the "
            "others; 1.2 is 20 % slower"
        )
    if 0.5 * n_nodes <= len(slow) < n_nodes:
        notes.append(
            f"{n_nodes - len(slow):,} of {format_count(n_nodes, 'node')} not in it, taken as 1"
        )
    if sum(abs(s.compute - 1.0) >= NOTICED for s in slow.values()) >= 0.5 * n_nodes:
        notes.append(
            "differences between GPUs that the job draws (the rank effect) come on top; to leave "
            "them out: --set 'variability.effects.rank={cv: 0, lemon_fraction: 0}'"
        )
    return notes


# ------------------------------------------------------------------------------------- tables
def _from_table(
    table: RawTable, kind: str, column: str | None, where: Mapping[str, str], gpus_per_node: int
) -> Measured:
    """Read factors, or a burn-in, from a table with a column of nodes."""
    nodes = find_column(table, NODE_COLUMNS)
    if nodes is None:
        raise PrismError(
            f"{table.source}: no column of nodes among {table.listing}; expected one of "
            f"{', '.join(NODE_COLUMNS)}, and slowdown"
        )
    for name in where:
        check_column(table, name, "--where")
    rows = chosen_rows(table, where)
    given = [name for name in ("slowdown", *KINDS) if name in table.columns]
    if given and column is None:
        return _from_factors(table, nodes, given, kind, rows)
    return read_burn_in(table, nodes, rows, column, where, kind, gpus_per_node)


def _from_factors(
    table: RawTable, nodes: str, given: Sequence[str], kind: str, rows: NDArray[np.int64]
) -> Measured:
    """Read a table whose cells are factors."""
    if "slowdown" in given and kind in given:
        raise PrismError(
            f"{table.source}: has both slowdown and {kind}, which are the same; drop one of the "
            "columns, or say with --kind what slowdown slows"
        )
    names = {name: kind if name == "slowdown" else name for name in given}
    columns = {name: table.numbers(name) for name in names}
    labels = table.texts(nodes)
    factors: dict[str, dict[str, float]] = {}
    first: dict[str, int] = {}
    for row in rows:
        label = str(labels[row]).strip()
        if label.lower() in UNKNOWN:
            raise PrismError(
                f"{table.locate(int(row))}: {nodes} is {label!r}, expected a node; name it, or "
                "take the row out"
            )
        if label in first:
            raise PrismError(
                f"{table.locate(int(row))}: node {label} is there twice, first at "
                f"{table.locate(first[label])}; keep one row per node"
            )
        first[label] = int(row)
        factors[label] = {}
        for name, values in columns.items():
            value = float(values[row])
            if np.isnan(value):  # an empty cell is the default
                continue
            if not LEAST <= value <= MOST:
                raise PrismError(
                    f"{table.locate(int(row))}: {name} is {value:g}, expected a factor above 0 "
                    f"({LEAST:g} to {MOST:g}); 1.2 is 20 % slower than the others"
                )
            factors[label][names[name]] = value
    return Measured(factors, lambda label: table.locate(first[label]), [])


# ------------------------------------------------------------------------------------- nccl-tests
def _solve(found: BandwidthTests, source: str) -> Measured:
    """Find how slow each node's network is from tests among one or more nodes.

    A test is as slow as its slowest node, so the slowdown of node i is bounded by that of every
    test it took part in: ``f_i = min over tests with i of y``, the largest solution of
    ``y = max over its nodes of f`` for all tests. The median node is then made 1.
    """
    tests = found.tests
    slowdown = [_relative(test, tests, source) for test in tests]
    factors: dict[str, float] = {}
    for test, y in zip(tests, slowdown, strict=True):
        for host in test.hosts:
            factors[host] = min(factors.get(host, np.inf), y)
    # most pairs may hold a slow node where most nodes are well: the median node is 1
    typical = float(np.median(list(factors.values())))
    low, high = min(factors.values()) / typical, max(factors.values()) / typical
    summary = (
        f"{format_count(len(tests), 'test')} of {format_count(len(factors), 'node')}: time at "
        "the largest messages, by bus "
        f"bandwidth, over that of the median node: {low:.3g} to {high:.3g}"
    )
    notes = [summary, *found.notes]
    if n_single := sum(len(test.hosts) == 1 for test in tests):
        notes.append(
            f"{format_count(n_single, 'test')} ran within one node, over NVLink unless NCCL was "
            "kept off it "
            "(NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1); taken as its network"
        )
    notes += _ambiguous(tests, [y / typical for y in slowdown])
    first = {host: test.where for test in reversed(tests) for host in test.hosts}
    network = {host: {"network": factor / typical} for host, factor in factors.items()}
    return Measured(network, lambda host: first[host], notes, True)


def _relative(test: BandwidthTest, tests: Sequence[BandwidthTest], source: str) -> float:
    """Say how slow a test was: the median test of its kind over it, at the largest messages."""
    kind = test.name, len(test.hosts), test.n_gpus
    alike = [t for t in tests if (t.name, len(t.hosts), t.n_gpus) == kind]
    if len(alike) == 1:
        raise PrismError(
            f"{test.where}: the only test of its kind ({test.name or 'unnamed'}, {len(test.hosts)} "
            f"nodes, {format_count(test.n_gpus, 'GPU')}) in {source}, so nothing shows what is "
            "slow; test at "
            "least three nodes or pairs the same way"
        )
    common = set.intersection(*(set(other.bus) for other in alike))
    if not common:
        raise PrismError(
            f"{test.where}: shares no message size with the other tests in {source}; run all of "
            "them with the same -b, -e and -f"
        )
    largest = max(size for size, _ in common)
    ratios = [
        float(np.median([other.bus[key] for other in alike])) / test.bus[key]
        for key in common
        if key[0] >= LARGE * largest
    ]
    return float(np.median(ratios))


def _ambiguous(tests: Sequence[BandwidthTest], slowdown: Sequence[float]) -> list[str]:
    """Name the slow tests several of whose nodes no other test knows."""
    seen = Counter(host for test in tests for host in test.hosts)
    notes = []
    for test, y in zip(tests, slowdown, strict=True):
        alone = [host for host in test.hosts if seen[host] == 1]
        if y >= NOTABLE and len(alone) > 1:
            notes.append(
                f"{' and '.join(alone)} are slow together ({y:.3g}), and no other test shows "
                "which of them is; both count as slow; test each with another partner"
            )
    return notes
