"""Files that say which node takes which place in the rank order.

``hosts.csv`` has a line per place (slot): the node there, its host name, the first rank and the
stages and replicas of the job that it holds; a job reads it back as ``cluster.hosts``. Lists of
hosts in rank order, a line per node or per rank, are what launchers take. Left out: which
placement is good.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prism.common.errors import PrismError
from prism.common.files import read_bytes
from prism.jobs.hostlists import read_hosts_text

COLUMNS = ("slot", "node", "host", "first_rank", "stages", "replicas")
"""Columns of ``hosts.csv``."""

MAX_BYTES = 64 << 20
"""Larger files are no placement; a million nodes need less [byte]."""


def placement_csv(
    hosts: Sequence[int],
    groups: Sequence[Iterable[tuple[int, int]]],
    gpus_per_node: int,
    names: Mapping[int, str] | None = None,
) -> str:
    """Write a placement as the text of ``hosts.csv``.

    Parameters
    ----------
    hosts : sequence of int
        [slot] the node that takes this place of the rank order.
    groups : sequence of iterable of (int, int)
        [slot] the (replica, stage) pairs that the place holds.
    gpus_per_node : int
        Ranks of a slot.
    names : mapping of int to str, optional
        Host names by node; the cell is empty where a node has none.

    Examples
    --------
    >>> print(placement_csv([1, 0], [[(0, 0), (1, 0)], [(0, 1), (1, 1)]], 8, {1: "n1"}), end="")
    slot,node,host,first_rank,stages,replicas
    0,1,n1,0,0,0-1
    1,0,,8,1,0-1
    """
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for slot, node in enumerate(hosts):
        pairs = list(groups[slot])
        stages = as_ranges(stage for _, stage in pairs)
        replicas = as_ranges(replica for replica, _ in pairs)
        host = (names or {}).get(int(node), "")
        table.writerow([slot, int(node), host, slot * gpus_per_node, stages, replicas])
    return out.getvalue()


def host_order(
    hosts: Sequence[int], names: Mapping[int, str] | None = None, per_host: int = 1
) -> str:
    """List the hosts in rank order, for a launcher.

    Parameters
    ----------
    hosts : sequence of int
        [slot] the node that takes this place of the rank order.
    names : mapping of int to str, optional
        Host names by node; a node without one is written as its number.
    per_host : int
        Lines per host: 1 for a host file of MPI or torchrun, the GPUs of a node for Slurm's
        ``SLURM_HOSTFILE``, which has a line per task.
    """
    known = names or {}
    lines = (known.get(int(node), str(int(node))) for node in hosts for _ in range(per_host))
    return "".join(f"{line}\n" for line in lines)


def as_ranges(numbers: Iterable[int], separator: str = " ") -> str:
    """Write whole numbers as ranges.

    Examples
    --------
    >>> as_ranges([3, 0, 1, 2, 7])
    '0-3 7'
    """
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return separator.join(f"{low}-{high}" if high > low else str(low) for low, high in spans)


def read_hosts(path: str | os.PathLike[str]) -> list[int]:
    """Read which node takes which place from a ``hosts.csv``.

    Parameters
    ----------
    path : str or path
        A CSV with the columns ``slot`` and ``node``; others are passed over. Or the numbers of the
        nodes in rank order, one or several to a line, as ``host_order`` writes them where names
        are not known; ``[0-3,7]`` is a range.

    Returns
    -------
    list of int
        [slot] the node.

    Raises
    ------
    PrismError
        If it cannot be read, a cell is no whole number, or a slot is missing or there twice.
        Whether such nodes are there, and no node twice, is for the job to say.
    """
    source = str(path)
    reader = csv.reader(io.StringIO(_read(Path(path), source), newline=""))
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise PrismError(f"{source}:{reader.line_num}: cannot be read as CSV: {error}") from error
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    missing = [name for name in ("slot", "node") if name not in header]
    if missing and len(missing) == 2:
        return _listed(_read(Path(path), source), source)
    if missing:
        raise PrismError(
            f"{source}: no column {' and '.join(missing)}; expected a placement as prism place "
            f"writes it: a CSV whose first line is {','.join(COLUMNS)}"
        )
    found: dict[int, int] = {}
    for line, row in rows[1:]:
        slot, node = (_whole(row, header, name, f"{source}:{line}") for name in ("slot", "node"))
        if slot in found:
            raise PrismError(f"{source}:{line}: slot {slot} is there twice; keep one line per slot")
        found[slot] = node
    if not found:
        raise PrismError(f"{source}: no slot; expected a line per node in the job's rank order")
    gap = next((slot for slot in range(len(found)) if slot not in found), None)
    if gap is not None:
        raise PrismError(
            f"{source}: {len(found)} slots but no slot {gap}; expected slots 0 to {len(found) - 1}"
        )
    return [found[slot] for slot in range(len(found))]


def _listed(text: str, source: str) -> list[int]:
    """Read nodes from a list of their numbers in rank order."""
    names = read_hosts_text(text, source) if len(text) else []
    named = next((name for name in names if not (name.isascii() and name.isdecimal())), None)
    if named is None and names:
        return [int(name) for name in names]
    raise PrismError(
        f"{source}: no column slot and node"
        + (f", and {named[:40]!r} is no node's number" if named else "")
        + "; expected a placement as prism place writes it: a CSV whose first line is "
        f"{','.join(COLUMNS)}; or a list of node numbers in rank order (which number a host's name "
        "has, only the cluster's whole list tells: prism place --hosts LIST)"
    )


def _read(path: Path, source: str) -> str:
    """Read the file as text."""
    try:
        text = read_bytes(path, source, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrismError(f"{source}: is not UTF-8 text; expected a placement's CSV") from error
    if "\0" in text:
        raise PrismError(f"{source}: is no placement; expected a CSV of slots and nodes")
    return text


def _whole(row: Sequence[str], header: Sequence[str], name: str, where: str) -> int:
    """Return a cell as a whole number from 0."""
    column = header.index(name)
    cell = row[column].strip() if column < len(row) else ""
    if not (cell.isascii() and cell.isdecimal()):
        raise PrismError(f"{where}: {name} is {cell!r}, expected a whole number from 0")
    return int(cell)
