"""Settings of a configuration: names, values, and the line of each."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.shelltext import FILE_LINES

_LONGEST_NUMBER = 40  # characters
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
OTHER_MODELS = re.compile(
    r"(vision|audio|image|video|speech|visual|vit|encoder|projector|talker|code2wav|draft|dit|"
    r"qformer|vq_|perceiver|adapter_config|high_res|per_layer_config|"
    r"decoder_config|depth_decoder|mm_)\w*"
)


@dataclass(frozen=True)
class Setting:
    """What a configuration gives a name: `path` is the name with the sections above it."""

    path: tuple[str, ...]
    value: Any
    line: int
    shown: str  # as a reader of the file finds it


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


def unfit(value: str) -> bool:
    """Tell a text that can be no file's name."""
    return not value.strip() or "\n" in value or "\0" in value or len(value) > 250
