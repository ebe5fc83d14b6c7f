"""The job file: five blocks in, one frozen `Job` out, or every error of the file at once.

Nothing is simulated here, and no device or distribution is looked up.
"""

from collections.abc import Iterator, Mapping
from math import ceil, inf
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.devices import LIBRARIES
from prism.jobs.dimensions import GPUS
from prism.jobs.frameworks import FRAMEWORKS
from prism.jobs.jobspec.blocks import (
    BLOCKS,
    Blocks,
    ModelBlock,
    ParallelismBlock,
)
from prism.jobs.jobspec.check import find_problems
from prism.jobs.jobspec.effects import VariabilityBlock
from prism.jobs.jobspec.layers import (
    MAPPING,
    Overrides,
    layer_of,
    load_chain,
    put_over,
    resolve_path,
)
from prism.jobs.jobspec.machines import ClusterBlock
from prism.jobs.jobspec.messages import (
    by_line,
    concludes_from,
    message,
    unknown_key,
    validate_block,
)
from prism.jobs.jobspec.presets import PRESETS, SIZES
from prism.jobs.jobspec.run import (
    CHECKPOINT_S,
    FAILURES_PER_GPU_DAY,
    CheckpointBlock,
    FailuresBlock,
    RunBlock,
)
from prism.jobs.jobspec.yaml import ConfigLayer, KeyPath, as_text, display_path, is_override
from prism.jobs.layersplit import cost_split, even_split

# Defaults that follow from another key; the description says how, the schema gives no value.
_DERIVED = {
    "data_parallel", "reshard_after_forward", "schedule", "vpp", "nvlink_domain_gpus", "library",
    "framework", "fused_loss", "gated_mlp", "rope", "tied_embeddings",
    *SIZES,
}  # fmt: skip
DEFAULT_STEPS = 1000  # of a run that is asked for without its length


class Job(BaseModel):
    """A resolved job: every value is there, and they fit together.

    Examples
    --------
    >>> import prism
    >>> job = prism.load_job("llama3-405b-16k")
    >>> job
    <Job llama3-405b-16k: 16,384 GPUs, tp8 pp16 vpp8 dp128>
    >>> job.world_size, job.n_nodes, job.tokens_per_step, job.n_steps
    (16384, 2048, 16777216, 1100929)
    >>> job.parallelism.schedule
    'interleaved'
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra={"description": "A job: what is trained, how, on what, for how long."},
    )

    name: str = Field("job", description="The file's stem.")
    source: str = Field("", description="The file, as it was found.")
    model: ModelBlock = Field(description="What is trained.")
    parallelism: ParallelismBlock = Field(description="How it is divided and ordered.")
    cluster: ClusterBlock = Field(description="What it runs on.")
    variability: VariabilityBlock = Field(description="How durations vary.")
    run: RunBlock = Field(description="How long, by when, at what price.")

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **blocks: Any) -> None:
        try:
            super().__init__(**blocks)
        except ValidationError as error:
            name = blocks.pop("name", MAPPING)
            blocks.pop("source", None)
            job_from_dict(blocks, str(name))  # says what is wrong as for a file
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise PrismError(*wrong) from None

    def replace(self, *overrides: str | Mapping[str, Any]) -> "Job":
        """Return the job with other values of some keys; what follows from them follows anew.

        Parameters
        ----------
        *overrides : str or mapping
            As of `load_job`.

        Returns
        -------
        Job
            Checked as a file is.

        Raises
        ------
        PrismError
            As of `load_job`.

        Examples
        --------
        >>> import prism
        >>> prism.load_job("pipeline-8x32").replace("parallelism.pp=4", "run.steps=10").world_size
        4
        """
        # one that does not know what it was given gives all, also when it is replaced again
        known = self._places or dict.fromkeys(provenance(self), "given")
        places = {tuple(key.split(".")): place for key, place in known.items()}
        layer = ConfigLayer(given_values(self), places)
        for upper in overrides:
            layer = put_over(layer, upper)
        return _build(layer, self.name, Path(self.source or self.name))

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        return _fill_blocks(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = find_problems(Blocks(**{block: getattr(self, block) for block in BLOCKS}))
        if problems:
            raise ValueError("\n".join(f"{key}: {text}" for text, key, *_ in problems))
        return self

    def __repr__(self) -> str:
        gpus = format_count(self.world_size, "GPU")
        return f"<Job {self.name}: {gpus}, {self.parallelism.sizes or 'dp1'}>"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        # Where the values came from is no part of a job; a rebuilt one equals the loaded one.
        if not isinstance(other, Job):
            return False
        return self.model_dump(exclude={"source"}) == other.model_dump(exclude={"source"})

    def __hash__(self) -> int:
        return hash(self.model_dump_json(exclude={"source"}))

    @property
    def world_size(self) -> int:
        """GPUs of the job, the product of its dimensions."""
        return self.parallelism.gpus(GPUS)

    @property
    def n_nodes(self) -> int:
        """Nodes of the job; as many as its GPUs need where the file does not say."""
        return self.cluster.nodes or ceil(self.world_size / self.cluster.gpus_per_node)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all replicas; 0 where no sequence length is known."""
        p = self.parallelism
        return p.dp * p.microbatches * p.microbatch_size * self.model.seq_len

    @property
    def work_per_step(self) -> dict[str, float]:
        """Samples and tokens of one step by name; empty where no sequence length is known."""
        tokens = self.tokens_per_step
        return {"samples": tokens / self.model.seq_len, "tokens": tokens} if tokens else {}

    @property
    def n_steps(self) -> int:
        """Steps of the run, from its steps or from its tokens."""
        if self.run.tokens is not None:
            steps = self.ramp_steps
            left = self.run.tokens - self._ramp_tokens(steps)
            return max(1, sum(steps) + max(0, ceil(left / self.tokens_per_step)))
        return DEFAULT_STEPS if self.run.steps is None else self.run.steps

    @property
    def ramp_steps(self) -> tuple[int, ...]:
        """Steps of each phase of `run.batch_ramp`, as far as the run has tokens."""
        counts: tuple[int, ...] = ()
        for phase in self.run.batch_ramp or ():
            end = min(phase.tokens, self.run.tokens or inf)
            left = end - self._ramp_tokens(counts)
            counts += (max(0, ceil(left / (phase.global_batch * self.model.seq_len))),)
        return counts

    def _ramp_tokens(self, steps: tuple[int, ...]) -> int:
        """Tokens of the given number of steps of the first phases of the ramp."""
        phases = zip(self.run.batch_ramp or (), steps, strict=False)
        return sum(n * phase.global_batch for phase, n in phases) * self.model.seq_len

    @property
    def failures(self) -> FailuresBlock | None:
        """Failures of a run: the job's, else a published rate; None where there are none."""
        given = self.run.failures
        if given == "none" or (given is None and self.model.durations is not None):
            return None
        block = given or FailuresBlock()
        rate = 1000.0 * FAILURES_PER_GPU_DAY * self.cluster.gpus_per_node
        known = {} if block.per_1000_node_days is not None else {"per_1000_node_days": rate}
        return block.model_copy(update=known)

    @property
    def checkpoint(self) -> CheckpointBlock | None:
        """Checkpoints of a run: the job's; with failures, assumed ones."""
        if self.run.checkpoint is None and self.failures is not None:
            return CheckpointBlock(interval=CHECKPOINT_S, mode="async")
        return self.run.checkpoint

    @property
    def has_run(self) -> bool:
        """Whether it asks for a run: says how long it is, when it ends, or what interrupts it."""
        effects = self.variability.effects
        how_told = ("probability", "slowdown_thresholds", "pue", "loader", "start_up")
        said = [effects.fail_slow, *(value for key, value in self.run if key not in how_told)]
        diurnal = effects.step is not None and bool(effects.step.diurnal_cv)
        return diurnal or any(value not in (None, "none") for value in said)


def _fill_blocks(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the blocks that were left out and the library, which follows from the device."""
    out = dict(data)
    for block in BLOCKS:
        if out.get(block) is None:
            out[block] = {}
    v, cluster = out["variability"], out["cluster"]
    if isinstance(v, Mapping) and "library" not in v and isinstance(cluster, Mapping):
        device = cluster.get("device") or "h100"
        # The empty name stands for "no set for this device", which the checks report.
        library = LIBRARIES.get(device, "") if isinstance(device, str) else None
        out["variability"] = {**v, "library": library}
    return out


# ------------------------------------------------------------------------------------- loading
def load_job(job: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> Job:
    """Load a job file, or a shipped job by its name.

    Parameters
    ----------
    job : str, pathlib.Path or mapping
        A YAML file, the name of a shipped job, or a fitted model (the job it describes); or what
        such a file holds, blocks by name and `base`.
    overrides : sequence of str, or mapping, optional
        "key=value" as given to `--set`, for example "parallelism.dp=64", where the value is YAML;
        or values by dotted key. They are put over the file, in order, before anything is checked.

    Returns
    -------
    Job
        Frozen; ``prism show JOB`` lists its values and where each comes from.

    Raises
    ------
    PrismError
        With every error of the file and the overrides, one per line, each with its place.

    Examples
    --------
    >>> import prism
    >>> prism.load_job("llama3-405b-16k", ["parallelism.dp=64", "cluster.nodes=1024"])
    <Job llama3-405b-16k: 8,192 GPUs, tp8 pp16 vpp8 dp64>
    >>> prism.load_job({"base": "pipeline-8x32", "parallelism": {"microbatches": 16}})
    <Job job: 8 GPUs, pp8>
    """
    if isinstance(job, Mapping):
        return _build(put_over(layer_of(job), overrides), MAPPING, Path(MAPPING))
    if not isinstance(job, str | Path):
        raise PrismError(f"job: expected a file, a name or a mapping, got {type(job).__name__}")
    path = resolve_path(job)
    return _build(put_over(load_chain(path), overrides), as_text(path.stem), path)


def job_from_dict(values: Mapping[str, Any], name: str = "job") -> Job:
    """Build a job from blocks by name (without `base`); `name` is the place in messages too."""
    return _build(ConfigLayer(values=dict(values)), name, Path(name))


def job_of_layer(layer: ConfigLayer, name: str, source: str) -> Job:
    """Build a job from values that know their places."""
    return _build(layer, name, Path(source))


def _build(layer: ConfigLayer, name: str, path: Path) -> Job:
    """Validate each block by itself, then what holds between them; report all errors."""
    tree, source = _fill_blocks(layer.values), display_path(path)
    messages = list(layer.problems)
    for key in [key for key in tree if key not in BLOCKS]:
        text = unknown_key(key, ("base", *BLOCKS))
        messages.append(message(layer, source, [(key,)], text))
    valid: dict[str, Any] = {}
    doubtful: list[str] = []
    for block, kind in BLOCKS.items():
        checked = validate_block(kind, tree[block])
        valid[block] = checked.block
        doubtful += [".".join((block, *key_path)) for key_path in checked.doubtful]
        for key_path, text in checked.found:
            full = (block, *key_path)
            messages.append(message(layer, source, [full], text))
    for text, *keys in find_problems(Blocks(**valid)):
        if not concludes_from(keys, doubtful):
            paths = [tuple(key.split(".")) for key in keys]
            messages.append(message(layer, source, paths, text))
    if messages:
        raise PrismError(*sorted(dict.fromkeys(messages), key=by_line))
    job = Job(name=name, source=as_text(path), **valid)
    job._places.update({".".join(key): place for key, place in layer.places.items()})
    return job


# ------------------------------------------------------------------------------ what a job says
def layer_split(job: Job) -> list[int]:
    """Layers of each model chunk [virtual stage]; one each where durations are explicit."""
    p = job.parallelism
    if p.layer_split != "auto":
        return list(p.layer_split)
    if job.model.durations is not None:
        return [1] * (p.pp * p.vpp)
    if FRAMEWORKS[p.framework].splits_by_cost and p.vpp == 1 and job.model.layers is None:
        return cost_split(job.model, p.pp * p.vpp)
    return even_split(job.model.depth, p.pp * p.vpp)


def provenance(job: Job) -> dict[str, str]:
    """Say where each value came from, by dotted key.

    That is "file:line", "--set", "preset" (a named model's size) or "default".
    """
    out: dict[str, str] = {}
    preset = PRESETS.get(job.model.name or "", {})

    def visit(block: BaseModel, path: KeyPath) -> None:
        for name in type(block).model_fields:
            value, here = getattr(block, name), (*path, name)
            if isinstance(value, BaseModel):
                visit(value, here)
                continue
            place = job._places.get(".".join(here))
            if place is None or (value is None and name != "library"):
                place = "preset" if path == ("model",) and name in preset else "default"
            out[".".join(here)] = "--set" if is_override(place) else place

    for block in BLOCKS:
        visit(getattr(job, block), (block,))
    return out


def flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Walk a nested mapping: dotted key and value, in order; what is not set is left out.

    Examples
    --------
    >>> list(flatten({"a": {"b": 1, "c": None}, "d": [2]}))
    [('a.b', 1), ('d', [2])]
    """
    for key, value in values.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, name)
        elif value is not None and value != {}:
            yield name, value


def given_values(job: Job) -> dict[str, Any]:
    """Return what a job was given, as a file would have it; what follows from it is left out.

    A job rebuilt from a result does not know what it was given, and gives all.
    """
    values = job.model_dump(mode="json", exclude={"name", "source"})
    sources = provenance(job)
    if all(source in ("default", "preset") for source in sources.values()):
        if values["parallelism"]["global_batch"] is not None:
            del values["parallelism"]["microbatches"]  # they follow
        return values

    def keep(tree: dict[str, Any], path: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in tree.items():
            here = f"{path}.{name}" if path else name
            if here in sources:
                if sources[here] not in ("default", "preset"):
                    out[name] = value
            elif isinstance(value, dict):
                inner = keep(value, here)
                if inner or path:  # an effect that is there with nothing set is not one left out
                    out[name] = inner
        return out

    return keep(values, "")


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file, for editors.

    Nothing is required, because a `base` may hold what a file leaves out; a default that
    follows from another key is described and has no value.
    """
    schema = Job.model_json_schema()
    schema["title"] = "prism job"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for name in ("name", "source"):
        del schema["properties"][name]
    schema["properties"] = {
        "base": {"type": "string", "description": "A job to start from: a name or a file."},
        **schema["properties"],
    }
    for block in (schema, *schema["$defs"].values()):
        block.pop("required", None)
        for key, value in block["properties"].items():
            value.pop("title", None)
            if key in _DERIVED:
                value.pop("default", None)
    return schema
