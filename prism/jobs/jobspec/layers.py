"""Which job file is read, `base:` chains, and layers upon each other, `--set` on top."""

import copy
import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.common.pipes import held
from prism.common.shipped import data_path
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.clustercheck import DISTANCE, UPLINK
from prism.jobs.jobspec.frommodel import job_of_model, settle_calibrated
from prism.jobs.jobspec.yaml import (
    ConfigLayer,
    KeyPath,
    display_path,
    drop,
    key_paths,
    near,
    override_layer,
    parse_yaml,
    read_text,
    set_layer,
    shipped_jobs,
)

MAPPING = "job"  # what a job is called that comes as a mapping
Overrides = Sequence[str] | Mapping[str, Any]
RESIDUAL = ("variability", "effects", "residual")
# Keys that answer the same question: a later layer's answer replaces an earlier one's.
EXCLUSIVE: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("run", "steps"), ("run", "tokens")),
    (("run", "grid_intensity"), ("run", "region")),
    (("run", "checkpoint", "interval"), ("run", "checkpoint", "interval_steps")),
    (("model", "name"), ("model", "durations")),
    (("model", "layers"), ("model", "durations")),
    (("model", "layers"), ("model", "name")),
    (("parallelism", "microbatches"), ("parallelism", "global_batch")),
    *(((*RESIDUAL, key), (*RESIDUAL, "scale")) for key in ("cv", "law")),
)
# The same of the keys of each tier.
EXCLUSIVE_IN_TIERS = tuple(pair for names in (UPLINK, DISTANCE) for pair in combinations(names, 2))
_FILE_KEYS = (
    ("variability", "library", ".nc"), ("variability", "model", ".nc"), ("cluster", "hosts", "")
)  # fmt: skip


def _shipped_path(name: str) -> Path | None:
    stem = name.removesuffix(".yaml")
    return data_path("jobs") / f"{stem}.yaml" if stem in shipped_jobs() else None


def resolve_path(name: str | Path) -> Path:
    """Find a job file by path, or a shipped job by name; an error lists what is called alike."""
    path = Path(name)
    if os.path.isfile(held(path)):
        return path
    shipped = _shipped_path(str(name))
    if shipped is not None:
        return shipped
    what = "is no regular file, expected a job file" if os.path.exists(path) else "no such job file"
    raise PrismError(f"{str(name)[:200] or repr('')}: {what}; {_way_out(path)}")


def is_hdf5(path: Path) -> bool:
    """Tell a netCDF-4 file by its first bytes."""
    with held(path).open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _way_out(path: Path) -> str:
    """Name what could have been meant: files beside the path, then shipped jobs."""
    try:
        beside = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        beside = []
    shipped = shipped_jobs()
    stems = {name.rsplit(".", 1)[0]: name for name in beside}
    files = [str(path.parent / stems[stem]) for stem in near(path.stem, stems)]
    close = files + near(path.stem, shipped)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"give a YAML file or a shipped job: {', '.join(shipped) or 'none is installed'}"


def _drop(layer: ConfigLayer, path: KeyPath) -> None:
    """Forget a key and everything below it."""
    drop(layer.values, path)
    layer.places = {p: place for p, place in layer.places.items() if p[: len(path)] != path}


def _value(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def merge(lower: ConfigLayer, upper: ConfigLayer) -> ConfigLayer:
    """Put `upper` over `lower`: blocks merge key by key, anything else is replaced."""
    tiers = _value(upper.values, ("cluster", "tiers"))
    pairs = [
        tuple(("cluster", "tiers", tier, name) for name in pair)
        for tier in (tiers if isinstance(tiers, dict) else ())
        for pair in EXCLUSIVE_IN_TIERS
    ]
    for pair in (*EXCLUSIVE, *pairs):
        for mine, other in (pair, pair[::-1]):
            if _value(upper.values, mine) is not None and _value(upper.values, other) is None:
                _drop(lower, other)

    def put(old: dict[str, Any], new: Mapping[str, Any], path: KeyPath) -> None:
        for key, value in new.items():
            here = (*path, key)
            if here == ("variability", "library") and value is None:
                value = "none"  # it can be none, which is not its default
            if isinstance(value, dict) and isinstance(old.get(key), dict):
                put(old[key], value, here)
                # The block keeps the place of its own file, each key the place that set it.
                continue
            there = key in old
            _drop(lower, here)
            if value is not None or not there:  # a key without a value takes the lower one's away
                old[key] = value

    put(lower.values, upper.values, ())
    lower.places.update(upper.places)
    lower.problems.extend(upper.problems)
    return lower


def _find_base(name: str, child: Path) -> Path:
    """Resolve `base: NAME`: a file beside the child first, then a shipped job."""
    for candidate in (child.parent / name, child.parent / f"{name}.yaml"):
        # A user's own llama3-405b-16k.yaml may build on the shipped job of that name.
        if os.path.isfile(candidate):
            same, shipped = candidate.resolve() == child.resolve(), _shipped_path(name)
            if not same or shipped is None or shipped.resolve() == child.resolve():
                return candidate
    return resolve_path(name)


def _read_job(path: Path) -> ConfigLayer:
    """Read one job file; a recording is refused with what can be done with it."""
    shown = display_path(path)
    layer, wrong = ConfigLayer(), None
    try:
        layer = parse_yaml(read_text(path), shown)
    except PrismError as error:
        wrong = error
    # what is called YAML is meant to be a job
    if not {"base", *BLOCKS} & layer.values.keys() and path.suffix not in (".yaml", ".yml"):
        from prism.traces import holds, unknown_format  # slow to import

        kind = holds(str(path))
        if kind is not None:
            held = {"trace": "a trace", "step_times": "step times"}.get(kind, "measurements")
            way_out = f"prism fit {shown} -o MODEL.nc learns from it"
            raise PrismError(f"{shown}: holds {held}, expected a YAML job; {way_out}")
        if path.is_file():
            raise PrismError(f"{unknown_format(path)}. A job is YAML with blocks such as model")
    if wrong is not None:
        raise wrong
    return layer


def load_chain(path: Path, above: Sequence[Path] = ()) -> ConfigLayer:
    """Read a job file and the jobs its `base:` names, the file itself on top."""
    if is_hdf5(path):
        return job_of_model(path)
    return _on_base(_read_job(path), path, above)


def layer_of(values: Mapping[str, Any]) -> ConfigLayer:
    """Make a layer of a job's blocks by name, on the job that their `base` names."""
    copied = copy.deepcopy(dict(values))
    return _on_base(
        ConfigLayer(copied, dict.fromkeys(key_paths(copied), MAPPING)), Path(MAPPING), ()
    )


def _on_base(layer: ConfigLayer, path: Path, above: Sequence[Path]) -> ConfigLayer:
    """Put a layer on the job that its `base:` names."""
    for block, key, suffix in _FILE_KEYS:
        # A library given by file is meant relative to the file that names it.
        value = _value(layer.values, (block, key))
        if (
            isinstance(value, str)
            and value.endswith(suffix)
            and os.path.isfile(path.parent / value)
        ):
            layer.values[block][key] = str(path.parent / value)
    if "base" not in layer.values:
        return layer
    place, name = layer.places[("base",)], layer.values["base"]
    _drop(layer, ("base",))
    if not isinstance(name, str) or not name:
        text = f"expected the name of a job, got {name!r}; shipped jobs: "
        text += ", ".join(shipped_jobs())
        raise PrismError(*layer.problems, f"{place}: base: {text}")
    chain = [*above, path]
    try:
        base = _find_base(name, path)
    except PrismError as error:
        raise PrismError(f"{place}: base: {error}") from None
    if base.resolve() in [p.resolve() for p in chain]:
        loop = " -> ".join([p.stem for p in chain] + [base.stem])
        raise PrismError(f"{place}: base: a job cannot build on itself ({loop}); drop one `base:`")
    return merge(load_chain(base, chain), layer)


def put_over(layer: ConfigLayer, overrides: Overrides) -> ConfigLayer:
    """Put overrides on top, in order, and settle what they leave open."""
    if isinstance(overrides, Mapping):
        uppers = [set_layer(str(key), value) for key, value in overrides.items()]
    else:
        texts = [overrides] if isinstance(overrides, str) else overrides
        uppers = [override_layer(text) for text in texts]
    for upper in uppers:
        layer = merge(layer, upper)
    settle_calibrated(layer)
    return layer
