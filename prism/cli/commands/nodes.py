"""Options that say how slow single nodes of a job are, and what their hosts are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from prism.cluster.nodes.inventory import Inventory
    from prism.jobs.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])


def measured_nodes_options(command: Command) -> Command:
    """Add files that say how slow nodes are, and the list that their names are looked up in."""
    command = click.option(
        "--hosts",
        metavar="LIST",
        help="Host names in rank order: a host file of MPI, PBS, LSF or Slurm, or a list such as "
        "'node[001-064]'.",
    )(command)
    return click.option(
        "--measured-nodes",
        "files",
        metavar="FILE",
        multiple=True,
        help="How slow nodes are: a table (node, slowdown), a burn-in table of times or rates per "
        "GPU, SuperBench's results-summary.jsonl, nccl-tests output (a file, or a folder of them); "
        "repeatable.",
    )(command)


def read_host_names(job: Job, hosts: str | None, spares: int = 0) -> list[str] | None:
    """Read the names of a job's nodes, its spares last; None where none are given."""
    from prism.cluster.nodemap import Placement
    from prism.cluster.nodes.hosts import read_host_list

    return None if hosts is None else read_host_list(hosts, Placement(job).n_nodes, spares)


def read_measured_nodes(
    job: Job,
    files: Sequence[str],
    names: Sequence[str] | None,
    column: str | None,
    where: Mapping[str, str],
    kind: str | None = None,
) -> Inventory:
    """Read how slow a job's nodes are; `names` [node] are those of their hosts, where known."""
    from prism.cluster.nodemap import Placement
    from prism.cluster.nodes.inventory import read_inventory

    placement = Placement(job)
    n_nodes = placement.n_nodes
    # of spares no more than their names is known
    hosts = None if names is None else names[:n_nodes]
    found = read_inventory(
        files, n_nodes, placement.gpus_per_node, kind=kind, hosts=hosts, column=column, where=where
    )
    return replace(found, hosts=found.hosts | dict(enumerate(names or ())))
