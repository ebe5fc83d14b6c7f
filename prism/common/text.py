"""Text for people: durations, counts, shares, the unit of an axis, and names made harmless.

Nothing here is used in a calculation; inside prism every duration is a float in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
NO_CHANGE = 5e-5  # relative changes below this are none [1]
_AGES = 1e6 * 86_400.0  # beyond, digits are no longer read
_UNITS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "s": 1.0}


def visible(text: str) -> str:
    r"""Write what steers a terminal or turns the direction of reading as its code, as JSON does.

    Names of files, jobs and kernels may hold anything; line ends and tabs stay.

    Examples
    --------
    >>> visible("a\x1b]0;b\x07\u202ec"), visible("x\n[/y]")
    ('a\\u001b]0;b\\u0007\\u202ec', 'x\n[/y]')
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""Write what ends a line as `\n`: a name may hold that too.

    Examples
    --------
    >>> one_line("a\nb.yaml")
    'a\\nb.yaml'
    """
    return text.replace("\n", "\\n")


def format_duration(seconds: float, resolution: float | None = None) -> str:
    """Write a duration with fitting units: s and below up to two minutes, then min, h and d.

    `resolution` is the smallest difference worth showing [s], say a standard error or a tenth of a
    spread; two units or five digits where None.

    Examples
    --------
    >>> format_duration(273_600)
    '3 d 4 h'
    >>> format_duration(273_600 + 720, resolution=100)
    '3 d 4 h 12 min'
    >>> format_duration(11.23456, resolution=0.01)
    '11.23 s'
    >>> format_duration(0.0123), format_duration(1e20), format_duration(11.2, math.inf)
    ('12.3 ms', '1.16e+15 d', '11 s')
    """
    if not math.isfinite(seconds):
        return "never" if seconds > 0 else "not known"
    if seconds < 0:
        return "-" + format_duration(-seconds, resolution)
    if seconds < 120.0:
        return _short(seconds, resolution)
    if seconds >= _AGES:
        return f"{seconds / _UNITS['d']:.3g} d"
    names = list(_UNITS)
    first = next(i for i, name in enumerate(names) if seconds >= _UNITS[name])
    last = first if resolution else min(first + 1, len(names) - 1)
    while resolution and last < len(names) - 1 and _UNITS[names[last]] > resolution:
        last += 1
    left = round(seconds / _UNITS[names[last]])
    parts = []
    for name in reversed(names[first : last + 1]):
        index = names.index(name)
        per = round(_UNITS[names[index - 1]] / _UNITS[name]) if index > 0 else left + 1
        amount, left = (left % per, left // per) if index > first else (left, 0)
        parts.append(f"{amount} {name}")
    while len(parts) > 1 and parts[0].startswith("0 "):
        del parts[0]
    return " ".join(reversed(parts))


def format_like(seconds: float, like: float, resolution: float) -> str:
    """Write a duration in the unit of a typical one, to the smallest difference worth showing [s].

    Examples
    --------
    >>> format_like(0.12, like=11.5, resolution=0.005)
    '0.120 s'
    >>> format_like(7_200.0, like=5e6, resolution=60.0)
    '2 h'
    """
    unit, scale = time_unit(like)
    if scale > 1.0:
        return format_duration(seconds, resolution)
    return f"{seconds / scale:.{_digits(resolution / scale)}f} {unit}"


def _digits(resolution: float) -> int:
    """Count the decimals that show a difference of this size."""
    if not 0.0 < resolution < math.inf:
        return 0 if resolution > 0.0 else 9
    return max(0, min(9, -math.floor(math.log10(resolution))))


def _short(seconds: float, resolution: float | None) -> str:
    """At most two minutes: one number with s, ms or us."""
    scale, unit = next(
        (pair for pair in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= pair[0]),
        (1e-6, "us") if seconds else (1.0, "s"),
    )
    value = seconds / scale
    if resolution is None or resolution <= 0:
        return f"{value:.5g} {unit}"
    return f"{value:.{_digits(resolution / scale)}f} {unit}"


def format_share(share: float, digits: int = 3, half: float | None = None) -> str:
    """Write a probability or a share in percent, with half of its 95 % interval where one is given.

    `digits` are significant where no interval says how many are known. A half below 0.05 % is left
    out; a share within it is 0.

    Examples
    --------
    >>> format_share(0.12345), format_share(-0.0), format_share(1.477, 2)
    ('12.3 %', '0 %', '148 %')
    >>> format_share(0.9975), format_share(0.9997), format_share(0.9975, 2)
    ('99.8 %', '100 %', '100 %')
    >>> format_share(0.2894, half=0.0612), format_share(0.7634, half=0.0052)
    ('29 ± 6 %', '76.3 ± 0.5 %')
    >>> format_share(2e-4, half=0.0), format_share(0.072, half=1e-5)
    ('<0.1 %', '7.2 %')
    >>> format_share(-0.0016, half=0.002)
    '0 ± 0.2 %'
    """
    percent = 100.0 * share + 0.0  # no -0
    if half is not None and half >= 5e-4:
        decimals = min(1, _digits(100.0 * half))
        if abs(share) <= half:
            return f"0 ± {100.0 * half:.{decimals}f} %"
        return f"{percent:.{decimals}f} ± {100.0 * half:.{decimals}f} %"
    if half is not None and 0.0 < abs(share) < 5e-4:
        return "<0.1 %"
    rounds_up = 100.0 - 0.5 * 10.0 ** (2 - digits)
    return f"{percent:.{digits}g} %" if abs(percent) < rounds_up else f"{percent:.0f} %"


def percent_change(change: float, interval: Sequence[float] | None = None) -> str:
    """Write a relative change in percent, with half of its 95 % interval where digits show it.

    The interval may be the change's or its negative's; a change within half of it is 0.

    Examples
    --------
    >>> percent_change(-0.01613), percent_change(0.0321, [0.031, 0.0335]), percent_change(1e-6)
    ('-1.6 %', '+3.2 ± 0.1 %', '0 %')
    >>> percent_change(-0.003, [-0.008, 0.002])
    '0 ± 0.50 %'
    """
    half = 0.0
    if interval and None not in interval:
        half = 0.5 * abs(float(interval[1]) - float(interval[0]))
    if abs(change) < NO_CHANGE and half < NO_CHANGE:
        return "0 %"
    rough = half >= 0.05 or abs(change) >= 1.0
    digits = 0 if rough else 1 if 0.01 <= abs(change) < 0.99 else 2
    error = f" ± {100.0 * half:.{digits}f}" if 100.0 * half >= 0.5 * 0.1**digits else ""
    if abs(change) <= half and error:
        return f"0{error} %"
    return f"{100.0 * change:+.{digits}f}{error} %"


def format_count(count: float, noun: str = "") -> str:
    """Write a count with its thousands apart, and what is counted, given in the singular.

    Examples
    --------
    >>> format_count(16384), format_count(16384, "GPU"), format_count(1, "cluster draw")
    ('16,384', '16,384 GPUs', '1 cluster draw')
    >>> format_count(0, "entry"), format_count(2, "microbatch"), format_count(3, "replay")
    ('0 entries', '2 microbatches', '3 replays')
    """
    return f"{count:,.0f} {plural(count, noun)}" if noun else f"{count:,.0f}"


def plural(count: float, one: str, many: str = "") -> str:
    """Choose the form of a word that a count takes; a noun's plural need not be given.

    Examples
    --------
    >>> plural(1, "step"), plural(2, "step"), plural(1, "is", "are"), plural(2, "is", "are")
    ('step', 'steps', 'is', 'are')
    """
    if count == 1:
        return one
    if many:
        return many
    if one.endswith("y") and one[-2:-1] not in "aeiou":
        return f"{one[:-1]}ies"
    return f"{one}es" if one.endswith(("s", "x", "ch", "sh")) else f"{one}s"


def format_energy(joules: float) -> str:
    """Write an energy with a unit that fits its size.

    Examples
    --------
    >>> format_energy(220.0), format_energy(7_200.0), format_energy(4.1e9), format_energy(6.3e13)
    ('220 J', '2 Wh', '1,139 kWh', '17,500 MWh')
    """
    units = ("MWh", 3.6e9), ("kWh", 3.6e6), ("Wh", 3.6e3), ("J", 1.0)
    unit, scale = next((pair for pair in units if joules >= 2.0 * pair[1]), units[-1])
    return f"{float(f'{joules / scale:.4g}'):,.10g} {unit}"


def format_parameters(n: float) -> str:
    """Write a number of parameters, of large ones in millions (M) or billions (B).

    Examples
    --------
    >>> format_parameters(405.85e9), format_parameters(124.44e6), format_parameters(12_345)
    ('405.9B', '124.4M', '12,345')
    """
    unit, scale = next((pair for pair in (("B", 1e9), ("M", 1e6)) if n >= pair[1]), ("", 1.0))
    return f"{float(f'{n / scale:.4g}'):,.10g}{unit}" if unit else f"{n:,.0f}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit of an axis whose values are about this long: its name and its length [s].

    Examples
    --------
    >>> time_unit(5e6)
    ('days', 86400.0)
    """
    for name, length, least in (
        ("days", 86_400.0, 2.0),
        ("hours", 3_600.0, 2.0),
        ("min", 60.0, 5.0),
        ("s", 1.0, 1.0),
        ("ms", 1e-3, 1.0),
    ):
        if seconds >= least * length:
            return name, length
    return "us", 1e-6
