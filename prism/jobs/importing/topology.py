"""Where hosts stand in a network: topology files of Slurm and node labels of Kubernetes, as keys.

A cluster of prism is made of units of equal size; a job's hosts get the positions that put those of
one switch into one unit. Units with fewer of them end in positions without a host.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from prism.common.errors import PrismError
from prism.common.files import read_bytes
from prism.common.text import format_count
from prism.jobs.hostlists import MOST_HOSTS, read_hosts_text
from prism.jobs.importing.settings import parsed
from prism.jobs.job import Job
from prism.jobs.jobspec.messages import by_line, message, validate_block
from prism.jobs.jobspec.values import Block, Count
from prism.jobs.jobspec.yaml import MAX_BYTES as YAML_BYTES
from prism.jobs.jobspec.yaml import ConfigLayer, parse_yaml

MAX_BYTES = 64 << 20
MOST_LEVELS = 20
_MOST_SAID = 20  # errors
LEVELS = ("leaf", "spine", "core")
"""Names of switch levels, from the nodes on; those above are ``tier4`` and so on."""
DOMAIN = "nvlink"  # a level whose units are NVLink domains, not switches
_LABELS: dict[str, tuple[str, ...]] = {
    DOMAIN: ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator",
             "nvidia.com/gpu.clique"),
    "leaf": ("fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf",
             "network.topology.nvidia.com/block"),
    "spine": ("fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine"),
    "core": ("fabric.topograph.run/tier-2", "network.topology.nvidia.com/core",
             "network.topology.nvidia.com/datacenter"),
}  # fmt: skip
"""Labels of Topograph by level, those of several versions."""
_PAIR = re.compile(r"(\w+)=(\S+)")
_PADDING = re.compile(r"fake[-_]?\d+", re.I)
"""Topograph fills blocks up from Slurm's partition ``fake``, or its ``fake_node_pool``."""


def _as_name(value: Any) -> Any:
    """Take a number for the name that it is written as."""
    return str(value) if type(value) is int else value


_Name = Annotated[str, BeforeValidator(_as_name), Field(strict=True, min_length=1)]
_Names = Annotated[str, BeforeValidator(_as_name), Field(strict=True)]
_EXPECTED = (
    "expected Slurm's topology.conf or topology.yaml, or the JSON of kubectl get nodes with the "
    "labels of Topograph"
)


@dataclass(frozen=True)
class Topology:
    """Where hosts stand."""

    levels: tuple[str, ...]  # from the nodes on
    # of each host at each level, in the file's order; empty where the file names none
    units: dict[str, tuple[str, ...]]
    padding: tuple[str, ...] = ()  # names that fill up blocks and are no hosts


@dataclass(frozen=True)
class Placed:
    """A job's hosts in a topology."""

    keys: dict[str, Any]  # of the job's ``cluster``
    names: tuple[str, ...]  # host at each position; empty where there is none
    # units of each level that the job's hosts are in, and hosts of the largest
    sizes: dict[str, tuple[int, int]]


def read_topology(path: str | Path) -> Topology:
    """Read a topology file; raises PrismError."""
    text = read_bytes(Path(path), str(path), MAX_BYTES).decode("utf-8", "replace")
    if text.lstrip().startswith("{"):
        found = _from_labels(text, str(path))
    elif re.search(r"^\s*(SwitchName|BlockName)=", text, re.I | re.M):
        found = _from_lines(text, str(path))
    elif re.search(r"^\s*-?\s*topology\s*:", text, re.M):
        found = _from_yaml(text, str(path))
    else:
        raise PrismError(f"{path}: no topology is recognised; {_EXPECTED}")
    if not found.levels:
        raise PrismError(f"{path}: all hosts are alike; {_EXPECTED}")
    return found


# ---------------------------------------------------------------------------------- the formats
class _Table(Block):
    """What a block of topology.yaml may hold besides what is read here is left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Switch(_Table):
    switch: _Name
    nodes: _Names = ""
    children: _Names = ""


class _Tree(_Table):
    switches: tuple[_Switch, ...] = ()


class _Block(_Table):
    block: _Name
    nodes: _Names = ""


class _Blocks(_Table):
    blocks: tuple[_Block, ...] = ()
    block_sizes: tuple[Count, ...] = ()


class _Topology(_Table):
    topology: _Name
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None


class _Topologies(_Table):
    topologies: tuple[_Topology, ...] = ()


class _Metadata(_Table):
    name: Annotated[str, Field(strict=True, min_length=1)]
    labels: dict[str, str] = {}


class _Node(_Table):
    metadata: _Metadata


class _Nodes(_Table):
    items: tuple[_Node, ...] = ()


class _Reader:
    """Expands lists of hosts, of all lists together no more than a cluster can have."""

    def __init__(self) -> None:
        self.left = MOST_HOSTS

    def names(self, text: str, where: str) -> list[str]:
        found = read_hosts_text(text, where)
        self.left -= len(found)
        if self.left < 0:
            raise PrismError(f"{where}: more than {MOST_HOSTS:,} names; is a range mistyped?")
        return found


def _from_lines(text: str, source: str) -> Topology:
    """Read topology.conf, of either plugin."""
    switches: dict[str, tuple[list[str], list[str]]] = {}
    blocks: dict[str, list[str]] = {}
    sizes, where_sizes, reader = list[int](), source, _Reader()
    for number, line in enumerate(text.replace("\\\n", " ").splitlines(), start=1):
        given = {k.lower(): v for k, v in _PAIR.findall(line.split("#")[0])}
        where = f"{source}:{number}"
        lists = {k: reader.names(given.get(k, ""), where) for k in ("nodes", "switches")}
        for name in reader.names(given.get("switchname", ""), where):
            switches[name] = lists["nodes"], lists["switches"]
        for name in reader.names(given.get("blockname", ""), where):
            blocks[name] = lists["nodes"]
        if "blocksizes" in given:
            words = given["blocksizes"].split(",")
            if not all(re.fullmatch(r"0*[1-9]\d{0,8}", word) for word in words):
                raise PrismError(
                    f"{where}: BlockSizes={given['blocksizes'][:60]}: expected whole numbers of "
                    "nodes, at least 1, such as 16,32"
                )
            sizes, where_sizes = [*map(int, words)], where
    if blocks:
        return _of_blocks(blocks, sizes, where_sizes)
    return _of_switches(switches, source)


def _from_yaml(text: str, source: str) -> Topology:
    """Read topology.yaml: the default topology, else the first that is not flat."""
    if len(text) > YAML_BYTES:
        raise PrismError(f"{source}: more than {YAML_BYTES >> 20} MiB of YAML; write ranges, such "
                         "as node[001-064], or give topology.conf")  # fmt: skip
    layer, reader = parse_yaml(text, source, _EXPECTED, "topologies"), _Reader()
    data = layer.values
    top: tuple[str, ...] = ()
    if "topologies" not in data:  # one, without a list
        data, top = {"topologies": [data]}, ("topologies", "0")
    tables: _Topologies = _checked(_Topologies, data, layer, source, top)
    deep = [t for t in tables.topologies if t.tree or t.block]
    table = next((t for t in deep if t.cluster_default), deep[0] if deep else None)
    if table is not None and table.block is not None:
        rows = {b.block: reader.names(b.nodes, source) for b in table.block.blocks}
        return _of_blocks(rows, table.block.block_sizes, source)
    return _of_switches({
        s.switch: (reader.names(s.nodes, source), reader.names(s.children, source))
        for s in (table.tree.switches if table is not None and table.tree else ())
    }, source)  # fmt: skip


def _checked(
    kind: type[BaseModel], data: Any, layer: ConfigLayer, source: str, top: tuple[str, ...] = ()
) -> Any:
    """Check a table; `top` is the path that its values have, without it in the file."""
    found = validate_block(kind, data)
    own = [(path[len(top) :] if path[: len(top)] == top else path, t) for path, t in found.found]
    wrong = layer.problems or [message(layer, source, [path], told) for path, told in own]
    if wrong:
        raise PrismError(*sorted(wrong, key=by_line)[:_MOST_SAID], _EXPECTED)
    return found.block


def _from_labels(text: str, source: str) -> Topology:
    """Read the nodes of a Kubernetes cluster; those without any label of Topograph are left out."""
    data = parsed(json.loads, text, source, "JSON")
    if "items" not in data:
        data = {"items": [data]}
    nodes: _Nodes = _checked(_Nodes, data, ConfigLayer(), source)
    labels = {node.metadata.name: node.metadata.labels for node in nodes.items}
    units = {
        name: tuple(next((own[k] for k in keys if own.get(k)), "") for keys in _LABELS.values())
        for name, own in labels.items()
    }
    units = {name: found for name, found in units.items() if any(found)}
    return Topology(tuple(_LABELS) if units else (), units)


def _of_switches(switches: Mapping[str, tuple[list[str], list[str]]], source: str) -> Topology:
    """Find the switches above each host, level by level from the leaf on."""
    above: dict[str, str] = {}
    for name, (_, children) in switches.items():
        for child in children:
            if child not in switches:
                raise PrismError(f"{source}: switch {name} has {child}, which is not described")
            above.setdefault(child, name)
    units: dict[str, tuple[str, ...]] = {}
    for name, (nodes, _) in switches.items():
        path = [name]
        while (parent := above.get(path[-1])) is not None:
            if parent in path:
                raise PrismError(f"{source}: switch {parent} is above itself")
            path.append(parent)
            if len(path) > MOST_LEVELS:
                raise PrismError(f"{source}: switch {name} is under {MOST_LEVELS} others; no "
                                 "network has as many levels")  # fmt: skip
        units |= {node: tuple(path) for node in nodes if node not in units}
    depth = min(map(len, units.values()), default=0)
    levels = tuple(LEVELS[i] if i < len(LEVELS) else f"tier{i + 1}" for i in range(depth))
    return Topology(levels, {node: path[:depth] for node, path in units.items()})


def _of_blocks(blocks: Mapping[str, list[str]], sizes: Sequence[int], source: str) -> Topology:
    """Put neighbouring blocks together as the block sizes above the first say."""
    if any(b % a or b <= a for a, b in pairwise(sizes)):
        told = ",".join(map(str, sizes))
        raise PrismError(f"{source}: block sizes {told}: expected each a multiple of the one "
                         "before it, such as 16,32")  # fmt: skip
    many = [size // sizes[0] for size in sizes[1:]] if sizes else []
    levels = ["block", *(f"aggregate{n}" for n in many)]
    padding = {node for nodes in blocks.values() for node in nodes if _PADDING.fullmatch(node)}
    units = {
        node: (name, *(str(i // n) for n in many))
        for i, (name, nodes) in enumerate(blocks.items()) for node in nodes if node not in padding
    }  # fmt: skip
    return Topology(tuple(levels), units, tuple(sorted(padding)))


# -------------------------------------------------------------------------------- a job in it
def place_job(job: Job, topology: Topology, hosts: Sequence[str], source: str) -> Placed:
    """Give a job's hosts, in rank order, the positions that their units make.

    A host that is not in the topology, fewer or more than the job has nodes, and a unit under two
    others are refused.
    """
    per_node = job.cluster.gpus_per_node
    n = -(-job.world_size // per_node)
    missing = [host for host in hosts if host not in topology.units]
    if missing:
        text = f"{format_count(len(missing), 'host')} not in the topology: {', '.join(missing[:4])}"
        text += " (padding of its blocks)" * (missing[0] in topology.padding)
        raise PrismError(f"{source}: {text}; list hosts that are, in rank order")
    if len(hosts) != n:
        raise PrismError(
            f"{source}: {format_count(len(hosts), 'host')}, but the ranks of {job.name} fill "
            f"{format_count(n, 'node')}; list "
            "every node once, in rank order"
        )
    domains = job.cluster.nvlink_domain_gpus > per_node
    child: dict[str, tuple[str, ...]] = {host: (host,) for host in hosts}
    offset, room = dict.fromkeys(hosts, 0), 1
    keys: dict[str, Any] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for i, name in _levels(topology, hosts, source):
        unit = {host: topology.units[host][i:] for host in hosts}
        number, most = _numbers(child, unit)
        offset = {host: number[child[host]] * room + offset[host] for host in hosts}
        room, child = room * most, unit
        sizes[name] = len(set(unit.values())), max(Counter(unit.values()).values())
        if name == DOMAIN or (name == "block" and domains):
            keys["nvlink_domain_gpus"] = max(room, 1) * per_node
        elif len(set(unit.values())) > 1:
            keys.setdefault("tiers", {})[name] = {"gpus": room * per_node}
            if name == LEVELS[0]:
                keys["leaf_nodes"] = room
    if not keys:
        raise PrismError(f"{source}: the hosts are alike in this topology: it changes nothing")
    top = {unit: k for k, unit in enumerate(dict.fromkeys(child.values()))}
    place = [top[child[host]] * room + offset[host] for host in hosts]
    names = dict(zip(place, hosts, strict=True))
    n_places = len(top) * room
    keys = {"nodes": n_places} | keys
    if place != list(range(n_places)):
        keys["hosts"] = place
    return Placed(keys, tuple(names.get(k, "") for k in range(n_places)), sizes)


def _levels(topology: Topology, hosts: Sequence[str], source: str) -> Iterator[tuple[int, str]]:
    """Levels that tell the job's hosts apart, or are NVLink domains of several."""
    known = list[tuple[int, str]]()
    for i, name in enumerate(topology.levels):
        without = [host for host in hosts if not topology.units[host][i]]
        if 0 < len(without) < len(hosts):
            text = f"no {name} of {len(without):,} of {format_count(len(hosts), 'host')}: "
            text += ", ".join(without[:4])
            raise PrismError(f"{source}: {text}; name theirs, or list hosts that have one")
        known += [(i, name)] if not without else []
    before = len(hosts)
    for i, name in known:
        paths: dict[str, set[tuple[str, ...]]] = {}
        for host in hosts:
            paths.setdefault(topology.units[host][i], set()).add(topology.units[host][i:])
        torn = next((unit for unit, found in paths.items() if len(found) > 1), None)
        if torn is not None:
            raise PrismError(
                f"{source}: {name} {torn} is in two units of the next level; units must nest"
            )
        if len(paths) < before and (len(paths) > 1 or name == DOMAIN or name == "block"):
            before = len(paths)
            yield i, name


def _numbers(
    child: Mapping[str, tuple[str, ...]], unit: Mapping[str, tuple[str, ...]]
) -> tuple[dict[tuple[str, ...], int], int]:
    """Count what is in each unit, in the order of the hosts; gives the most that one holds, too."""
    number: dict[tuple[str, ...], int] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for host, inner in child.items():
        if inner not in number:
            number[inner] = count[unit[host]]
            count[unit[host]] += 1
    return number, max(count.values())
