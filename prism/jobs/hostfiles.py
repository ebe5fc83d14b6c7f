"""Files that say which node takes which place (slot) in the rank order.

A job reads ``hosts.csv`` back as ``cluster.hosts``; launchers take lists of hosts in rank order.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prism.common.errors import PrismError
from prism.common.files import read_bytes
from prism.jobs.hostlists import is_number, read_hosts_text

COLUMNS = ("slot", "node", "host", "first_rank", "stages", "replicas")
MAX_BYTES = 64 << 20  # larger files are no placement; a million nodes need less
_EXPECTED = f"a placement of prism place, a CSV whose first line is {','.join(COLUMNS)}"


def placement_csv(
    hosts: Sequence[int],
    groups: Sequence[Iterable[tuple[int, int]]],
    gpus_per_node: int,
    names: Mapping[int, str] | None = None,
) -> str:
    """Write a placement as the text of ``hosts.csv``.

    `hosts` [slot] are the nodes, `groups` [slot] the (replica, stage) pairs that each holds,
    `names` host names by node.

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
    table.writerows(slot_rows(hosts, groups, gpus_per_node, names))
    return out.getvalue()


def slot_rows(
    hosts: Sequence[int],
    groups: Sequence[Iterable[tuple[int, int]]],
    gpus_per_node: int,
    names: Mapping[int, str] | None = None,
) -> list[tuple[int, int, str, int, str, str]]:
    """Give the rows of `placement_csv`."""
    rows = []
    for slot, (node, pairs) in enumerate(zip(hosts, groups, strict=True)):
        replicas, stages = map(as_ranges, zip(*pairs, strict=True))
        host = (names or {}).get(node, "")
        rows.append((slot, node, host, slot * gpus_per_node, stages, replicas))
    return rows


def host_order(
    hosts: Sequence[int], names: Mapping[int, str] | None = None, per_host: int = 1
) -> str:
    """List the hosts in rank order, one per line; a node without a name by its number."""
    return "".join(f"{(names or {}).get(node, node)}\n" * per_host for node in hosts)


def launcher_files(
    hosts: Sequence[int], names: Mapping[int, str], gpus_per_node: int
) -> dict[str, str]:
    """Write the hosts in rank order as launchers take them, by file name.

    A launcher knows hosts by name: nothing is written where a node has none.

    Examples
    --------
    >>> files = launcher_files([1, 0], {0: "n0", 1: "n1"}, 2)
    >>> files["slurm_hostfile.txt"].split(), files["rankfile.txt"].splitlines()[2]
    (['n1', 'n1', 'n0', 'n0'], 'rank 2=n0 slot=0')
    >>> files["openmpi_hostfile.txt"].split(), files["mpich_hostfile.txt"].split()
    (['n1', 'slots=2', 'n0', 'slots=2'], ['n1:2', 'n0:2'])
    """
    if any(node not in names for node in hosts):
        return {}
    order = [names[node] for node in hosts]
    ranks = enumerate(name for name in order for _ in range(gpus_per_node))
    return {
        "slurm_hostfile.txt": host_order(hosts, names, gpus_per_node),
        "openmpi_hostfile.txt": "".join(f"{name} slots={gpus_per_node}\n" for name in order),
        "mpich_hostfile.txt": "".join(f"{name}:{gpus_per_node}\n" for name in order),
        "rankfile.txt": "".join(
            f"rank {rank}={name} slot={rank % gpus_per_node}\n" for rank, name in ranks
        ),
    }


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
    """Read the node of every slot.

    Either a CSV with the columns ``slot`` and ``node``, or the numbers of the nodes in rank order
    as `host_order` writes them where names are not known; ``[0-3,7]`` is a range. Whether such
    nodes are there, and no node twice, is for the job to say.
    """
    source = str(path)
    text = _read(Path(path), source)
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise PrismError(f"{source}:{reader.line_num}: cannot be read as CSV: {error}") from error
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    missing = [name for name in ("slot", "node") if name not in header]
    if len(missing) == 2:
        return _listed(text, source)
    if missing:
        raise PrismError(f"{source}: no column {missing[0]}; expected {_EXPECTED}")
    found: dict[int, int] = {}
    for line, row in rows[1:]:
        slot, node = (_whole(row, header, name, f"{source}:{line}") for name in ("slot", "node"))
        if slot in found:
            raise PrismError(f"{source}:{line}: slot {slot} is there twice; keep one line per slot")
        found[slot] = node
    if not found:
        raise PrismError(f"{source}: no slot; expected a line per node in the job's rank order")
    n = len(found)
    if gaps := set(range(n)) - found.keys():
        raise PrismError(f"{source}: {n} slots but no slot {min(gaps)}; expected 0 to {n - 1}")
    return [found[slot] for slot in range(n)]


def _listed(text: str, source: str) -> list[int]:
    """Read nodes from a list of their numbers in rank order."""
    names = read_hosts_text(text, source)
    named = next((name for name in names if not is_number(name)), None)
    if named is None and names:
        return [int(name) for name in names]
    found = f", and {named[:40]!r} is no node's number" if named else ""
    raise PrismError(
        f"{source}: no column slot and node{found}; expected {_EXPECTED}; or a list of node "
        "numbers in rank order (for host names: prism place --hosts LIST)"
    )


def _read(path: Path, source: str) -> str:
    try:
        text = read_bytes(path, source, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PrismError(f"{source}: is not UTF-8 text; expected a placement's CSV") from error
    if "\0" in text:
        raise PrismError(f"{source}: is no placement; expected a CSV of slots and nodes")
    return text


def _whole(row: Sequence[str], header: Sequence[str], name: str, where: str) -> int:
    """Return a cell as a whole number from 0."""
    at = header.index(name)
    cell = row[at].strip() if at < len(row) else ""
    if not is_number(cell):
        raise PrismError(f"{where}: {name} is {cell!r}, expected a whole number from 0")
    return int(cell)
