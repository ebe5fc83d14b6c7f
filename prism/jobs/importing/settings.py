"""A configuration of any supported tool as settings: names, values, and the line of each.

The format is found by content. Nothing here knows what a name means.
"""

import ast
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.common.files import read_head
from prism.jobs.importing.inlogs import DEEPSPEED_LINE, DUMP_LINES, arguments_in, tree_in
from prism.jobs.importing.shell import FILE_LINES, MOST_TEXT, MOST_WORK, Argument, commands_of
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.othernames import understood
from prism.jobs.jobspec.yaml import MAX_BYTES, MAX_DEPTH, display_path, parse_yaml, read_text

_LONGEST_NUMBER = 40  # characters
_LONGEST_NAME = 250
_MOST_SAID = 4  # scripts that are not there
FORMATS = {
    "megatron": "Megatron-LM arguments",
    "nemo": "a NeMo recipe",
    "bridge": "a Megatron Bridge recipe",
    "torchtitan": "a torchtitan configuration",
    "nanotron": "a nanotron configuration",
    "deepspeed": "a DeepSpeed configuration",
    "huggingface": "a model's config.json",
    "trainer": "a configuration of transformers' Trainer or accelerate",
}
"""Formats by the name that ``--from`` takes."""
_PROGRAM = (
    "is a Python program, of which nothing is run; give what it writes: torchtitan's "
    "--debug.save_config_file FILE, Megatron Bridge's run_config.yaml, the arguments at the start "
    "of Megatron-LM's log, or the model's config.json"
)
OTHER_MODELS = re.compile(
    r"(vision|audio|image|video|speech|visual|vit|encoder|projector|talker|code2wav|draft|dit|"
    r"qformer|vq_|perceiver|adapter_config|high_res|per_layer_config|"
    r"decoder_config|depth_decoder|mm_)\w*"
)
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
    """A configuration: where it stands, its format, its settings in order, and remarks.

    Lines of the k-th file that it names count from k * `FILE_LINES`. A `complete` one has all
    settings, those that nobody gave among them.
    """

    name: str
    format: str
    settings: tuple[Setting, ...]
    notes: tuple[tuple[int, str], ...] = ()
    complete: bool = False
    files: tuple[str, ...] = ()

    def place(self, line: int) -> str:
        """Name a line."""
        number, line = divmod(line, FILE_LINES)
        return f"{(self.name, *self.files)[number]}:{line}"

    def where(self, line: int | None) -> dict[str, Any]:
        """Give a line's number, and its file where that is not the first."""
        number, line = divmod(line, FILE_LINES) if line is not None else (0, None)
        return {"line": line, **({"file": self.files[number - 1]} if number else {})}


def said_by_name(source: Source) -> str:
    """Give the parameters that the name of a model or of its file says, such as 80b-a3b."""
    names = [s.value for s in source.settings if s.path[-1] in ("_name_or_path", "hf_model_id")]
    for name in (*names, Path(source.name).name):
        found = re.search(
            r"(?<![a-z0-9.])\d+(\.\d+)?b([-_]a\d+(\.\d+)?b)?(?![a-z])", str(name), re.I
        )
        if found:
            return found[0]
    return ""


def read_sources(files: Sequence[str | Path], format: str | None = None) -> Source:
    """Read the files of one configuration, such as a DeepSpeed JSON and a model's config.json.

    A model's config.json comes first, so that what the others say goes before it; the format is
    that of the first file which is none.

    Raises
    ------
    PrismError
        If one of them cannot be read, or two are of kinds that do not go together.
    """
    if len(files) == 1:
        return read_source(files[0], format)
    found = [read_source(file) for file in files]
    others = [source for source in found if source.format != "huggingface"]
    if len(others) != 1 or len(found) != 2:
        kinds = ", ".join(f"{source.name}: {FORMATS[source.format]}" for source in found)
        raise PrismError(
            f"{kinds}: expected one of them and a model's config.json; import one at a time"
        )
    model = next(source for source in found if source.format == "huggingface")
    first = others[0]
    offset = (1 + len(first.files)) * FILE_LINES
    moved = (replace(s, line=s.line + offset) for s in model.settings)
    return replace(
        first, settings=(*moved, *first.settings), files=(*first.files, model.name, *model.files)
    )


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
        name, data = "stdin", sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        name = display_path(Path(file))
        data = read_head(Path(file), name, MAX_BYTES + 1)
    log, text = _text(data, name)
    if not text.strip():
        raise PrismError(f"{name}: is empty, expected {_kinds()}")
    if format not in (None, *FORMATS):
        raise PrismError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if (inside := tree_in(text)) is not None:
        first, text = inside
        return replace(_tree(name, "\n" * first + text, format), complete=True)
    dumped = list(arguments_in(text))
    if len(dumped) >= DUMP_LINES:
        kind = "deepspeed" if DEEPSPEED_LINE.search(text) else "megatron"
        settings = tuple(
            Setting((found,), scalar(value), line, f"{found} {value}")
            for found, value, line in dumped
        )
        return Source(name, _checked(kind, format, name), settings, complete=True)
    if name.endswith(".py"):
        raise PrismError(f"{name}: {_PROGRAM}")
    if log:
        raise PrismError(
            f"{name}: more than {MAX_BYTES >> 20} MiB without the arguments of a log in the first, "
            "expected a script or a configuration; give that, or the start of the log"
        )
    folder = None if str(file) == "-" else Path(file).parent
    if text.lstrip().startswith("{") or name.endswith((".yaml", ".yml", ".json")):
        return _with_files(_tree(name, text, format), folder)
    if name.endswith(".toml") or re.search(r"^\[[\w.]+\]\s*$", text, re.M):
        return Source(name, _checked("torchtitan", format, name), tuple(_toml(name, text)))
    if re.search(
        r"(^|[\s\"'])--[A-Za-z]|^\s*(source|\.|bash|sh) \S|\.sh\b|\s\w+(\.\w+)+=", text, re.M
    ):
        return _script(name, text, folder, format)
    if re.search(r"^[\w-]+:(\s|$)", text, re.M):
        return _tree(name, text, format)
    if re.search(r"^(from [\w.]+ )?import \w", text, re.M):
        raise PrismError(f"{name}: {_PROGRAM}")
    raise PrismError(f"{name}: no arguments and no configuration found, expected {_kinds()}")


def _kinds() -> str:
    return ", ".join(f"{what} (--from {name})" for name, what in FORMATS.items())


def _checked(found: str, wanted: str | None, name: str) -> str:
    if wanted not in (None, found):
        raise PrismError(f"{name}: holds {FORMATS[found]}, not {FORMATS[wanted]}; "
                         f"leave --from out, or give --from {found}")  # fmt: skip
    return found


def _text(data: bytes, name: str) -> tuple[bool, str]:
    """Decode a small file, or the beginning of a long one, where a log has its arguments."""
    log = len(data) > MAX_BYTES
    try:
        text = data[:MAX_BYTES].decode("utf-8-sig", "replace" if log else "strict")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise PrismError(
            f"{name}: is not UTF-8 text; give a launch script, a log or a configuration"
        )
    return log, text


def parsed(parse: Callable[[str], Any], text: str, name: str, what: str) -> Any:
    """Parse a text, and say of what is wrong with it where; whatever a parser raises."""
    try:
        return parse(text)
    except (ValueError, RecursionError, MemoryError, SyntaxError) as error:
        deep = isinstance(error, RecursionError | MemoryError)
        told = "too deeply nested" if deep else " ".join(str(error).split())[:200]
        raise PrismError(f"{name}: not valid {what}: {told}; correct it") from None


def scalar(text: str) -> Any:
    """Read a word as Python, YAML or a command line would: a number, a truth value, or text."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.lower() in ("none", "null", "~", ""):
        return None
    if len(word) <= _LONGEST_NUMBER and re.fullmatch(
        r"[-+]?(\d[\d_]*)?\.?\d[\d_]*(e[-+]?\d+)?|[-+]?\d+\.", word, re.I
    ):
        number = float(word.replace("_", ""))
        return int(number) if number.is_integer() and "." not in word else number
    if word[0] in "[(":
        try:
            return ast.literal_eval(word)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return word
    return word


def _script(name: str, text: str, folder: Path | None, format: str | None) -> Source:
    """Read the arguments of a script's training command: the one with most that are known."""
    script = commands_of(text, folder, name)
    batch, *commands = script.commands
    known = [sum(understood(argument[0]) for argument in command) for command in commands]
    if known and max(known[:-1], default=0) > 1:
        commands, known = commands[:-1], known[:-1]
    if not known or not max(known):
        at = Source(name, "megatron", (), files=script.files).place
        lost = "".join(f"; {at(line)}: {told}" for line, told in script.missing[:_MOST_SAID])
        raise PrismError(
            f"{name}: no training command found, expected arguments such as --num-layers and "
            "--tensor-model-parallel-size; give the script that names them, or the start of its "
            f"log{lost}"
        )
    best = max(range(len(commands)), key=lambda i: (known[i], i))
    notes = list(script.missing)
    for i, command in enumerate(commands):
        if i != best and command and known[i] > max(known) / 2:
            notes.append((command[0][2], "another training command, which is not imported"))
    settings = tuple(_setting(argument) for argument in (*batch, *commands[best]))
    first = Source(name, "megatron", settings, tuple(notes), files=script.files)
    source = _with_files(first, folder)
    settings = source.settings
    sections = {s.path[0] for s in settings if len(s.path) > 1}
    kind = "megatron"
    if {"training", "parallelism"} & sections or "torchtitan" in text:
        kind = "torchtitan"
    elif {"trainer", "model"} <= sections:
        kind = "nemo"
    if not {kind, format} <= {"megatron", "nemo", "bridge", None}:
        _checked(kind, format, name)
    settings = tuple(_resolved(settings, source.place))
    return replace(source, format=format or kind, settings=settings)


_NAMING = ("deepspeed", "deepspeed_config", "config_file", "job.config_file")
"""Settings that name another file of the configuration."""


def _with_files(source: Source, folder: Path | None) -> Source:
    """Put what the files that settings name say under what is said here; name those not there.

    DeepSpeed's names of a file often say the stage of ZeRO.
    """
    notes, files, settings = list(source.notes), list(source.files), source.settings
    for setting in source.settings:
        value = setting.value
        if ".".join(setting.path[-2:]) not in _NAMING and setting.path[-1] not in _NAMING:
            continue
        if not isinstance(value, str) or unfit(value):
            continue
        here, readable = folder or Path(), value.endswith((".json", ".toml", ".yaml", ".yml"))
        places = (here / value, here / Path(value).name) if readable else ()
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            stage = re.search(r"z(?:ero|ero_stage)?[_-]?([0-3])(?![0-9])", Path(value).name)
            if stage and setting.path[-1].startswith("deepspeed"):
                named = replace(setting, path=("zero_stage",), value=int(stage[1]))
                settings = (named, *settings)
            told = f"{Path(value).name} is not there: what it sets is not known"
            if "." in Path(value).name:
                notes.append((setting.line, told))
            continue
        files.append(display_path(path))
        text, shown = read_text(path), display_path(path)
        inner = _toml(shown, text) if path.suffix == ".toml" else _tree(shown, text, None).settings
        offset = len(files) * FILE_LINES
        settings = (*(replace(s, line=s.line + offset) for s in inner), *settings)
    return replace(source, settings=settings, notes=tuple(notes), files=tuple(files))


def unfit(value: str) -> bool:
    """Tell a text that can be no file's name."""
    return not value.strip() or "\n" in value or "\0" in value or len(value) > 250


def _setting(argument: Argument) -> Setting:
    flag, words, line = argument[:3]
    value = True if not words else scalar(words[0]) if len(words) == 1 else " ".join(words)
    bare = flag.isupper() or argument.bare
    if not words and bare:  # a variable that nothing sets
        return Setting((flag,), flag, line, flag)
    shown = f"{flag}={words[0]}" if bare else " ".join((f"--{flag}", *words))
    path = tuple(flag.split(".")) if len(flag) <= _LONGEST_NAME else (flag,)
    return Setting(path, value, line, shown)


def _tree(name: str, text: str, format: str | None) -> Source:
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
        _checked(found, format, name)
    settings = tuple(_leaves(values, (), lines))
    complete = "ConfigContainer" in text or "model_spec" in values
    source = Source(name, format or found, settings, complete=complete)
    return replace(source, settings=tuple(_resolved(settings, source.place)))


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


def _resolved(settings: Sequence[Setting], place: Callable[[int], str]) -> Iterator[Setting]:
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


def _toml(name: str, text: str) -> Iterator[Setting]:
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
