"""A job made ready to run: its workload, step graph, effects, and the engine's arrays."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prism.common import sizes
from prism.common.compiled import finish_compiling, is_compiling
from prism.common.errors import PrismError, option
from prism.common.sizes import check_size
from prism.common.text import format_count
from prism.distributions.distribution import lognormal
from prism.distributions.library import Library, load_library
from prism.engine import LANES, compile_rest
from prism.jobs.job import Job
from prism.simulation.assembly import build_program
from prism.simulation.effects.residual import Treatment
from prism.simulation.effects.run import RunSpread
from prism.simulation.effects.step import StepFactor
from prism.simulation.no_dependence import pool_program
from prism.simulation.program import Program, join_idle, thread_bytes
from prism.simulation.sampledreplicas import (
    ENGINES,
    Choice,
    choose_engine,
    count_draws,
    sample_replicas,
)
from prism.simulation.tracemodel.arrays import (
    build_trace_graph_arrays,
    build_trace_program,
    kernel_class,
    step_profile,
)
from prism.simulation.tracemodel.file import load_model
from prism.simulation.tracemodel.graph import LATENCY, LEAD
from prism.simulation.tracemodel.model import TraceModel, check_trace_job, settled
from prism.simulation.variability import (
    Variability,
    is_communication,
    resolve_variability,
)
from prism.workload.build import Workload, build_workload
from prism.workload.opgraph import StepGraph, retime
from prism.workload.stepgraph import job_graph
from prism.workload.work import scaled


@dataclass(frozen=True)
class Prepared:
    """A job made ready to run: what is computed, and the arrays that compute it."""

    job: Job
    workload: Workload | None  # None: a fitted trace, which knows no model
    graph: StepGraph
    program: Program
    choice: Choice | None = None  # which replicas are simulated, where `prepare` chose
    source: Variability | TraceModel | None = None  # what the program holds beside job and graph

    @property
    def effects(self) -> Variability:
        """Effects of the job; of a fitted trace as far as a run needs them."""
        if isinstance(self.source, TraceModel):
            return model_variability(self.job, self.source)
        assert self.source is not None
        return self.source


def prepare(job: Job, seed: int, library: Library | None = None, engine: str = "exact") -> Prepared:
    """Build workload, step graph and engine arrays of a job, over another library where given.

    `engine`, one of `prism.simulation.sampledreplicas.ENGINES`: whether all replicas are simulated.

    Raises
    ------
    PrismError
        The job asks for what cannot be built.
    """
    if engine not in ENGINES:
        raise PrismError(f"engine {engine!r}: expected one of {', '.join(ENGINES)}")
    _check_size(job)
    if is_compiling():
        compile_rest()  # what the other process waits for
    if job.variability.model is not None:
        step = prepare_trace(job, load_model(job.variability.model), seed, engine)
    else:
        step = _prepare_job(job, seed, _library(job) if library is None else library, engine)
    finish_compiling()
    return step


def _prepare_job(job: Job, seed: int, library: Library | None, engine: str) -> Prepared:
    """Build workload, step graph and engine arrays of a job that no trace stands for."""
    workload = build_workload(job, library)
    graph = job_graph(job, workload, job.parallelism.microbatches, job.variability.resolution)
    return _finish_job(job, workload, graph, library, seed, engine)


def prepare_again(step: Prepared, library: Library, seed: int) -> Prepared:
    """Prepare a job over its library with other spreads, and factors that it had none of."""
    assert step.workload is not None  # no fitted trace
    graph = retime(step.graph, scaled(step.graph.op_types, library))
    return _finish_job(step.job, scaled(step.workload, library), graph, library, seed, "exact")


def _finish_job(
    job: Job, workload: Workload, graph: StepGraph, library: Library | None, seed: int, engine: str
) -> Prepared:
    variability = resolve_variability(job, library, workload)
    program = build_program(job, graph, variability, seed)
    step = Prepared(job, workload, graph, *choose_engine(program, engine), variability)
    check_threads(step, 1)
    return step


def prepare_trace(job: Job, model: TraceModel, seed: int, engine: str = "exact") -> Prepared:
    """Build the engine's arrays of a job that a fitted trace stands for."""
    check_trace_job(job, model)
    scales = {"op": job.variability.kernel_scale, "gap": job.variability.host_scale}
    if set(scales.values()) != {1.0}:
        fixed = (LATENCY[-1], LEAD)
        model = settled(model, [
            1.0 if n.name in fixed else scales.get(n.kind, 1.0) for n in model.nodes
        ])  # fmt: skip
    graph = build_trace_graph_arrays(model, job.parallelism.dp)
    program = _trace_program(job, model, graph, seed)
    return Prepared(job, None, graph, *choose_engine(program, engine), model)


def _trace_program(job: Job, model: TraceModel, graph: StepGraph, seed: int) -> Program:
    same = job.parallelism.dp == model.n_replicas
    ranks = job.variability.ranks or ("measured" if same else "drawn")
    program = build_trace_program(model, graph, ranks == "measured")
    return pool_program(program, graph, seed) if job.variability.dependence == "none" else program


def model_variability(job: Job, model: TraceModel) -> Variability:
    """Effects of a fitted trace as far as the run needs them: the step factor and its memory."""
    cv = math.sqrt(float(model.weight @ (step_profile(model) - 1.0) ** 2))
    given, memory = job.variability.model_error, model.correlation_steps * model.measured_mean
    return Variability(
        factors=(StepFactor(lognormal(cv), memory),), dependence=job.variability.dependence,
        run=RunSpread(model_error=model.mean_error if given is None else given),
    )  # fmt: skip


def _check_size(job: Job) -> None:
    """Refuse a job whose graph and arrays would take too much memory or time to build."""
    p, layers = job.parallelism, job.model.depth
    chunks = p.pp * p.vpp if p.pp > 1 else max(1, layers)
    kinds = 3 if p.splits else 2
    ops = kinds * p.microbatches * chunks
    way_out = "parallelism.microbatches, pp, vpp, dp, model.n_layers or cluster.nodes"
    counts: dict[str, tuple[float, sizes.Cost]] = {}
    if job.variability.resolution == "kernel":
        ops *= p.stage_gpus * max(1, 16 * layers // chunks)  # some 16 kernels a layer
        counts["kernels"] = ops, sizes.KERNEL
        way_out += ", or take resolution op"
    else:  # the first chunk, the last, and those between have kinds of ops of their own
        counts["ops"] = ops, sizes.COMPUTE_OP
        counts["layers of an op"] = kinds * min(chunks, 3) * layers / chunks, sizes.LAYER
    counts |= {
        "pairs of stages": (p.pp**2, sizes.STAGE_PAIR),
        "ops by stage": (p.pp * ops, sizes.OP_OF_STAGE),
        "GPUs": (job.n_nodes * job.cluster.gpus_per_node, sizes.GPU),
    }
    check_size(job.source, counts, way_out)


def check_threads(step: Prepared, threads: int) -> None:
    """Refuse a step that takes too much memory, of every thread, or time, of a single block."""
    counts = {
        f"bytes of buffers on {format_count(threads, 'thread')}": (
            thread_bytes(step.program) * threads, sizes.BYTE
        ),
        "op-samples of a block": (count_draws(step.program) * LANES, sizes.OP_SAMPLE),
    }  # fmt: skip
    way_out = f"parallelism.dp or microbatches, or {option('threads')}"
    check_size(step.job.source, counts, way_out)


def _library(job: Job) -> Library | None:
    name = job.variability.library
    return load_library(name) if name else None


def treat_classes(step: Prepared, treatments: Mapping[str, Treatment], seed: int) -> Program:
    """Build a job's program anew with some kernel classes treated; of a trace, made faster."""
    if isinstance(step.source, TraceModel):
        factor = {name: treatment.factor for name, treatment in treatments.items()}
        model = settled(step.source, [
            factor.get(kernel_class(node), 1.0) for node in step.source.nodes
        ])  # fmt: skip
        return _trace_program(step.job, model, step.graph, seed)
    return build_program(step.job, step.graph, step.effects.treat(treatments), seed)


def silent_model(model: TraceModel) -> TraceModel:
    """Return a fitted trace with communication of zero cost."""
    return settled(model, [0.0 if is_communication(kernel_class(n)) else 1.0 for n in model.nodes])


def silence(step: Prepared, seed: int, classes: Collection[str] | None = None) -> Program:
    """Return a step's program with communication of zero cost; ranks still wait for each other.

    Some classes of it where they are given.
    """
    if classes is None:
        classes = [c for c in step.program.classes if is_communication(c)]
    program = join_idle(treat_classes(step, {c: Treatment(factor=0.0) for c in classes}, seed))
    return program if step.program.sample is None else sample_replicas(program)
