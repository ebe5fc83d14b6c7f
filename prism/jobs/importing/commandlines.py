"""The arguments of a script's commands, each with the line it stands on."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prism.jobs.importing.shell import UNSET, Shell
from prism.jobs.importing.shelltext import Text, plain, statements

_OPTIONS = re.compile(r"option|args|flags", re.I)


class Argument(NamedTuple):
    """Name without dashes, the words after it, its line, and whether it is written NAME=WORD."""

    name: str
    words: list[str]
    line: int
    bare: bool = False


class Script(NamedTuple):
    """What a script comes to: arguments of each command, other scripts, those that are lacking."""

    commands: list[list[Argument]]
    files: tuple[str, ...]
    missing: tuple[tuple[int, str], ...]


def batch_options(source: str) -> Iterator[Argument]:
    """Give the options of a Slurm script's ``#SBATCH`` lines."""
    for number, line in enumerate(source.splitlines(), 1):
        found = re.match(r"#SBATCH\s+--([\w-]+)[= ]\s*(\S+)", line)
        if found:
            yield Argument(found[1], [found[2]], number)


def arguments(words: list[Text]) -> Iterator[Argument]:
    """Give a command's arguments, a command inside quotes (`bash -c "..."`) among them."""
    flat: list[Text] = []
    for word in words:
        text = plain(word)
        if "--" in text and re.search(r"\s", text):
            flat += [w for inner in statements(word, inside=True) for w in inner]
        else:
            flat.append(word)
    name, values, line, left = "", list[str](), 0, list[Argument]()
    for word in flat:
        text = plain(word).strip("'\"")
        found = re.match(r"--([A-Za-z][\w.-]*)(=)?", text) or re.fullmatch(r"-(np)()", text)
        bare = re.match(r"[+~]*([A-Z_]+|[A-Za-z_]\w*(?:\.\w+)+)=(.+)", text, re.S)
        if bare and not found:
            if name:
                yield Argument(name, values, line)
            name = ""
            yield Argument(bare[1], [bare[2].strip("'\"")], word[0][1], True)
            continue
        if not found:
            if text.endswith(".py"):  # the program: what stands before it was the launcher's
                values = values[:1] if values else values
                if name:
                    yield Argument(name, values, line)
                name = ""
            elif UNSET.fullmatch(text) and (values or _OPTIONS.search(text)):
                # most often not set, and no word then
                left.append(Argument(text, [], word[0][1], True))
            elif text and not re.match(r"\d*[<>]|\$\{?[@*]\}?$", text):
                values.append(text)
            continue
        if name:
            yield Argument(name, values, line)
        name, line = found[1], word[0][1]
        values = [text[found.end() :].strip("'\"")] if found[2] else []
    if name:
        yield Argument(name, values, line)
    yield from left


def commands_of(source: str, folder: Path | None = None, name: str = "script") -> Script:
    """Give the arguments of each command of a script, or of a single command, those of Slurm first.

    The first one is what ``#SBATCH`` lines say and the variables that Transformer Engine reads,
    empty without any; the last, what variables hold. Other scripts are looked for in `folder`.
    """
    batch = list(batch_options(source))
    known = {argument.name: argument.words[0] for argument in batch}
    nodes = known.get("N", known.get("nodes"))
    given = {} if nodes is None else {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    shell = Shell(given, folder, name)
    shell.run(source)
    for variable, fields in shell.variables.items():
        if variable.startswith("NVTE_") and fields and fields[0]:
            batch.append(Argument(variable, [plain(fields[0])], fields[0][0][1], True))
    # last a script that another one reads: what its variables hold
    held = [field for fields in shell.variables.values() for field in fields]
    commands = [batch, *(list(arguments(command)) for command in (*shell.commands, held))]
    return Script(commands, tuple(shell.files), tuple(shell.missing))
