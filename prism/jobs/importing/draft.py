"""A job in the making: what a configuration's settings became, what was assumed, what is left."""

import re
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from prism.common.errors import PrismError
from prism.jobs.dimensions import DIMENSIONS
from prism.jobs.importing.settings import Setting, Source
from prism.jobs.jobspec.othernames import RANKS, key_of, plain, value_of
from prism.jobs.jobspec.presets import SIZES

OVERRIDING = "mixed_precision"
"""Section whose settings Megatron Bridge puts over the model's of the same name."""
BESIDE = frozenset(
    "rollout ref critic reward_model reward callbacks algorithms loggers evaluators eval_loader "
    "generation_config optimizer_config_override_provider".split()
)
"""Sections of what runs beside the training: other models, inference, what watches it."""
NUMBERS = frozenset(
    [f"model.{key}" for key in SIZES]
    + [f"parallelism.{key}" for key in (*DIMENSIONS, "shard_size")]
    + [f"parallelism.{key}" for key in "microbatch_size microbatches global_batch".split()]
    + ["cluster.nodes", "run.steps"]
)
"""Keys that take a whole number."""
_TEXTS = ("tokenizertype",)  # names of such a key that take a text
OFF = (False, 0, None, "none", "None", "off", "disabled", "")
"""Values of a setting that is not in use."""


class Given(NamedTuple):
    """A key of the job that the configuration gives."""

    key: str
    value: Any
    shown: str
    line: int


class Assumed(NamedTuple):
    """A key of the job that it does not give, or not so; why it has its value."""

    key: str
    value: Any
    why: str
    line: int | None = None


@dataclass
class Draft:
    """Values of a job by dotted key, each with where it comes from.

    `over` are keys that the user gives: the configuration may contradict itself on them.
    """

    source: Source
    over: frozenset[str] = frozenset()
    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Given] = field(default_factory=dict)
    assumed: dict[str, Assumed] = field(default_factory=dict)
    unmodelled: list[tuple[Setting, str]] = field(default_factory=list)
    used: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.by_name: dict[str, list[Setting]] = {}
        for setting in self.source.settings:
            if not BESIDE.isdisjoint(setting.path[:-1]):
                continue
            for start in range(len(setting.path)):
                name = plain("".join(setting.path[start:]))
                self.by_name.setdefault(name, []).append(setting)

    def use(self, *names: str) -> None:
        """Count settings of these names as understood."""
        for name in names:
            self.used |= {setting.path for setting in self.by_name.get(plain(name), [])}

    def use_key(self, *keys: str) -> None:
        """Count settings of all names of these keys as understood: they have no effect here."""
        for key in keys:
            self.use(
                key.rpartition(".")[2], *(name for rank in RANKS.get(key, ()) for name in rank)
            )

    def settings(self, *names: str) -> list[Setting]:
        """Give the settings of these names that have a value, those that go before others last."""
        self.use(*names)
        found = [s for name in names for s in self.by_name.get(plain(name), [])]
        usable = [s for s in found if s.value is not None and not unresolved(s.value)]
        return sorted(map(_single, usable), key=lambda s: OVERRIDING in s.path)

    def find(self, *names: str) -> Setting | None:
        """Give the last setting of the first of these names that has a value."""
        self.use(*names)
        return next((found[-1] for name in names if (found := self.settings(name))), None)

    def value(self, *names: str) -> Any:
        """Give its value, None without one."""
        found = self.find(*names)
        return None if found is None else found.value

    def whole(self, *names: str) -> int | None:
        """Give its value where that is a whole number."""
        value = self.value(*names)
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        return int(value) if whole and float(value).is_integer() else None

    def count(self, *names: str) -> Setting | None:
        """Give the last setting of these names, a whole number; raises as `size` does."""
        found = self.find(*names)
        if found is None or type(found.value) is int:
            return found
        return None if found.value in OFF else self.size(*names)

    def size(self, *names: str, least: int = 1) -> Setting | None:
        """Give the last setting of these names, a whole number; -1 and auto leave it open."""
        found = self.find(*names)
        if found is None or found.value in ("auto", -1):
            return None
        value = found.value
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        if not whole or value < least or not float(value).is_integer():
            self.refuse(found, f"expected a whole number, at least {least}")
        return replace(found, value=int(value))

    def check_numbers(self) -> None:
        """Refuse what cannot be a number where a key takes one that the user does not give."""
        wrong = []
        for setting in self.source.settings:
            *above, name = setting.path
            if not BESIDE.isdisjoint(above):
                continue
            inside = bool(above) and _takes_number(above[-1], self.over)
            if inside or (_takes_number(name, self.over) and not _may_be_number(setting.value)):
                place, shown = self.source.place(setting.line), setting.shown
                shown = f"{above[-1]}: {{{shown}}}" if inside else shown
                wrong.append(f"{place}: {shown}: expected a whole number, at least 0; correct it")
        if wrong:
            raise PrismError(*wrong)

    def refuse(self, setting: Setting, expected: str) -> NoReturn:
        """Say which setting is wrong, where, and what was expected."""
        place = self.source.place(setting.line)
        raise PrismError(f"{place}: {setting.shown}: {expected}; correct it")

    def has(self, name: str) -> bool:
        """Tell whether a name is given a value, if only one that the environment knows."""
        self.use(name)
        return any(setting.value is not None for setting in self.by_name.get(plain(name), []))

    def is_set(self, name: str) -> bool | None:
        """Tell whether a flag is set; None where it is not there."""
        value = self.value(name)
        return None if value is None else value not in (False, 0, "0", "no", "off", "none")

    def of_key(self, key: str) -> Setting | None:
        """Give the setting of any name that a key of the job has in other frameworks.

        Two names of one rank that say different things are an error: neither is known to be right.
        """
        own, (first, *ranks) = key.rsplit(".", 1)[1], RANKS.get(key, [[]])
        self.use_key(key)
        for rank in ([own, *first], *ranks):
            found = self.settings(*rank)
            if not found:
                continue
            last = found[-1]
            strict = key.startswith(("model.", "parallelism.")) and rank[0] == own
            for other in found if strict else ():
                if (
                    type(other.value) is type(last.value) is int
                    and other.value != last.value
                    and other.path != last.path
                    and not ({OVERRIDING} & {*other.path, *last.path} or key in self.over)
                ):
                    raise PrismError(
                        f"{self.source.place(last.line)}: {last.shown}: but "
                        f"{'.'.join(other.path)} at {self.source.place(other.line)} is "
                        f"{other.value}: two values of {key}; say which: --set {key}={last.value}"
                    )
            return last
        return None

    def give(self, key: str, value: Any, *settings: Setting | None) -> None:
        """Take a value that settings say, unless the user gives the key."""
        if key in self.over:
            return
        known = [s for s in settings if s is not None]
        shown = ", ".join(dict.fromkeys(s.shown for s in known))
        self.values[key] = value
        self.given[key] = Given(key, value, shown, known[0].line)

    def take(self, key: str, *names: str) -> bool:
        """Take a setting's value as it is; false where there is none."""
        found = self.find(*names) if names else self.of_key(key)
        if found is None:
            return False
        self.give(key, found.value, found)
        return True

    def assume(self, key: str, value: Any, why: str, setting: Setting | None = None) -> None:
        """Take a value that the configuration does not say, unless the user gives the key."""
        if key in self.over:
            return
        self.values[key] = value
        self.assumed[key] = Assumed(key, value, why, setting.line if setting else None)

    def leave(self, setting: Setting | None, why: str) -> None:
        """Note a setting that changes the step time and is not in the job."""
        if setting is not None and setting not in (left for left, _ in self.unmodelled):
            self.unmodelled.append((setting, why))

    def choice(self, key: str, value: Any, choices: tuple[str, ...]) -> str | None:
        """Give the choice of a key that a framework's word stands for."""
        word = str(value)
        return word if word in choices else value_of(key, word, choices)

    def open_settings(self) -> list[Setting]:
        """Give settings with names of known keys whose values only the environment knows."""
        return [s for s in self.source.settings if unresolved(s.value) and key_of(s.path[-1])]


def _takes_number(name: str, over: frozenset[str]) -> bool:
    key = key_of(name)
    return key in NUMBERS and key not in over and plain(name) not in _TEXTS


def _may_be_number(value: Any) -> bool:
    """Tell a whole number, one a layer, or what leaves it open."""
    if isinstance(value, list):
        return bool(value) and all(type(number) is int for number in value)
    if type(value) is float:
        return value >= 0 and value.is_integer()
    open_ = value in (-1, None, "auto", "none", "off", "disabled") or unresolved(value)
    return open_ or (type(value) is int and value >= 0)


def _single(setting: Setting) -> Setting:
    """Give a number that a list has for every layer as that number."""
    v = setting.value
    if isinstance(v, list) and len(v) > 2 and type(v[0]) is int and v == v[:1] * len(v):
        return replace(setting, value=v[0])
    return setting


def unresolved(value: Any) -> bool:
    """Tell a value that holds a variable."""
    return isinstance(value, str) and re.search(r"\$[\w{(]", value) is not None
