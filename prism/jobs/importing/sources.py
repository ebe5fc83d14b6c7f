"""A configuration of any supported tool as settings: names, values, and the line of each.

The format is found by content. Nothing here knows what a name means.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prism.common.errors import PrismError
from prism.common.files import read_head
from prism.jobs.importing.commandlines import Argument, commands_of
from prism.jobs.importing.inlogs import DEEPSPEED_LINE, DUMP_LINES, arguments_in, tree_in
from prism.jobs.importing.settings import FORMATS, Setting, Source, scalar, unfit
from prism.jobs.importing.shelltext import FILE_LINES
from prism.jobs.importing.trees import check_format, read_toml, read_tree, resolved
from prism.jobs.jobspec.othernames import understood
from prism.jobs.jobspec.yaml import MAX_BYTES, display_path, read_text

_LONGEST_NAME = 250
_MOST_SAID = 4  # scripts that are not there
_PROGRAM = (
    "is a Python program, of which nothing is run; give what it writes: torchtitan's "
    "--debug.save_config_file FILE, Megatron Bridge's run_config.yaml, the arguments at the start "
    "of Megatron-LM's log, or the model's config.json"
)


def read_sources(files: Sequence[str | Path], format: str | None = None) -> Source:
    """Read the files of one configuration, such as a DeepSpeed JSON and a model's config.json.

    A model's config.json comes first, so that what the others say goes before it; the format is
    that of the first file which is none. Two of kinds that do not go together are refused.
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
    """Read a configuration, ``-`` from standard input; its format is found by content."""
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
        return replace(read_tree(name, "\n" * first + text, format), complete=True)
    dumped = list(arguments_in(text))
    if len(dumped) >= DUMP_LINES:
        kind = "deepspeed" if DEEPSPEED_LINE.search(text) else "megatron"
        settings = tuple(
            Setting((found,), scalar(value), line, f"{found} {value}")
            for found, value, line in dumped
        )
        return Source(name, check_format(kind, format, name), settings, complete=True)
    if name.endswith(".py"):
        raise PrismError(f"{name}: {_PROGRAM}")
    if log:
        raise PrismError(
            f"{name}: more than {MAX_BYTES >> 20} MiB without the arguments of a log in the first, "
            "expected a script or a configuration; give that, or the start of the log"
        )
    folder = None if str(file) == "-" else Path(file).parent
    if text.lstrip().startswith("{") or name.endswith((".yaml", ".yml", ".json")):
        return _with_files(read_tree(name, text, format), folder)
    if name.endswith(".toml") or re.search(r"^\[[\w.]+\]\s*$", text, re.M):
        return Source(name, check_format("torchtitan", format, name), tuple(read_toml(name, text)))
    if re.search(
        r"(^|[\s\"'])--[A-Za-z]|^\s*(source|\.|bash|sh) \S|\.sh\b|\s\w+(\.\w+)+=", text, re.M
    ):
        return _script(name, text, folder, format)
    if re.search(r"^[\w-]+:(\s|$)", text, re.M):
        return read_tree(name, text, format)
    if re.search(r"^(from [\w.]+ )?import \w", text, re.M):
        raise PrismError(f"{name}: {_PROGRAM}")
    raise PrismError(f"{name}: no arguments and no configuration found, expected {_kinds()}")


def _kinds() -> str:
    return ", ".join(f"{what} (--from {name})" for name, what in FORMATS.items())


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
        check_format(kind, format, name)
    settings = tuple(resolved(settings, source.place))
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
        inner = (
            read_toml(shown, text)
            if path.suffix == ".toml"
            else read_tree(shown, text, None).settings
        )
        offset = len(files) * FILE_LINES
        settings = (*(replace(s, line=s.line + offset) for s in inner), *settings)
    return replace(source, settings=settings, notes=tuple(notes), files=tuple(files))


def _setting(argument: Argument) -> Setting:
    flag, words, line = argument[:3]
    value = True if not words else scalar(words[0]) if len(words) == 1 else " ".join(words)
    bare = flag.isupper() or argument.bare
    if not words and bare:  # a variable that nothing sets
        return Setting((flag,), flag, line, flag)
    shown = f"{flag}={words[0]}" if bare else " ".join((f"--{flag}", *words))
    path = tuple(flag.split(".")) if len(flag) <= _LONGEST_NAME else (flag,)
    return Setting(path, value, line, shown)
