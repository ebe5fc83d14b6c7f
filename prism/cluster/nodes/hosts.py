"""Which node of the rank order a name in a measurement means.

No naming scheme is assumed, since ``node017`` may be the 17th host or the 18th.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prism.common.errors import PrismError, option
from prism.common.text import format_count
from prism.jobs.hostlists import is_number, looks_like_list, read_hosts_text
from prism.traces.file import RecordedFile

_SHOWN = 4
MOST_BYTES = 64 << 20  # of a list: the 2 million hosts it may have, with 32 characters each


class Measured(NamedTuple):
    """What a file says of nodes."""

    factors: dict[str, dict[str, float]]
    """Slowdowns by the name of a node and the kind of work."""
    locate: Callable[[str], str]
    """Where a name stands, for messages."""
    notes: list[str]
    others: bool = False
    """Whether nodes beyond the job's are expected among them."""


@dataclass(frozen=True)
class Nodes:
    """Nodes by the names that a measurement gives them."""

    index: dict[str, int]
    hosts: dict[int, str]
    """Host name by node; empty where nodes are known by number alone."""
    note: str = ""
    """How names were taken, where that is a guess."""


def read_host_list(path: str, n_nodes: int, spares: int = 0) -> list[str]:
    """Read the hosts [node] of a cluster from a file or a list, in rank order, spares last.

    Raises
    ------
    PrismError
        If it is no text, or holds another number of hosts than the cluster.
    """
    if looks_like_list(path) and not Path(path).exists():
        text = path
    elif not Path(path).exists() or Path(path).is_dir():
        raise PrismError(
            f"{path!r}: neither a file nor a list of hosts; expected a host file, or a list such "
            "as node[001-004,7]"
        )
    else:
        file = RecordedFile(path)
        if file.kind != "text":
            raise PrismError(f"{path}: is no text; expected a list of hosts, one name per line")
        text = file.read_text(MOST_BYTES).decode("utf-8", "replace")
    names = read_hosts_text(text, path)
    if len(names) not in (n_nodes, n_nodes + spares):
        more = len(names) - n_nodes
        way_out = f", or add {option('spares')} {more} for those beyond" if more > 0 else ""
        raise PrismError(
            f"{path}: {format_count(len(names), 'host')}, but the job has "
            f"{format_count(n_nodes, 'node')}; list every node "
            f"once, in rank order{way_out}"
        )
    return names


def find_nodes(
    labels: Sequence[str],
    n_nodes: int,
    hosts: Sequence[str] | None,
    locate: Callable[[str], str],
) -> Nodes:
    """Find out which nodes some labels mean, each there once, in the order of appearance.

    A number is a node's, a name is looked up in `hosts` [node] or, where every node is named,
    takes the order of appearance. `locate` says where a label stands, for messages.

    Raises
    ------
    PrismError
        If a label means no node, two mean the same, or names are ambiguous without a list.
    """
    if hosts is not None:
        known = {name: node for node, name in enumerate(hosts)}
        index = {label: _look_up(label, known, n_nodes, locate) for label in labels}
        nodes = Nodes(index, dict(enumerate(hosts)))
    elif all(is_number(label) for label in labels):
        _number(max(labels, key=int), n_nodes, locate)
        nodes = Nodes({label: int(label) for label in labels}, {})
    else:
        nodes = _in_order(labels, n_nodes, locate)
    seen: dict[int, str] = {}
    for label, node in nodes.index.items():
        if node in seen:
            raise PrismError(
                f"{locate(label)}: {label!r} and {seen[node]!r} are both node {node}; keep one name"
            )
        seen[node] = label
    return nodes


def _in_order(labels: Sequence[str], n_nodes: int, locate: Callable[[str], str]) -> Nodes:
    """Give names numbers in their order, where there is one for every node."""
    texts = [label for label in labels if not is_number(label)]
    shown = ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")
    if len(texts) < len(labels):
        number = next(label for label in labels if is_number(label))
        raise PrismError(
            f"{locate(number)}: node {number} is a number, others are names ({shown}); write all "
            "of them one way"
        )
    if len(labels) != n_nodes:
        raise PrismError(
            f"{locate(labels[0])}: names {format_count(len(labels), 'host')} ({shown}) of a "
            f"cluster of {format_count(n_nodes, 'node')}, so their places in the rank order are "
            "unknown; give "
            f"{option('hosts')} LIST, one name per line in rank order, or write node numbers, 0 to "
            f"{n_nodes - 1}"
        )
    return Nodes(
        {label: node for node, label in enumerate(labels)},
        dict(enumerate(labels)),
        f"nodes 0 to {n_nodes - 1} are the hosts in the order in which they appear: {shown}; "
        f"{option('hosts')} LIST gives another order",
    )


def known_labels(labels: Iterable[str], hosts: Sequence[str]) -> list[str]:
    """List the labels that are in a list of hosts, with or without a domain, and the numbers."""
    short = {name.partition(".")[0] for name in hosts}
    short = set(hosts) | {name for name in short if not is_number(name)}
    return [x for x in labels if {x, x.partition(".")[0]} & short or is_number(x)]


def _look_up(label: str, known: dict[str, int], n_nodes: int, locate: Callable[[str], str]) -> int:
    """Find a label in the list of hosts: as it is, or without its domain; else as a number."""
    if label in known:
        return known[label]
    short = label.partition(".")[0]
    alike = [node for name, node in known.items() if name.partition(".")[0] == short]
    if len(alike) == 1 and not is_number(short):
        return alike[0]
    if is_number(label):
        return _number(label, n_nodes, locate)
    near = difflib.get_close_matches(label, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PrismError(
        f"{locate(label)}: no host {label!r} in the list of {format_count(len(known), 'host')} "
        f"({', '.join(list(known)[:_SHOWN])}, ...); {hint}add it to the list, or take it out here"
    )


def _number(label: str, n_nodes: int, locate: Callable[[str], str]) -> int:
    """Return a node's number, where there is such a node."""
    node = int(label)
    if node >= n_nodes:
        raise PrismError(
            f"{locate(label)}: no node {node}: the cluster has {format_count(n_nodes, 'node')}, "
            "0 to "
            f"{n_nodes - 1}; correct it, or take it out"
        )
    return node
