"""What a column's name says of step times: a duration and its unit, a rate, a statistic, a clock.

One table of names for every reader of tables, exports and event files. Names that tools are known
to write win over words; of words the last says the unit.

References
----------
.. [1] Megatron-LM, Megatron-DeepSpeed, Megatron Bridge, Primus: iteration-time
.. [2] torchtitan, NeMo, NeMo RL, MaxText, levanter, nanotron, verl, Ray Train, T5X, DeepSpeed, TRL,
   Composer, Lightning, HF Trainer, ms-swift, fairseq: the names their loggers write
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from prism.common.arrays import Array
from prism.common.errors import PrismError

_SHOWN = 4  # columns of which a message says why they are no step time

UNITS = {  # of durations, and the words for them; `min` is none, since it is a minimum too
    "s": ("s", "sec", "secs", "second", "seconds"), "ms": ("ms", "msec", "msecs", "millis"),
    "us": ("us", "usec"), "ns": ("ns",), "min": ("mins", "minute", "minutes"),
    "h": ("h", "hr", "hrs", "hour", "hours"),
}  # fmt: skip

PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9, "min": 1.0 / 60.0, "h": 1.0 / 3600.0}
"""How many of a unit are one second."""

LONGEST_S = 230.0
"""Longest published training step (BigScience's throughput tables): where a name has no unit, more
seconds than this are rather milliseconds."""

_UNIT = {word: unit for unit, words in UNITS.items() for word in words}
_UNITS_SHOWN = ", ".join(word for words in UNITS.values() for word in words if word != "h")

Kind = Literal["duration", "mean", "rate", "statistic", "clock", "none"]


class Meaning(NamedTuple):
    """What one name says."""

    kind: Kind
    unit: str = ""  # of a duration, or of the time a rate is per; "" where the name has none
    why: str = ""
    of: str = ""  # "step" for a duration of a step; what a rate counts
    is_mean: bool = False  # over the steps since the value before
    known: bool = False  # by a tool's own name

    @property
    def shown(self) -> str:
        """The unit as a reader writes it."""
        if self.kind == "rate":
            return f"{self.of}/{self.unit}"
        return self.unit or "s, no unit in its name"


def _known(tool: str, unit: str, is_mean: bool = False, kind: Kind = "duration") -> Meaning:
    why = f"as {tool} writes step times" if kind == "duration" else tool
    return Meaning(kind, unit, why, "step" if kind == "duration" else "", is_mean, True)


_KNOWN = {
    "iteration-time": _known("Megatron", "s", True),
    "elapsed time per iteration (ms)": _known("Megatron", "ms", True),
    "elapsed time per iteration (s)": _known("Megatron", "s", True),
    "time_metrics/end_to_end(s)": _known("torchtitan", "s", True),
    "train_step_timing in s": _known("NeMo", "s"),
    "timing/train/total_step_time": _known("NeMo RL", "s"),
    "perf/step_time_seconds": _known("MaxText", "s"),
    "perf/iteration_time_ms": _known("Megatron Bridge", "ms"),
    "throughput/duration": _known("levanter", "s"),
    "elapsed_time_per_iteration_ms": _known("nanotron", "ms", True),
    "perf/time_per_step": _known("verl", "s"),
    "timing_s/step": _known("verl", "s"),
    "time_this_iter_s": _known("Ray", "s", True),
    "train_speed(s/it)": _known("a mean since the start (ms-swift)", "s", kind="none"),
    "train_speed(iter/s)": _known("a mean since the start (ms-swift)", "", kind="none"),
    "elapsed_time_ms_step": _known("the optimizer's time (DeepSpeed)", "ms", kind="none"),
    "timing/seconds": _known("the time of a log interval (T5X)", "s", kind="none"),
    "iteration-time vs samples": _known("by samples, not steps (Megatron)", "s", kind="none"),
}
"""Names by which tools write; folders of a tracker may come before them."""

_STEPS = set("step steps iter iters iteration iterations it its update updates".split())
_COUNTS = {
    **dict.fromkeys(_STEPS, "steps"), **dict.fromkeys(("batch", "batches"), "batches"),
    **dict.fromkeys("sample samples example examples seq seqs sequence sequences image images img "
                    "imgs".split(), "samples"),
    **dict.fromkeys("token tokens tok toks word words".split(), "tokens"),
}  # fmt: skip
_PLURAL = {word for word in _COUNTS if word.endswith("s")} | {"it", "tok"}
"""What is counted: before a unit alone, such as tokens_s, these make a rate."""
_SHORT = {"tps": "tokens", "tgs": "tokens", "wps": "tokens", "ups": "steps", "sps": "samples",
          "ips": "items", "bps": "batches", "fps": "frames"}  # fmt: skip
_TIMES = set("time times timing duration latency period delta wall walltime interval".split())
_STATISTICS = set(
    "min max minimum maximum std stdev stddev var variance median med percentile low high lo hi p "
    "q sum best worst slowest fastest".split()
)
_MEANS = set("mean avg average ave ema smoothed".split())
_DEVICES = set("gpu gpus device devices core chip node rank worker replica host tgs".split())
_CLOCKS = set("timestamp datetime date runtime uptime walltime wall clock since epochtime".split())
_ENDS = set("start begin end stop timestamp ts finish".split())
_NOT_TIMES = {
    word: why
    for why, words in {
        "time that is left": "eta remaining left",
        "a total time": "elapsed total cumulative cumul cum ttt",
        "memory": "memory mem vram gb gib mb mib kb bytes",
        "flop": "tflops tflop flops flop gflops pflops mfu hfu",
        "bandwidth": "bandwidth bw busbw algbw gbps",
        "no time of a step": "loss lr norm temp temperature power util epoch env percent",
    }.items()
    for word in words.split()
}
_PARTS = set(
    "forward fwd backward bwd data dataloader dataloading loading load eval evaluation val valid "
    "validation test checkpoint ckpt save optimizer optim allreduce allgather reducescatter reduce "
    "gather scatter comm communication nccl wait compile hook gen generation rollout init startup "
    "bubble inference microbatch layer kernel gemm attention queue transfer h2d d2h logging ref "
    "adv reward warmup compute idle io gc cpu host energy dataload exposed stall overhead "
    "sync".split()
)
"""What is timed of a step, or between steps."""


def meaning(name: str) -> Meaning:
    """Say what a name means."""
    lower = f"/{name.strip().lower()}".replace("|", "/")
    for known, found in _KNOWN.items():
        if lower.endswith(f"/{known}"):
            return found
    words = _words(name)
    return _rate(words) or _time(words)


def _words(name: str) -> list[str]:
    """Split a name into words; a slash between a count and a unit, or the reverse, is `per`."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name).lower()
    apart = re.sub(r"\b(step|iter|iteration)(?=time)", r"\1_", apart.replace("_", " "))
    parts = re.findall(r"[a-z]+|\d+|/", apart)
    out: list[str] = []
    for i, word in enumerate(parts):
        if word != "/":
            out.append(word)
        elif 0 < i < len(parts) - 1:
            before, after = parts[i - 1], parts[i + 1]
            counted = before in _COUNTS or _is_counted(before)
            a_rate = counted and after in (*_UNIT, "min", "day", *_DEVICES)
            last = set(parts[i + 2 :]) <= _STATISTICS | _MEANS
            in_turn = out and before in _UNIT and after in _COUNTS and last
            out += ["per"] * bool(a_rate or in_turn)
    return [word for word in out if not word.isdigit()]


def _time(words: list[str]) -> Meaning:
    """Say what the words of a name mean that is no rate."""
    bare = [word for word in words if word not in _STATISTICS | _MEANS]
    kind: Kind = "duration" if bare == words else "mean"
    kind = "statistic" if _STATISTICS & set(words) else kind
    there, unit = set(bare), _UNIT.get((bare or [""])[-1], "")
    if bare == ["h"] or (unit == "h" and bare[-2:-1] == ["gpu"]):
        return Meaning("none")  # a height, hours of GPUs
    at, of_step = bare.index("per") if "per" in bare[:-1] else -1, bool(there & {*_STEPS, "batch"})
    if at >= 0:
        of_step = bare[at + 1] in (*_STEPS, "batch")
        unit = unit or next((_UNIT[word] for word in bare[:at] if word in _UNIT), "")
        if not of_step:
            return Meaning("none", unit, f"per {bare[at + 1]}, not per step")
    if there & _ENDS or (there & _CLOCKS and not of_step):
        return Meaning("clock", unit, "a time of day, or since the start")
    why = next((_NOT_TIMES[word] for word in bare if word in _NOT_TIMES), "")
    why = why or next((f"the time of {word}, not of a step" for word in bare if word in _PARTS), "")
    if at < 0 and why:
        return Meaning("none", unit, why)
    if kind == "statistic":
        return Meaning(kind, unit, "a statistic, not a value per step", "step" * of_step)
    if not unit and not (of_step and there & _TIMES):
        return Meaning("none", "")  # of a count, a loss, a height
    return Meaning(kind, unit, "", "step" * of_step, kind == "mean")


def _rate(words: list[str]) -> Meaning | None:
    """Tell a count per time; None where it is none."""
    pairs = list(itertools.pairwise(words))
    of_time = [i for i, (a, b) in enumerate(pairs)
               if a == "per" and (b in _UNIT or b in ("min", "day"))]  # fmt: skip
    short = [word for word in words if word in _SHORT]
    last = [a for a, b in pairs if _UNIT.get(b) == "s" and _is_counted(a)]
    if of_time:
        at = of_time[0]
        unit, of = words[at + 1], words[at - 1] if at else ""
    elif short or last:
        unit, of = "s", (short or last)[0]
    else:
        return None
    unit = _UNIT.get(unit, unit)
    what = _COUNTS.get(of) or _SHORT.get(of) or of or "something"
    others = set(words) - {of}
    if (_PARTS | set(_NOT_TIMES)) & others - {"total"} or of in _NOT_TIMES:
        what = f"other {what}"
    elif _DEVICES & set(words):
        what = f"{what} of one device"
    if (_STATISTICS & set(words)) - ({"min"} if unit == "min" else set()):
        return Meaning("statistic", "", "a statistic of a rate", what)
    return Meaning("rate", unit, f"a rate of {what}", what, True)


def _is_counted(word: str) -> bool:
    """Whether a word before a unit alone makes a rate: tokens_s, frames_s, gb_s; not step_s."""
    plural = len(word) > 3 and re.fullmatch(r".*[^su]s", word) is not None and word not in _TIMES
    return word in _PLURAL or plural or _NOT_TIMES.get(word) in ("memory", "flop", "bandwidth")


@dataclass(frozen=True)
class Taken:
    """The column that is read as step times."""

    column: str
    unit: str  # as shown: s, ms, or steps/s of a rate
    why: str
    per_second: float = 1.0  # of a duration: values of one second; of a rate: what makes it that
    of: str = ""  # what a rate counts; "" for a duration
    is_mean: bool = False  # whether a value is over the steps since the one before
    assumed: bool = False  # whether nothing but custom says the unit
    unsaid: bool = False  # whether by its name it may be no time of a step but a clock

    def seconds(self, values: Array, count: Array | float = 1.0) -> Array:
        """Turn values into step times [s]; `count` is what a rate counts, of a step."""
        if not self.of:
            return np.asarray(values / self.per_second)
        with np.errstate(divide="ignore"):
            return np.asarray(count / (values * self.per_second))

    def check_size(self, seconds: Array, source: str) -> None:
        """Refuse seconds that nothing but custom says, where they are rather milliseconds."""
        known = seconds[np.isfinite(seconds)]
        if self.assumed and known.size and float(np.median(known)) > LONGEST_S:
            raise PrismError(
                f"{source}: the name of column {self.column!r} has no unit, and as seconds a step "
                f"takes {float(np.median(known)):.4g} s, longer than any published "
                f"({LONGEST_S:g} s); say which it is with --unit ms or --unit s"
            )


def unit_per_second(column: str, source: str) -> float:
    """Say how many of the unit in a column's name are one second; raises PrismError without one."""
    found = meaning(column)
    if found.kind == "rate":
        raise PrismError(f"{source}: {_why_no_rate(column, found)}")
    if not found.unit:
        raise PrismError(
            f"{source}: the name of column {column!r} has no unit; rename it so that it ends with "
            f"one after an underscore, such as {column}_s or {column}_ms, or to the unit alone: "
            f"{_UNITS_SHOWN}"
        )
    return PER_SECOND[found.unit]


def take(
    source: str, names: Sequence[str], column: str | None, unit: str | None,
    per_step: Collection[str], beside: Sequence[str] = (), groups: str = "",
) -> Taken:  # fmt: skip
    """Take the column of step times that a user names, whatever it is, else the one of `names`.

    `per_step` are the counts of a step that a caller knows, columns `beside` may be such too;
    `groups` are rows to be chosen among.
    """
    known = {"steps", *per_step}
    known |= {of for of in ("samples", "tokens") if any(counts_among(beside, of))}
    told = f"--column {column}, " * (column is not None)
    column = _find(source, names, known, groups) if column is None else column
    found = meaning(column)
    if unit is not None:
        word = unit if unit in PER_SECOND else _UNIT.get(unit.lower(), "")
        if not word:
            raise PrismError(f"--unit {unit}: expected one of {', '.join(PER_SECOND)}")
        why = f"by --unit {unit}"
        return Taken(column, word, why, PER_SECOND[word], is_mean=found.is_mean)
    if found.kind == "rate":
        if found.of not in known:
            raise PrismError(f"{source}: {_why_no_rate(column, found)}")
        over = "1" if found.of == "steps" else f"{found.of} of a step"
        scale = PER_SECOND.get(found.unit, 1.0 / 86_400.0)
        return Taken(column, found.shown, f"{told}{over} over {found.why}", scale, found.of, True)
    if found.kind == "clock":
        raise PrismError(
            f"{source}: column {column!r} is {found.why}, not a duration; --unit says otherwise"
        )
    if not found.unit and found.of != "step":
        raise PrismError(
            f"{source}: the name of column {column!r} has no unit; say which with --unit "
            f"({', '.join(PER_SECOND)}), or rename it so that it ends with one after an "
            f"underscore, such as {column}_s or {column}_ms"
        )
    why = "the unit in its name" if found.unit else "no unit in its name, taken as seconds"
    why = found.why if found.known and found.kind == "duration" else why
    why = told + "a mean, " * (found.kind == "mean") + why
    unit = found.unit or "s"
    return Taken(
        column, unit, why, PER_SECOND[unit], "", found.is_mean, not found.unit,
        not found.of and not told,
    )  # fmt: skip


def _find(source: str, names: Sequence[str], known: Collection[str], groups: str) -> str:
    """Find the column: a tool's own name wins, then durations, means, and rates of what counts."""
    found = {name: meaning(name) for name in names}
    tiers = (
        [n for n, m in found.items() if m.kind == "duration" and m.known],
        [n for n, m in found.items() if m.kind == "duration"],
        [n for n, m in found.items() if m.kind == "mean" and m.of == "step"],
        [n for n, m in found.items() if m.kind == "rate" and m.of in known],
    )
    best = next((tier for tier in tiers if tier), [])
    if len(best) == 1:
        return best[0]
    if best:
        each = [f"{name} [{found[name].shown}]" for name in best]
        raise several_columns(source, "step time", each, groups)
    near = [_why_no_rate(n, m) for n, m in found.items() if m.kind == "rate"]
    near += [f"{n} is {m.why}" for n, m in found.items() if m.why and m.kind != "rate"]
    listing = ", ".join(names)
    raise PrismError(
        f"{source}: no duration of a step among the columns "
        f"{listing if len(listing) <= 400 else listing[:400] + ' ...'}; expected one whose name "
        "ends with its unit, such as step_s or step_ms, or is one, such as seconds; or name it: "
        f"--column NAME --unit s" + "".join(f"; {x}" for x in near[:_SHOWN])
    )


def several_columns(source: str, what: str, found: Sequence[str], groups: str) -> PrismError:
    """Error for columns of which each may be meant; `groups` are to be chosen among too."""
    return PrismError(
        f"{source}: several columns may be the {what}: {', '.join(found)}; choose one with "
        f"--column NAME" + f", and rows with --where COLUMN=VALUE ({groups})" * bool(groups)
    )


def _why_no_rate(column: str, found: Meaning) -> str:
    """Say why a rate gives no step time, and what would."""
    if found.of == "steps":
        return f"column {column!r} is a rate, not a time"
    way = {
        "samples": "divide a step's samples by it as a column step_s, or add global_batch_size",
        "tokens": "divide a step's tokens by it as a column step_s, or add tokens_per_step",
    }.get(found.of, "expected a column step_s")
    return f"{column} is {found.why or 'a rate'}, and how many a step has is not known; {way}"


# what counts the work of a step, in a table's own columns
_PER_STEP = {
    "samples": ("global_batch_size", "global_batch", "gbs"),
    "tokens": ("tokens_per_step", "tokens_per_batch", "tokens_per_iteration", "total_num_tokens",
               "global_batch_tokens"),
}  # fmt: skip
_LENGTH = ("seq_len", "sequence_length", "seq_length", "max_sequence_length", "max_seq_len")
_SO_FAR = {
    "samples": ("consumed_samples", "consumed_train_samples", "samples_seen"),
    "tokens": ("consumed_tokens", "consumed_train_tokens", "num_input_tokens_seen", "total_tokens",
               "tokens_seen", "n_tokens"),
}  # fmt: skip
# what numbers the steps, a tool's own before a tracker's
_STEP_COLUMNS = (
    "step", "trainer/global_step", "train/global_step", "global_step", "iteration",
    "training_iteration", "current_steps", "Step", "_step", "iter",
)  # fmt: skip


def step_column(names: Collection[str]) -> str | None:
    """Find the column that numbers the steps; None where there is none."""
    return next((name for name in _STEP_COLUMNS if name in names), None)


def counts_among(names: Sequence[str], of: str) -> tuple[list[str], str | None]:
    """Columns whose product is the samples or tokens of a step, else one that adds them up."""

    def find(wanted: Sequence[str]) -> str | None:
        plain = {re.sub(r"[\s-]", "_", name.lower()).rpartition("/")[2]: name for name in names}
        return next((plain[word] for word in wanted if word in plain), None)

    own = find(_PER_STEP.get(of, ()))
    if own is None and of == "tokens":
        batch, length = find(_PER_STEP["samples"]), find(_LENGTH)
        if batch is not None and length is not None:
            return [batch, length], None
    return ([own], None) if own is not None else ([], find(_SO_FAR.get(of, ())))
