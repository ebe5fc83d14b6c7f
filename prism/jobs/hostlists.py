"""Lists of hosts as schedulers and launchers write them, expanded to names in their order.

Slurm's compressed lists (``node[001-004,7]``), host files of MPI and DeepSpeed (``host slots=8``,
``host:8``), PBS node files (a line per task), comma-separated lists of pdsh and torchrun, and
assignments in front of them (``NodeList=``).
"""

from __future__ import annotations

import itertools
import re

from prism.common.errors import PrismError

MOST_HOSTS = 2_000_000
"""Longer lists are mistakes: no cluster has as many nodes."""

_ASSIGNED = re.compile(r"^(?:export\s+)?[A-Za-z_]\w*=(?=\S)")
_WHERE = re.compile(r"^(?:-w|--host|--hosts|--nodelist|-H)[\s=]+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")


def looks_like_list(text: str) -> bool:
    """Tell whether a text that is no file's name is itself a list of hosts.

    Examples
    --------
    >>> looks_like_list("node[1-4]"), looks_like_list("a,b"), looks_like_list("hosts.txt")
    (True, True, False)
    """
    return "/" not in text and bool(re.search(r"\[\d|,", text))


def read_hosts_text(text: str, source: str) -> list[str]:
    r"""Read the hosts of a list, each once, in order.

    Parameters
    ----------
    text : str
        The list: one host or several to a line.
    source : str
        Where it comes from, for messages.

    Raises
    ------
    PrismError
        If a bracket does not close, or a range is none.

    Examples
    --------
    >>> read_hosts_text("node[08-10,7]-ib,login1 # racks", "-")
    ['node08-ib', 'node09-ib', 'node10-ib', 'node7-ib', 'login1']
    >>> read_hosts_text("gpu1 slots=8\ngpu1 slots=8\ngpu2:8", "-")
    ['gpu1', 'gpu2']
    """
    names: dict[str, None] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip().strip("\"'")
        line = _WHERE.sub("", _ASSIGNED.sub("", line)).strip("\"' ")
        where = f"{source}:{number}" if "\n" in text.strip() else source
        for word in _words(line, where):
            for name in expand(word, where):
                names[name] = None
            if len(names) > MOST_HOSTS:
                raise PrismError(f"{where}: more than {MOST_HOSTS:,} hosts; is a range mistyped?")
    return list(names)


def _words(line: str, where: str) -> list[str]:
    """Split a line into hosts: at commas outside of brackets; what follows a host is left out."""
    parts = [""]
    depth = 0
    for letter in line:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            break
        if depth == 0 and letter == ",":
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise PrismError(
            f"{where}: {line[:60]!r}: a bracket is not paired; expected a list such as "
            "node[001-004,7]; quote it, since a shell takes brackets for its own"
        )
    firsts = [part.split()[0] for part in parts if part.split()]
    return [re.sub(r":\d+$", "", word) for word in firsts]


def expand(word: str, where: str = "") -> list[str]:
    """Expand the ranges of one host expression; several brackets vary the last one fastest.

    Raises
    ------
    PrismError
        If a bracket holds something else than numbers and ranges.

    Examples
    --------
    >>> expand("r[1-2]n[01-02]")
    ['r1n01', 'r1n02', 'r2n01', 'r2n02']
    """
    pieces = re.split(r"\[([^\]]*)\]", word)
    choices = [
        [piece] if i % 2 == 0 else _numbers(piece, word, where) for i, piece in enumerate(pieces)
    ]
    n = 1
    for choice in choices:
        n *= len(choice)
    if n > MOST_HOSTS:
        raise PrismError(f"{where}: {word[:60]!r}: {n:,} hosts; is a range mistyped?")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(inside: str, word: str, where: str) -> list[str]:
    """Numbers of a bracket as texts, as wide as the first of their range is written."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.match(part.strip())
        low, high = (match[1], match[2] or match[1]) if match else ("", "")
        if match is None or len(high) > 9 or int(high) < int(low):
            raise PrismError(
                f"{where}: {word[:60]!r}: {part[:20]!r} is no number and no range from low to "
                "high; expected a list such as node[001-004,7]"
            )
        if int(high) - int(low) >= MOST_HOSTS:
            raise PrismError(f"{where}: {word[:60]!r}: {part} is too long a range")
        found += [str(k).zfill(len(low)) for k in range(int(low), int(high) + 1)]
    return found
