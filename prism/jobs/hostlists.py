"""Lists of hosts as schedulers and launchers write them, expanded to names in their order.

Slurm's compressed lists (``node[001-004,7]``), host files of MPI and DeepSpeed (``host slots=8``,
``host:8``), Open MPI's rank files, PBS node files (a line per task) and ``exec_host``, LSF's
(``LSB_DJOB_HOSTFILE``, ``LSB_HOSTS``, ``LSB_MCPU_HOSTS``), lists of pdsh, clush and torchrun,
assignments in front of them (``NodeList=``), and what ``scontrol show node`` and ``srun -l
hostname`` print.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

from prism.common.errors import PrismError
from prism.common.text import format_count

MOST_HOSTS = 2_000_000  # longer lists are errors: no cluster has as many nodes

_ASSIGNED = re.compile(r"^(?:export\s+)?[A-Za-z_]\w*\s*=\s*(?=\S)")
_WHERE = re.compile(r"^(?:(?:pdsh|clush|srun)\s+)?(?:-w|--host|--hosts|--nodelist|-H)[\s=]+")
_BUT = re.compile(r"\s(?:-x|--exclude)[\s=]+|!")  # of pdsh, clush and srun
_SETTING = re.compile(r"\s+[A-Za-z][\w-]*\s*=\s*\S+")  # behind a host
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,5}))?)?")
_PAIRED = re.compile(r"[^][]*(?:\[[^][]*\][^][]*)*")
_BETWEEN_COMMAS = re.compile(r"(?:[^,[]|\[[^]]*\])+")
_RANK = re.compile(
    r"^[ \t]*(?:rank[ \t]+(?=\d+[ \t]*=)|(?=\d+:[ \t]))(\d{1,9})[ \t]*[=:][ \t]*(\S+)", re.M
)
_CHUNK = re.compile(r"\(?([\w.-]+)[/:][^+]*")  # of PBS: host/0*8, or (host:ncpus=8)
_SLOTS = re.compile(r"\S+\s+\d+(?:\s+\S+\s+\d+)+")  # hosts, each with its number of slots

_NODE = re.compile(r"^NodeName=(\S+)\s(?:(?!^NodeName=).)*?\bState=(\S+)", re.M | re.S)
_AWAY = re.compile(r"DOWN|DRAIN|FAIL|FUTURE|INVAL|MAINT|\*")  # states in which no job can start


def is_number(label: str) -> bool:
    """Tell whether a host is given by its number."""
    return label.isascii() and label.isdecimal()


def looks_like_list(text: str) -> bool:
    """Tell whether a text that is no file's name is itself a list of hosts.

    Examples
    --------
    >>> looks_like_list("node[1-4]"), looks_like_list("a,b"), looks_like_list("hosts.txt")
    (True, True, False)
    """
    return "/" not in text and bool(re.search(r"\[\d|,", text))


def read_hosts_text(text: str, source: str) -> list[str]:
    r"""Read the hosts of a list, each once, in order; one host or several to a line.

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

    Of ``scontrol show node`` the nodes that can run a job:

    >>> read_hosts_text("NodeName=a Arch=x\n State=IDLE\nNodeName=b Arch=x\n State=IDLE+DRAIN", "-")
    ['a']

    A rank file in the order of its ranks; LSF's launch host, of one slot beside larger, left out:

    >>> read_hosts_text("rank 1=b slot=0\nrank 0=a slot=0", "-")
    ['a', 'b']
    >>> read_hosts_text("batch 1 a 42 b 42", "-"), read_hosts_text("batch\na\na\nb\nb", "-")
    (['a', 'b'], ['a', 'b'])

    PBS, clush:

    >>> read_hosts_text("a/0*8+b/0*8", "-"), read_hosts_text("-w n[1-7/2] -x n5", "-")
    (['a', 'b'], ['n1', 'n3', 'n7'])
    """
    if ranks := _RANK.findall(text):
        return list(dict.fromkeys(host for _, host in sorted(ranks, key=lambda rank: int(rank[0]))))
    if shown := _NODE.findall(text):
        return [name for name, state in shown if not _AWAY.search(state)]
    slots: Counter[str] = Counter()  # lines or slots of each host
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip().strip("\"'")
        line = _WHERE.sub("", _ASSIGNED.sub("", line)).strip("\"' ")
        where = f"{source}:{number}" if "\n" in text.strip() else source
        if _SLOTS.fullmatch(line):
            words = line.split()
            for name, n in zip(words[::2], words[1::2], strict=True):
                slots[name] += int(n)
            continue
        line, *but = _BUT.split(line)
        for word in _words(line, where):
            slots.update(expand(word, where))
            if len(slots) > MOST_HOSTS:
                raise PrismError(f"{where}: more than {MOST_HOSTS:,} hosts; is a range mistyped?")
        for name in itertools.chain.from_iterable(
            expand(word, where) for part in but for word in _words(part, where)
        ):
            slots.pop(name, None)
    names = list(slots)
    launches = len(names) > 1 and slots[names[0]] == 1 < min(slots[name] for name in names[1:])
    return names[launches:]


def _words(line: str, where: str) -> list[str]:
    """Split a line into hosts: at commas outside of brackets; what follows a host is left out.

    Of words alike but for their numbers each is a host, the first may be another one.
    """
    if not _PAIRED.fullmatch(line):
        raise PrismError(
            f"{where}: {line[:60]!r}: a bracket is not paired; expected a list such as "
            "node[001-004,7]; quote it, since a shell takes brackets for its own"
        )
    chunks = [_CHUNK.fullmatch(part.strip()) for part in line.split("+")]
    if len(chunks) > 1 and all(chunks):
        return [chunk[1] for chunk in chunks if chunk]
    found: list[str] = []
    for words in map(str.split, _BETWEEN_COMMAS.findall(_SETTING.sub("", line))):
        forms = [re.sub(r"\d+", "0", word) for word in words]
        alike = len(set(forms[len(words) > 2 :])) == 1 and "0" in forms[-1] and forms[-1] != "0"
        found += words if alike else words[:1]
    return [re.sub(r":\d+$", "", word) for word in found]


def expand(word: str, where: str = "") -> list[str]:
    """Expand the ranges of one host expression; several brackets vary the last one fastest.

    Examples
    --------
    >>> expand("r[1-2]n[01-02]")
    ['r1n01', 'r1n02', 'r2n01', 'r2n02']
    """
    pieces = re.split(r"\[([^\]]*)\]", word)
    choices = [
        [piece] if i % 2 == 0 else _numbers(piece, word, where) for i, piece in enumerate(pieces)
    ]
    n = math.prod(map(len, choices))
    if n > MOST_HOSTS:
        raise PrismError(f"{where}: {word[:60]!r}: {format_count(n, 'host')}; is a range mistyped?")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _numbers(inside: str, word: str, where: str) -> list[str]:
    """Numbers of a bracket as texts, as wide as the first of their range is written."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high, step = match.groups() if match else ("0", "-1", None)
        high = high or low
        if not 0 <= int(high) - int(low) < MOST_HOSTS:
            raise PrismError(
                f"{where}: {word[:60]!r}: {part[:20]!r} is no number and no range from low to "
                f"high, of {MOST_HOSTS:,} at most; expected a list such as node[001-004,7]"
            )
        found += [str(k).zfill(len(low)) for k in range(int(low), int(high) + 1, int(step or 1))]
    return found
