"""A configuration of another tool as a checked job, with what was assumed and what is left."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.devices import DEVICES
from prism.jobs.dimensions import DIMENSIONS
from prism.jobs.importing.compute import (
    read_attention,
    read_dispatch,
    read_kernels,
    read_loss,
    read_optimizer,
    read_precision,
    read_recompute,
    read_run,
    read_unmodelled,
)
from prism.jobs.importing.draft import BESIDE, Assumed, Draft, Given, unresolved
from prism.jobs.importing.layout import (
    read_batch,
    read_device,
    read_pipeline,
    read_sharding,
    read_sizes,
)
from prism.jobs.importing.model import read_model
from prism.jobs.importing.settings import Setting, Source, scalar
from prism.jobs.importing.sources import read_sources
from prism.jobs.job import Job, job_of_layer
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.layers import put_over
from prism.jobs.jobspec.othernames import key_of, no_effect
from prism.jobs.jobspec.presets import SIZES
from prism.jobs.jobspec.yaml import ConfigLayer

_SIZES = frozenset(
    [f"model.{key}" for key in SIZES]
    + [f"parallelism.{k}" for k in (*DIMENSIONS, "microbatch_size", "global_batch")]
)
_WORDS = ("model.name", "model.layer_pattern", "cluster.device")


@dataclass(frozen=True)
class Imported:
    """What an import gives."""

    source: Source
    job: Job  # checked; its values know their lines
    values: dict[str, Any]  # what the job file says, by dotted key
    given: tuple[Given, ...]  # keys that the configuration says, and
    assumed: tuple[Assumed, ...]  # keys that it does not
    # settings that change the step time and are not in the job, with the reason
    unmodelled: tuple[tuple[Setting, str], ...]
    unknown: tuple[Setting, ...]  # settings that are not understood
    n_ignored: int  # settings without an effect on the step time


def import_job(
    file: str | Path | Sequence[str | Path],
    format: str | None = None,
    gpus: int | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Make a job of another tool's configuration, checked as a file is.

    `file` is a launch script, a log, or a configuration, and a model's config.json beside it; ``-``
    is standard input. `format` is found by content, `gpus` and `device` are the file's own, where
    they are not given. `overrides` are "key=value" as of ``--set``. Every reason why it makes no
    job is an error with the line of the file that it comes from.
    """
    source = read_sources([file] if isinstance(file, str | Path) else file, format)
    draft = Draft(source, frozenset(_keys(overrides)))
    draft.check_numbers()
    draft.values.update(_overrides(overrides))
    _check_open(draft, overrides)
    read_model(draft)
    if not {"model.name", "model.n_layers"} & {*draft.values, *draft.over}:
        lost = "".join(f"; {source.place(line)}: {text}" for line, text in source.notes)
        raise PrismError(
            f"{source.name}: names no model and no sizes, which {source.format} files may leave to "
            f"the program; give it: --set model.name=llama3-8b, its sizes, or its config.json as a "
            f"second file{lost}"
        )
    read_device(draft, device)
    if device is not None and device not in DEVICES:
        raise PrismError(f"--device {device}: expected one of {', '.join(DEVICES)}")
    read_sizes(draft, gpus)
    read_batch(draft)
    read_pipeline(draft)
    read_sharding(draft)
    read_recompute(draft)
    read_precision(draft)
    read_kernels(draft)
    read_attention(draft)
    read_optimizer(draft)
    read_dispatch(draft)
    read_run(draft)
    read_loss(draft)
    read_unmodelled(draft)
    if "model.n_layers" in draft.values and not (
        {"model.vocab_size", "model.name"} & {*draft.values, *_keys(overrides)}
    ):
        raise PrismError(
            f"{source.name}: the vocabulary is the tokenizer's, which the file does not hold; give "
            "it: --set model.vocab_size=N"
        )
    unknown, n_ignored = _left(draft)
    layer = put_over(_layer(draft), list(overrides))
    job = job_of_layer(layer, Path(source.name).stem, source.name)
    over = set(_keys(overrides))
    given = tuple(
        draft.given[k]
        for k in draft.values
        if k in draft.given and k not in draft.assumed and k not in over
    )
    assumed = tuple(a for k, a in draft.assumed.items() if k in draft.values and k not in over)
    values = {
        f"{block}.{name}": value
        for block in BLOCKS
        for name, value in (layer.values.get(block) or {}).items()
    }
    return Imported(
        source, job, values, given, assumed, tuple(draft.unmodelled), tuple(unknown), n_ignored
    )


def _check_open(draft: Draft, overrides: Sequence[str]) -> None:
    """Refuse settings of the model and the layout whose values only the environment knows."""
    given = {*_keys(overrides), "parallelism.dp", "model.name", "model.vocab_size"}
    wrong = []
    for setting in draft.open_settings():
        key = key_of(setting.path[-1]) or ""
        if key.startswith(("parallelism.", "model.")) and key not in given:
            place = draft.source.place(setting.line)
            text = "its value is not in the file; give it: --set"
            wrong.append(f"{place}: {setting.shown}: {text} {key}=VALUE")
    if wrong:
        raise PrismError(*dict.fromkeys(wrong))


def _keys(overrides: Sequence[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in overrides]


def _overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Give the model's and the layout's values that are set, from which others follow."""
    found = {}
    for text in overrides:
        key, _, word = text.partition("=")
        value, name = scalar(word), key.strip()
        if name in _SIZES and (type(value) is not int or value < 1):
            raise PrismError(f"--set {text}: expected a whole number, at least 1")
        if name in _WORDS and not isinstance(value, str):
            raise PrismError(f"--set {text}: expected text")
        if name.startswith(("model.", "parallelism.", "cluster.device")) and value is not None:
            found[name] = value
    return found


def _layer(draft: Draft) -> ConfigLayer:
    """Lay out a draft as blocks whose places are the lines that they come from."""
    layer = ConfigLayer()
    for key, value in draft.values.items():
        block, _, name = key.partition(".")
        layer.values.setdefault(block, {})[name] = value
        given, assumed = draft.given.get(key), draft.assumed.get(key)
        if given is not None:
            layer.places[(block, name)] = draft.source.place(given.line)
        elif assumed is not None and assumed.line:
            layer.places[(block, name)] = draft.source.place(assumed.line)
        else:
            layer.places[(block, name)] = draft.source.name
    assert set(layer.values) <= set(BLOCKS)
    return layer


def _left(draft: Draft) -> tuple[list[Setting], int]:
    """Part settings that were not used into unknown ones and those without effect."""
    source, left = draft.source, {setting.path for setting, _ in draft.unmodelled}
    unknown, n_ignored = [], 0
    for setting in source.settings:
        read = setting.path in draft.used and not unresolved(setting.value)
        if read or setting.path in left:
            continue
        beside = not BESIDE.isdisjoint(setting.path[:-1])
        empty = beside or setting.value is None or setting.value in ([], {}, "")
        if empty or no_effect(setting.path) or (source.complete and setting.value in (False, 0)):
            n_ignored += 1
        else:
            unknown.append(setting)
    return unknown, n_ignored
