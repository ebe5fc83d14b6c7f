"""Job files as trees: which file is read, `base:` chains, and layers upon each other.

Names of shipped jobs, files and fitted models become one `Layer` (`prism.jobs.jobspec.yaml`), with
the overrides of `--set` on top. Nothing here knows which keys are legal in a block or what they
mean; that is `prism.jobs.jobspec.blocks` (types) and `prism.jobs.jobspec.check` (sizes, what is
modelled).
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.common.shipped import data_path
from prism.jobs.jobspec.blocks import BLOCKS
from prism.jobs.jobspec.frommodel import job_of_model, settle_calibrated
from prism.jobs.jobspec.yaml import (
    KeyPath,
    Layer,
    display_path,
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
# Keys that answer the same question: a later layer's answer replaces an earlier one's.
EXCLUSIVE: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("run", "steps"), ("run", "tokens")),
    (("model", "name"), ("model", "durations")),
)
_FILE_KEYS = (
    ("variability", "library", ".nc"), ("variability", "model", ".nc"), ("cluster", "hosts", "")
)  # fmt: skip


# --------------------------------------------------------------------------- names and files
def _is_file(path: Path) -> bool:
    try:
        return path.is_file()  # a pipe could be read once only, and the head is looked at first
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


def _shipped_path(name: str) -> Path | None:
    stem = name.removesuffix(".yaml")
    return data_path("jobs") / f"{stem}.yaml" if stem in shipped_jobs() else None


def resolve_path(name: str | Path) -> Path:
    """Find a job file by path, or a shipped job by name.

    Raises
    ------
    PrismError
        If there is neither; the message lists files and shipped jobs of a similar name.
    """
    path = Path(name)
    if _is_file(path):
        return path
    shipped = _shipped_path(str(name))
    if shipped is not None:
        return shipped
    what = "is no regular file, expected a job file" if _exists(path) else "no such job file"
    raise PrismError(f"{str(name)[:200] or repr('')}: {what}; {_way_out(path)}")


def is_hdf5(path: Path) -> bool:
    """Tell a netCDF-4 file by its first bytes."""
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


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


# ----------------------------------------------------------------------------------- layering
def _drop(layer: Layer, path: KeyPath) -> None:
    """Forget a key and everything below it."""
    tree: Any = layer.values
    for key in path[:-1]:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if isinstance(tree, dict):
        tree.pop(path[-1], None)
    for known in [p for p in layer.places if p[: len(path)] == path]:
        del layer.places[known]


def _has(tree: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or tree.get(key) is None:
            return False
        tree = tree[key]
    return True


def merge(lower: Layer, upper: Layer) -> Layer:
    """Put `upper` over `lower`: blocks merge key by key, anything else is replaced."""
    for pair in EXCLUSIVE:
        for mine, other in (pair, pair[::-1]):
            if _has(upper.values, mine) and not _has(upper.values, other):
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
        if not _is_file(candidate):
            continue
        shipped = _shipped_path(name)
        own = candidate.resolve() == child.resolve()
        if not own or shipped is None or shipped.resolve() == child.resolve():
            return candidate
    return resolve_path(name)


def _read_job(path: Path) -> Layer:
    """Read one job file; a recording is refused with what can be done with it."""
    shown = display_path(path)
    try:
        layer = parse_yaml(read_text(path), shown)
        wrong = None if {"base", *BLOCKS} & layer.values.keys() else PrismError("")
    except PrismError as error:
        wrong = error
    # what is called YAML is meant to be a job
    if wrong is not None and path.suffix not in (".yaml", ".yml"):
        from prism.traces.kinds import recording_kind  # slow to import

        kind = recording_kind(str(path))
        if kind is not None:
            held = {"trace": "a trace", "step_times": "step times"}.get(kind, "measurements")
            raise PrismError(
                f"{shown}: holds {held}, expected a YAML job; prism fit {shown} -o MODEL.nc learns "
                "from it"
            )
    if wrong is not None and str(wrong):
        raise wrong
    return layer


def load_chain(path: Path, above: Sequence[Path] = ()) -> Layer:
    """Read a job file and the jobs its `base:` names, the file itself on top."""
    if is_hdf5(path):
        return job_of_model(path)
    return _on_base(_read_job(path), path, above)


def layer_of(values: Mapping[str, Any]) -> Layer:
    """Make a layer of a job's blocks by name, on the job that their `base` names."""
    copied = copy.deepcopy(dict(values))
    return _on_base(Layer(copied, dict.fromkeys(key_paths(copied), MAPPING)), Path(MAPPING), ())


def _on_base(layer: Layer, path: Path, above: Sequence[Path]) -> Layer:
    """Put a layer on the job that its `base:` names."""
    for block, key, suffix in _FILE_KEYS:
        # A library given by file is meant relative to the file that names it.
        tree = layer.values.get(block)
        value = tree.get(key) if isinstance(tree, dict) else None
        if isinstance(tree, dict) and isinstance(value, str) and value.endswith(suffix):
            tree[key] = str(path.parent / value) if _is_file(path.parent / value) else value
    if "base" not in layer.values:
        return layer
    place, name = layer.places[("base",)], layer.values["base"]
    _drop(layer, ("base",))
    if not isinstance(name, str) or not name:
        wrong = f"{place}: base: expected the name of a job, got {name!r}; "
        wrong += f"shipped jobs: {', '.join(shipped_jobs())}"
        raise PrismError("\n".join([*layer.problems, wrong]))
    chain = [*above, path]
    try:
        base = _find_base(name, path)
    except PrismError as error:
        raise PrismError(f"{place}: base: {error}") from None
    if base.resolve() in [p.resolve() for p in chain]:
        loop = " -> ".join([p.stem for p in chain] + [base.stem])
        raise PrismError(f"{place}: base: a job cannot build on itself ({loop}); drop one `base:`")
    return merge(load_chain(base, chain), layer)


def put_over(layer: Layer, overrides: Overrides) -> Layer:
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
