"""A configuration of another tool as a checked job, with what was assumed and what is left."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.jobs.importing.compute import (
    read_attention,
    read_dispatch,
    read_kernels,
    read_optimizer,
    read_precision,
    read_recompute,
    read_run,
)
from prism.jobs.importing.draft import Assumed, Draft, Given
from prism.jobs.importing.layout import (
    DEVICES,
    read_batch,
    read_device,
    read_pipeline,
    read_sharding,
    read_sizes,
)
from prism.jobs.importing.model import read_model
from prism.jobs.importing.settings import Setting, Source, read_source
from prism.jobs.job import Job, job_of_layer
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.layers import put_over
from prism.jobs.jobspec.othernames import key_of
from prism.jobs.jobspec.yaml import Layer

_NO_EFFECT = frozenset((
    "architectures gemm "
    "account adam addr address amax args attention aux backend base beta beta1 beta2 betas "
    "bias bucket buffer cache class clip clipping coeff color comet conf config constraint "
    "contiguous cpus data dataloader dataset debug decay deepspeed description dir dist "
    "dropout dtype dump endpoint eod eps epsilon exclusive exit exp experiment export factory "
    "file filter finetune folder format framework freq fused fusion grad hf hint host "
    "hysteresis id impl init initial job kernel launcher layernorm level library load log "
    "logger logging logits loss lr margin mask master max mcore memory merge metrics min "
    "mlflow mmap mock momentum name nccl ndim nodelist norm normalization notes nsys ntasks "
    "num_workers optim optimizer options order output params partition path pattern pin plan "
    "port position prefix pretrained print profile profiler profiling project qos queue rank "
    "rdzv reservation reset restarts resume rng rope rotary run sampler save scale scatter "
    "sched scheduler seed signal size slurm softmax source special split standard state std "
    "step straggler summary sync target tb team tee tensorboard test theta tiktoken time "
    "timeout timers timing token tokenizer trust type typed user valid validation version "
    "vocab wait wall wandb warmup weight window workers workspace z"
).split())  # fmt: skip
"""Words in names of settings that do not change the step time as prism models it."""


@dataclass(frozen=True)
class Imported:
    """What an import gives.

    Attributes
    ----------
    job : Job
        Checked; its values know their lines.
    values : dict
        What the job file says, by dotted key.
    given, assumed : tuple
        Keys that the configuration says, and keys that it does not.
    unmodelled : tuple
        Settings that change the step time and are not in the job, with the reason.
    unknown : tuple of Setting
        Settings that are not understood.
    n_ignored : int
        Settings without an effect on the step time.
    """

    source: Source
    job: Job
    values: dict[str, Any]
    given: tuple[Given, ...]
    assumed: tuple[Assumed, ...]
    unmodelled: tuple[tuple[Setting, str], ...]
    unknown: tuple[Setting, ...]
    n_ignored: int


def import_job(
    file: str | Path,
    format: str | None = None,
    gpus: int | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Make a job of another tool's configuration.

    Parameters
    ----------
    file : str or pathlib.Path
        A launch script, a log, or a configuration; ``-`` is standard input.
    format : str, optional
        One of `FORMATS`; found by content where it is not given.
    gpus : int, optional
        GPUs of the job, where the file does not say or is to be read for another number.
    device : str, optional
        The GPU.
    overrides : sequence of str
        "key=value" as given to ``--set``, over what the file says.

    Returns
    -------
    Imported

    Raises
    ------
    PrismError
        With every reason why it makes no job, each with the line of the file it comes from.
    """
    source = read_source(file, format)
    draft = Draft(source)
    _check_open(draft, overrides)
    read_model(draft)
    if not any(key.startswith("model.") for key in (*draft.values, *_keys(overrides))):
        raise PrismError(
            f"{source.name}: names no model and no sizes, which {source.format} files may leave to "
            "the program; give it: --set model.name=llama3-8b, or its sizes"
        )
    read_device(draft, device)
    if device is not None and device not in DEVICES:
        raise PrismError(f"--device {device}: expected one of {', '.join(DEVICES)}")
    for key, value in _layout_overrides(overrides):
        draft.values[key] = value
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
        raise PrismError("\n".join(dict.fromkeys(wrong)))


def _keys(overrides: Sequence[str]) -> list[str]:
    return [text.partition("=")[0].strip() for text in overrides]


def _layout_overrides(overrides: Sequence[str]) -> list[tuple[str, int]]:
    """Give the sizes of the layout that are set, from which the number of replicas follows."""
    found = [re.fullmatch(r"\s*(parallelism\.(?:tp|cp|pp))\s*=\s*(\d+)\s*", o) for o in overrides]
    return [(m[1], int(m[2])) for m in found if m]


def _layer(draft: Draft) -> Layer:
    """Lay out a draft as blocks whose places are the lines that they come from."""
    layer = Layer()
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
    left = {id(setting) for setting, _ in draft.unmodelled}
    unknown, n_ignored = [], 0
    for setting in draft.source.settings:
        if setting.path in draft.used or id(setting) in left:
            continue
        words = {w for part in setting.path for w in re.split(r"[-_.]", part.lower())}
        if words & _NO_EFFECT or setting.value in (None, False, 0, "", [], {}):
            n_ignored += 1
        else:
            unknown.append(setting)
    return unknown, n_ignored
