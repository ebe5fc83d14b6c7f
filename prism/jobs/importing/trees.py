"""Configurations of sections, YAML, JSON or TOML, as settings; what `${...}` refers to put in."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.settings import FORMATS, OTHER_MODELS, Setting, Source, parsed, scalar
from prism.jobs.importing.shell import MOST_TEXT, MOST_WORK
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.yaml import MAX_DEPTH, parse_yaml

_HUGGING_FACE = {
    "architectures",
    "model_type",
    "num_hidden_layers",
    "n_layer",
    "text_config",
    "transformers_version",
}
_TRAINER = {"per_device_train_batch_size", "base_model", "distributed_type", "model_name_or_path",
            "finetuning_type", "dist_config"}  # fmt: skip
_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
              "gradient_accumulation_steps"}  # fmt: skip


def check_format(found: str, wanted: str | None, name: str) -> str:
    """Refuse a configuration of another format than the one that was asked for."""
    if wanted not in (None, found):
        raise PrismError(f"{name}: holds {FORMATS[found]}, not {FORMATS[wanted]}; "
                         f"leave --from out, or give --from {found}")  # fmt: skip
    return found


def read_tree(name: str, text: str, format: str | None) -> Source:
    """Read YAML or JSON."""
    if text.lstrip().startswith("{"):
        if name.endswith(".json"):
            parsed(json.loads, text, name, "JSON")
    layer = parse_yaml(text.replace("\t", " "), name, "give a configuration")
    if layer.problems:
        raise PrismError(*layer.problems)
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
        check_format(found, format, name)
    settings = tuple(_leaves(values, (), lines))
    complete = "ConfigContainer" in text or "model_spec" in values
    source = Source(name, format or found, settings, complete=complete)
    return replace(source, settings=tuple(resolved(settings, source.place)))


def _tree_format(values: Mapping[str, Any], text: str) -> str:
    bridge = "mixed_precision" in values and {"model", "train", "ddp"} & set(values)
    if "megatron.bridge" in text or "ConfigContainer" in values or bridge:
        return "bridge"
    if re.search(r"^\s+framework: torchtitan\b", text, re.M):
        return "torchtitan"
    if _TRAINER & set(values):
        return "trainer"
    if "trainer" in values or "nemo." in text or "recipe" in values:
        return "nemo"
    names = set(values)
    if (names & _HUGGING_FACE or {"dim", "n_layers"} <= names) and not names & _DEEPSPEED:
        return "huggingface"
    if names & _DEEPSPEED and not {"num_layers", "num-layers"} & names:
        return "deepspeed"
    if "parallelism" in values and ("training" in values or "model_spec" in values):
        return "torchtitan"
    if "parallelism" in values and "tokens" in values:
        return "nanotron"
    return "megatron"


def _leaves(
    tree: Mapping[str, Any], above: tuple[str, ...], lines: Mapping[tuple[str, ...], int]
) -> Iterator[Setting]:
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value and not OTHER_MODELS.fullmatch(str(key)):
            yield from _leaves(value, path, lines)
        else:
            shown = f"{key}: {value if isinstance(value, str) else json.dumps(value, default=str)}"
            yield Setting(
                path, scalar(value) if isinstance(value, str) else value, lines[path], shown
            )


_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolved(settings: Sequence[Setting], place: Callable[[int], str]) -> Iterator[Setting]:
    """Put in what `${...}` refers to: other settings, products of them, or a default."""
    by_path = {setting.path: setting for setting in settings}

    def look(match: re.Match[str], here: tuple[str, ...]) -> str:
        text = match[1]
        name, colon, rest = text.partition(":")
        operands = [part.strip() for part in rest.split(",")]
        if name in ("multiply", "divide") and len(operands) == 2 and all(map(_number, operands)):
            a, b = map(float, operands)
            if name == "divide" and not b:
                return "\0"
            return f"{a * b if name == 'multiply' else a // b:g}"
        if colon and re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # of the environment
            return rest
        path = (
            (*here[:-1], *name[1:].split(".")) if name.startswith(".") else tuple(name.split("."))
        )
        ends = (path[k:] for k in range(len(path)) if len(path) <= MAX_DEPTH)
        value = next((by_path[end].value for end in ends if end in by_path), None)
        return "\0" if value is None or isinstance(value, list) else str(value)

    room = MOST_WORK
    for setting in settings:
        value = setting.value
        for _ in range(8):  # references to references
            if not isinstance(value, str) or not _REFERENCE.search(value):
                break
            new = _REFERENCE.sub(partial(look, here=setting.path), value)
            if "\0" in new:
                break
            value, room = scalar(new), room - len(new)
            if len(new) > MOST_TEXT or room < 0:
                raise PrismError(
                    f"{place(setting.line)}: {'.'.join(setting.path)[:60]}: what it refers to "
                    f"grows beyond {MOST_TEXT:,} characters; write the value out"
                )
        yield Setting(setting.path, value, setting.line, setting.shown)


def _number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def read_toml(name: str, text: str) -> Iterator[Setting]:
    """Read TOML."""
    tree = parsed(tomllib.loads, text, name, "TOML")
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
            if len(path) > MAX_DEPTH:
                raise PrismError(f"{name}:{line_of(path)}: more than {MAX_DEPTH} levels of tables")
            if isinstance(value, Mapping) and value:
                yield from leaves(value, path)
            else:
                shown = f"{'.'.join(path)} = {json.dumps(value, default=str)}"
                yield Setting(path, value, line_of(path), shown)

    yield from leaves(tree, ())
