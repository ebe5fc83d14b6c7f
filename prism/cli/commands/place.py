"""``prism place``: where slow nodes should go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.nodes import (
    measured_nodes_options,
    read_host_names,
    read_measured_nodes,
)
from prism.cli.commands.options import (
    ShareType,
    choose_options,
    common_options,
    rows_of,
    set_option,
)
from prism.cli.commands.outputs import Call

if TYPE_CHECKING:
    from prism.cluster.nodes.inventory import Inventory
    from prism.jobs.job import Job

KINDS = ("compute", "memory", "network", "everything")
OBJECTIVES = ("p50", "p95", "p99", "mean", "time_to_train")


@click.command()
@click.argument("job", metavar="JOB_OR_MODEL")
@click.option("--slow-nodes", type=click.IntRange(min=1), metavar="K", help="Number of slow nodes.")
@click.option("--slowdown", type=float, metavar="X", help="By how much: 1.2 is 20 % slower.")
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="What --slowdown, or a plain slowdown in a file, applies to, and what the measurement "
    "taken from a burn-in is of.  [default: compute]",
)
@click.option("--at", metavar="NODES", help="Which nodes are slow: 3,17.  [default: drawn]")
@measured_nodes_options
@choose_options("the table", "measurement", unit=False)
@click.option("--spares", type=click.IntRange(min=0), default=0, help="Number of spare nodes.")
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="p95",
    show_default=True,
    help="Objective to minimise: of the step time, or time_to_train.",
)
@click.option(
    "--tolerance",
    type=ShareType(),
    default="0.1%",
    show_default=True,
    help="Indifference zone: differences of the objective below it are ignored.",
)
@click.option(
    "--keep-segments",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep every N nodes in rank order within one rack (NVLink domain), as Slurm's --segment.",
)
@click.option(
    "--heat",
    is_flag=True,
    help="GPUs are slow by their position in the node (cluster.gpu_temperatures or "
    "gpu_slowdowns): which stages get the cool ones.",
)
@set_option
@common_options("Result, summary, plots, host lists.", placed=True)
def place(
    call: Call,
    job: str,
    overrides: tuple[str, ...],
    objective: str,
    tolerance: float,
    spares: int,
    keep_segments: int | None,
    heat: bool,
    **named: Any,
) -> None:
    """Say where slow nodes should go, and what they cost.

    The slow nodes are those of --slow-nodes and --slowdown, of --measured-nodes, of the job's own
    cluster.node_slowdowns, or a model's traced workers. JOB_OR_MODEL is a job file, the name of a
    shipped job, or a model of `prism fit`.
    """
    _check_options(**named)
    from prism.analyses.place import place as place_nodes
    from prism.jobs.job import load_job

    loaded = load_job(job, overrides)
    inventory = _inventory(loaded, spares, **named)
    slow: dict[str, Any] = {}
    if named["files"] or named["at"]:
        slow = {"nodes": inventory}
    elif named["slow_nodes"] is not None:
        slow = {
            "slow_nodes": named["slow_nodes"],
            "slowdown": named["slowdown"],
            "kind": named["kind"] or "compute",
        }
    result = call.run(
        "placing", place_nodes, loaded, **slow, hosts=inventory.hosts, spares=spares,
        objective=objective, tolerance=tolerance, keep_segments=keep_segments, heat=heat,
    )  # fmt: skip
    call.conclude(result, None if call.output is None else result.host_files())


def _check_options(
    slow_nodes: int | None,
    slowdown: float | None,
    kind: str | None,
    at: str | None,
    files: Sequence[str],
    where: Sequence[tuple[str, str]],
    column: str | None,
    hosts: str | None,
) -> None:
    """Refuse options that say two things, or half of one."""
    drawn = slow_nodes is not None or at is not None
    if files and (drawn or slowdown is not None):
        raise click.UsageError(
            "--measured-nodes says which nodes are slow and by how much; leave out --slow-nodes, "
            "--at and --slowdown"
        )
    if drawn and slowdown is None:
        raise click.UsageError("--slow-nodes and --at need --slowdown X, such as 1.2")
    if not drawn and not files and (slowdown, kind) != (None, None):
        raise click.UsageError("--slowdown and --kind need --slow-nodes K, or --at NODES")
    if (where or column) and not files:
        raise click.UsageError("--where and --column choose from --measured-nodes FILE")
    if at is not None and slow_nodes not in (None, len(at.split(","))):
        raise click.UsageError(f"--slow-nodes {slow_nodes} and --at {at} disagree; leave one out")


def _inventory(
    job: Job,
    spares: int,
    slow_nodes: int | None,
    slowdown: float | None,
    kind: str | None,
    at: str | None,
    files: Sequence[str],
    where: Sequence[tuple[str, str]],
    column: str | None,
    hosts: str | None,
) -> Inventory:
    """Collect what is known of single nodes: how slow they are, and their names."""
    from prism.cluster.nodemap import Placement, slow_node
    from prism.cluster.nodes.hosts import find_nodes
    from prism.cluster.nodes.inventory import Inventory

    n_nodes = Placement(job).n_nodes
    listed = read_host_names(job, hosts, spares)
    known = dict(enumerate(listed or ()))
    if at is not None and slowdown is not None:
        slow = slow_node(slowdown, kind or "compute")
        labels = [label.strip() for label in at.split(",")]
        twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
        if twice is not None:
            raise click.UsageError(f"--at {at}: node {twice} is there twice")
        names = None if listed is None else listed[:n_nodes]
        index = find_nodes(labels, n_nodes, names, lambda _: f"--at {at}").index
        return Inventory({index[label]: slow for label in labels}, known)
    if not files:
        return Inventory({}, known)
    return read_measured_nodes(job, files, listed, column, rows_of(where), kind)
