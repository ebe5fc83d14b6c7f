"""A configuration of any supported tool as settings: names, values, and the line of each.

The format is found by content. Nothing here knows what a name means.
"""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.common.pipes import held
from prism.jobs.importing.shell import Argument, commands_of
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.othernames import key_of
from prism.jobs.jobspec.yaml import display_path, parse_yaml, read_text

FORMATS = {
    "megatron": "Megatron-LM arguments",
    "nemo": "a NeMo recipe",
    "bridge": "a Megatron Bridge recipe",
    "torchtitan": "a torchtitan configuration",
    "nanotron": "a nanotron configuration",
    "deepspeed": "a DeepSpeed configuration",
    "huggingface": "a model's config.json",
}
"""Formats by the name that ``--from`` takes."""
_DUMPED = re.compile(r"(?:^|[\s\]:])([A-Za-z_]\w*) \.{2,} ?(.*?)\s*$")  # name ....... value
_DUMP_LINES = 8  # from which a text is Megatron's log: its dump has some hundreds
_OTHER_MODELS = {"vision_config", "audio_config", "vision_model", "quantization_config"}
_HUGGING_FACE = {
    "architectures",
    "model_type",
    "num_hidden_layers",
    "n_layer",
    "transformers_version",
}
_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
              "gradient_accumulation_steps"}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What a configuration gives a name: `path` is the name with the sections above it."""

    path: tuple[str, ...]
    value: Any
    line: int
    shown: str
    """As a reader of the file finds it."""


@dataclass(frozen=True)
class Source:
    """A configuration: where it stands, its format, its settings in order, and remarks."""

    name: str
    format: str
    settings: tuple[Setting, ...]
    notes: tuple[tuple[int, str], ...] = ()

    def place(self, line: int) -> str:
        """Name a line."""
        return f"{self.name}:{line}"


def read_source(file: str | Path, format: str | None = None) -> Source:
    """Read a configuration.

    Parameters
    ----------
    file : str or pathlib.Path
        A file; ``-`` is standard input.
    format : str, optional
        One of `FORMATS`; found by content where it is not given.

    Returns
    -------
    Source

    Raises
    ------
    PrismError
        If there is no such file, or its format is not known, or not what it was said to be.
    """
    if str(file) == "-":
        name, text = "stdin", sys.stdin.read()
    else:
        path = Path(file)
        if not held(path).is_file():
            raise PrismError(
                f"{file}: no such file; give a launch script, a log or a configuration"
            )
        name, text = display_path(path), _log_head(path) or read_text(path)
    if not text.strip():
        raise PrismError(f"{name}: is empty, expected {_kinds()}")
    if format not in (None, *FORMATS):
        raise PrismError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    dumped = list(_dump(text))
    if len(dumped) >= _DUMP_LINES:
        return Source(name, _checked("megatron", format, name), tuple(dumped))
    if text.lstrip().startswith("{") or name.endswith((".yaml", ".yml", ".json")):
        return _tree(name, text, format)
    if name.endswith(".toml") or re.search(r"^\[[\w.]+\]\s*$", text, re.M):
        return Source(name, _checked("torchtitan", format, name), tuple(_toml(name, text)))
    if re.search(r"(^|[\s\"'])--[A-Za-z]", text):
        found, notes = _script(name, text)
        return Source(name, _checked("megatron", format, name), found, notes)
    if re.search(r"^[\w-]+:(\s|$)", text, re.M):
        return _tree(name, text, format)
    raise PrismError(f"{name}: no arguments and no configuration found, expected {_kinds()}")


def _kinds() -> str:
    return ", ".join(f"{what} (--from {name})" for name, what in FORMATS.items())


def _checked(found: str, wanted: str | None, name: str) -> str:
    if wanted not in (None, found):
        raise PrismError(f"{name}: holds {FORMATS[found]}, not {FORMATS[wanted]}; "
                         f"leave --from out, or give --from {found}")  # fmt: skip
    return found


def _log_head(path: Path) -> str | None:
    """Give the beginning of a long text, where a log has its arguments."""
    with held(path).open("rb") as file:
        head = file.read(1 << 20)
        if len(head) < 1 << 20 or b"\0" in head:
            return None
    return head.decode("utf-8", "replace")


def scalar(text: str) -> Any:
    """Read a word as Python, YAML or a command line would: a number, a truth value, or text."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("none", "null", "~", ""):
        return None
    if re.fullmatch(r"[-+]?[\d_]*\.?[\d_]+(e[-+]?\d+)?|[-+]?\d+\.", word, re.I):
        number = float(word.replace("_", ""))
        return int(number) if number.is_integer() and "." not in word else number
    if word[0] in "[(":
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError):
            return word
    return word


def _dump(text: str) -> Iterator[Setting]:
    """Give the arguments that Megatron writes at the start of its log, once each."""
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        found = _DUMPED.search(line)
        if found and found[1] not in seen:  # every rank may write them
            seen.add(found[1])
            shown = f"{found[1]} {found[2]}"
            yield Setting((found[1],), scalar(found[2]), number, shown)


def _script(name: str, text: str) -> tuple[tuple[Setting, ...], tuple[tuple[int, str], ...]]:
    """Give the arguments of a script's training command: the one with most that are known."""
    batch, *commands = commands_of(text)
    known = [sum(key_of(flag) is not None for flag, _, _ in command) for command in commands]
    if known and max(known[:-1], default=0) > 1:
        commands, known = commands[:-1], known[:-1]
    if not known or not max(known):
        raise PrismError(
            f"{name}: no training command found, expected arguments such as --num-layers and "
            "--tensor-model-parallel-size; give the script that names them, or the start of its log"
        )
    best = max(range(len(commands)), key=lambda i: (known[i], i))
    notes = []
    for i, command in enumerate(commands):
        if i != best and command and known[i] > max(known) / 2:
            notes.append((command[0][2], "another training command, which is not imported"))
    found = (_setting(argument) for argument in (*batch, *commands[best]))
    return tuple(found), tuple(notes)


def _setting(argument: Argument) -> Setting:
    flag, words, line = argument
    value = True if not words else scalar(words[0]) if len(words) == 1 else " ".join(words)
    shown = f"{flag}={words[0]}" if flag.isupper() else " ".join((f"--{flag}", *words))
    return Setting((flag,), value, line, shown)


def _tree(name: str, text: str, format: str | None) -> Source:
    if text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except ValueError as error:
            if name.endswith(".json"):
                raise PrismError(f"{name}: not valid JSON: {error}; correct it") from None
    layer = parse_yaml(text.replace("\t", " "), name, "give a configuration")
    if layer.problems:
        raise PrismError("\n".join(layer.problems))
    lines = {path: int(place.rsplit(":", 1)[1]) for path, place in layer.places.items()}
    values: Mapping[str, Any] = layer.values
    if set(values) <= {"base", *BLOCKS}:
        known = {"tp", "pp", "dp", "microbatches", "global_batch"} & set(
            values.get("parallelism") or ()
        )
        if known or "base" in values:
            raise PrismError(f"{name}: is a job of prism already; prism estimate {name} takes it")
    found = _tree_format(values, text)
    if format not in (None, found) and not {format, found} <= {"megatron", "nemo", "bridge"}:
        _checked(found, format, name)
    settings = tuple(_leaves(values, (), lines))
    return Source(name, format or found, tuple(_resolved(settings)))


def _tree_format(values: Mapping[str, Any], text: str) -> str:
    if "megatron.bridge" in text or "ConfigContainer" in values or "mixed_precision" in values:
        return "bridge"
    if "trainer" in values or "nemo." in text or "recipe" in values:
        return "nemo"
    names = set(values)
    if names & _HUGGING_FACE and not names & _DEEPSPEED:
        return "huggingface"
    if names & _DEEPSPEED and not {"num_layers", "num-layers"} & names:
        return "deepspeed"
    if "parallelism" in values and "training" in values:
        return "torchtitan"
    if "parallelism" in values and "tokens" in values:
        return "nanotron"
    return "megatron"


def _leaves(
    tree: Mapping[str, Any], above: tuple[str, ...], lines: Mapping[tuple[str, ...], int]
) -> Iterator[Setting]:
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            if key not in _OTHER_MODELS:
                yield from _leaves(value, path, lines)
        else:
            shown = f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
            yield Setting(
                path, scalar(value) if isinstance(value, str) else value, lines[path], shown
            )


_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def _resolved(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Put in what `${...}` refers to: other settings, products of them, or a default."""
    by_path = {setting.path: setting for setting in settings}

    def look(match: re.Match[str], here: tuple[str, ...]) -> str:
        text = match[1]
        name, colon, rest = text.partition(":")
        operands = [part.strip() for part in rest.split(",")]
        if name in ("multiply", "divide") and all(map(_number, operands)):
            a, b = map(float, operands)
            return f"{a * b if name == 'multiply' else a // b:g}"
        if colon and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # of the environment
            return rest
        path = (
            (*here[:-1], *name[1:].split(".")) if name.startswith(".") else tuple(name.split("."))
        )
        ends = [p for p in by_path if p == path or (len(p) < len(path) and p == path[-len(p) :])]
        value = by_path[max(ends, key=len)].value if ends else None
        return "\0" if value is None or isinstance(value, list) else str(value)

    for setting in settings:
        value = setting.value
        for _ in range(8):  # references to references
            if not isinstance(value, str) or not _REFERENCE.search(value):
                break
            new = _REFERENCE.sub(partial(look, here=setting.path), value)
            if "\0" in new:
                break
            value = scalar(new)
        yield Setting(setting.path, value, setting.line, setting.shown)


def _number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _toml(name: str, text: str) -> Iterator[Setting]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PrismError(f"{name}: not valid TOML: {error}; correct it") from None
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.match(r"\s*\[+([^\[\]]+)\]+\s*(#.*)?$", line):
            section = tuple(part.strip().strip("\"'") for part in found[1].split("."))
            lines.setdefault(section, number)
        elif found := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            keys = tuple(part.strip("\"'") for part in found[1].split("."))
            lines.setdefault((*section, *keys), number)

    def line_of(path: tuple[str, ...]) -> int:
        return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 1)

    def leaves(inner: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Setting]:
        for key, value in inner.items():
            path = (*above, key)
            if isinstance(value, Mapping) and value:
                yield from leaves(value, path)
            else:
                shown = f"{'.'.join(path)} = {json.dumps(value, default=str)}"
                yield Setting(path, value, line_of(path), shown)

    yield from leaves(tree, ())
