"""Profiler traces of a made-up job whose graph is known: streams, waits, ranks, host issue.

All ranks run one program, a list of host calls. `simulate` walks it with drawn durations and
gives every time, so that a change of one kernel has a true answer; `events` writes the times as a
profiler does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

LATENCY_US = 6.0
GAP_US = 1.5
WAIT_US = 1.0
RETURN_US = 4.0


@dataclass(frozen=True)
class Call:
    """One host call: launch, copy_back (a blocking copy), collective, wait or sync."""

    do: str
    name: str = ""
    stream: int = 7
    mean_us: float = 0.0
    on_stream: int = -1
    host_us: float = 8.0


@dataclass
class Times:
    """[step, rank, call] times in us; not a number where a call has none."""

    call: np.ndarray
    call_end: np.ndarray
    start: np.ndarray
    end: np.ndarray
    step_start: np.ndarray
    edges: set = field(default_factory=set)

    def span(self, step, rank):
        """First start to last end of the step's device activities on one rank [us]."""
        return np.nanmax(self.end[step, rank]) - np.nanmin(self.start[step, rank])


def draw(program, n_steps, n_ranks, seed=0, cv=0.1, host_cv=0.2):
    """Durations and host times [step, rank, call] in us."""
    generator = np.random.default_rng(seed)
    shape = (n_steps, n_ranks, len(program))
    mean = np.array([call.mean_us for call in program])
    host = np.array([call.host_us for call in program])
    spread = np.exp(cv * generator.standard_normal(shape) - 0.5 * cv**2)
    jitter = np.exp(host_cv * generator.standard_normal(shape) - 0.5 * host_cv**2)
    return np.round(mean * spread, 3), np.round(host * jitter, 3)


def simulate(program, duration, host, seed=1, jitter_us=0.5, late_us=0.0):
    """Walk the program on all ranks; a collective ends for all `duration` after the last start."""
    generator = np.random.default_rng(seed)
    latency = LATENCY_US + jitter_us * np.abs(generator.standard_normal(duration.shape))
    gap = GAP_US + 0.3 * jitter_us * np.abs(generator.standard_normal(duration.shape)) + late_us
    wait = WAIT_US + jitter_us * np.abs(generator.standard_normal(duration.shape))
    n_steps, n_ranks, n_calls = duration.shape
    empty = np.full(duration.shape, np.nan)
    times = Times(empty, empty.copy(), empty.copy(), empty.copy(), np.zeros((n_steps, n_ranks)))
    clock = np.zeros(n_ranks)
    ends = [{} for _ in range(n_ranks)]
    for step in range(n_steps):
        clock += 50.0
        times.step_start[step] = clock
        last, pending = {}, {}
        for i, call in enumerate(program):
            clock += host[step, :, i]
            times.call[step, :, i] = clock
            if call.do == "wait":
                if call.on_stream in last:
                    pending.setdefault(call.stream, []).append(last[call.on_stream])
                times.call_end[step, :, i] = clock + 1.0
                continue
            if call.do == "sync":
                until = [
                    max(clock[r], ends[r].get(call.stream, 0.0) + RETURN_US) for r in range(n_ranks)
                ]
                clock = np.array(until)
                times.call_end[step, :, i] = clock
                continue
            begin = clock + latency[step, :, i]
            for r in range(n_ranks):
                begin[r] = max(begin[r], ends[r].get(call.stream, -1e9) + gap[step, r, i])
                for j in pending.get(call.stream, ()):
                    begin[r] = max(begin[r], times.end[step, r, j] + wait[step, r, i])
            for j in pending.pop(call.stream, ()):
                times.edges.add((j, i))
            long = duration[step, :, i]
            end = begin.max() + long.max() if call.do == "collective" else begin + long
            times.start[step, :, i], times.end[step, :, i] = begin, end
            last[call.stream] = i
            for r in range(n_ranks):
                ends[r][call.stream] = times.end[step, r, i]
            times.call_end[step, :, i] = clock + 5.0
            if call.do == "copy_back":
                clock = times.end[step, :, i] + RETURN_US
                times.call_end[step, :, i] = clock
    return times


def training_step(n_layers=6, kernels=6, mean_us=60.0, host_us=8.0):
    """Data-parallel step: copy in, forward, backward with overlapped all-reduces, update."""
    program = [
        Call("launch", "Memcpy HtoD (Pinned -> Device)", 22, 120.0, host_us=host_us),
        Call("wait", stream=7, on_stream=22, host_us=2.0),
    ]

    def add(name, stream=7, factor=1.0, do="launch"):
        program.append(Call(do, name, stream, factor * mean_us, host_us=host_us))

    for layer in range(n_layers):
        for k in range(kernels):
            add(f"ampere_sgemm_{32 << k}x64_nn", factor=0.5 + 0.25 * ((layer + k) % 5))
    add("Memcpy DtoH (Device -> Pageable)", factor=0.05, do="copy_back")
    for layer in range(n_layers):
        for k in range(kernels):
            add(f"void at::native::backward_kernel_{k}<float>", factor=0.8 + 0.3 * (k % 3))
        program.append(Call("wait", stream=21, on_stream=7, host_us=2.0))
        add("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", 21, 5.5, "collective")
        if layer % 2:
            program.append(Call("wait", stream=23, on_stream=7, host_us=2.0))
            add("void reduce_metrics<float>", 23, 2.0)
            program.append(Call("wait", stream=7, on_stream=23, host_us=2.0))
    program.append(Call("wait", stream=7, on_stream=21, host_us=2.0))
    for _ in range(3):
        add("void multi_tensor_apply_kernel<AdamFunctor>", factor=1.5)
    program.append(Call("sync", stream=7, host_us=5.0))
    return program


_API = {
    "cuda": ("cuda_runtime", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamSynchronize",
             "cudaMemcpyAsync", "cudaLaunchKernel"),
    "hip": ("cuda_runtime", "hipEventRecord", "hipStreamWaitEvent", "hipStreamSynchronize",
            "hipMemcpyWithStream", "hipExtModuleLaunchKernel"),
    "xpu": ("xpu_runtime", "urEnqueueEventsWaitWithBarrierExt", "urEnqueueEventsWaitWithBarrierExt",
            "urQueueFinish", "urEnqueueUSMMemcpy", "urEnqueueKernelLaunch"),
}  # fmt: skip
"""Category and calls by the maker of the device: record, wait, sync, copy, launch."""
_NAMES = {
    "hip": {"(Device -> Pageable)": "(Device -> Host)", "(Pinned -> Device)": "(Host -> Device)"},
    "xpu": {"DtoH (Device -> Pageable)": "D2M (Device -> Memory)",
            "HtoD (Pinned -> Device)": "H2D (Host -> Device)",
            "ncclDevKernel_AllReduce": "oneccl_allreduce"},
}  # fmt: skip


def events(
    program, times, rank, recorded=False, world=1, origin_us=1_000_000.0, filler=0, maker="cuda"
):
    """One rank's profiler file as a dict; `recorded` adds synchronisation events."""
    found = []
    runtime, record, wait, sync, copy_call, launch = _API[maker]
    api = {"wait": wait, "sync": sync, "copy_back": copy_call}

    def add(cat, name, ts, dur, tid, **args):
        for of_cuda, own in _NAMES.get(maker, {}).items():
            name = name.replace(of_cuda, own)
        if maker == "xpu" and cat in ("kernel", "gpu_memcpy"):
            args["sycl queue"] = args.pop("stream")
        ts, dur = round(float(ts + origin_us), 3), round(float(dur), 3)
        found.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
             "args": args}
        )  # fmt: skip

    correlation = 0
    for step in range(times.call.shape[0]):
        begin = times.step_start[step, rank]
        until = np.nanmax(times.call_end[step, rank]) + 2.0
        add("user_annotation", f"ProfilerStep#{step + 10}", begin, until - begin, 5)
        records = {}
        for i, call in enumerate(program):
            correlation += 2
            at, done = times.call[step, rank, i], times.call_end[step, rank, i]
            if call.do == "wait":
                add(runtime, record, at - 0.6, 0.4, 5, correlation=correlation)
                records[correlation] = call
                add(runtime, wait, at, 0.4, 5, correlation=correlation + 1)
                if recorded:
                    add("cuda_sync", "Stream Wait Event", at, 0.4, call.stream,
                        correlation=correlation + 1, stream=call.stream,
                        wait_on_stream=call.on_stream,
                        wait_on_cuda_event_record_corr_id=correlation)  # fmt: skip
                continue
            add(runtime, api.get(call.do, launch), at, done - at, 5, correlation=correlation)
            for k in range(filler):
                add("cpu_op", f"aten::some_operator_{k % 7}", at - 0.5 + 0.01 * k, 0.3, 5,
                    **{"External id": correlation, "Input Dims": [[1024, 8192], [8192, 512], []],
                       "Input type": ["float", "float", "Scalar"], "Sequence number": i,
                       "Call stack": "model.py(12): forward; layer.py(34): call"})  # fmt: skip
            if call.do == "sync":
                continue
            copy = call.name.startswith("Memcpy")
            if call.do == "collective":
                add("cpu_op", "c10d::allreduce_", at - 3.0, 6.0, 5)
                add("cpu_op", "record_param_comms", at - 2.0, 4.0, 5,
                    **{"Collective name": "allreduce", "In msg nelems": 1000 + i, "dtype": "Float",
                       "Group size": world, "Process Group Name": "0",
                       "Process Group Ranks": str(list(range(world)))})  # fmt: skip
            start, end = times.start[step, rank, i], times.end[step, rank, i]
            extra = {"bytes": 4096} if copy else {"grid": [i, 1, 1], "block": [128, 1, 1]}
            add("gpu_memcpy" if copy else "kernel", call.name, start, end - start, call.stream,
                correlation=correlation, stream=call.stream, device=rank, **extra)  # fmt: skip
    found.sort(key=lambda event: event["ts"])
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    return {"schemaVersion": 1, "distributedInfo": info, "traceEvents": found}


def write(folder, program, times, offsets_us=None, **options):
    """Write one file a rank; returns the paths."""
    n_ranks = times.call.shape[1]
    paths = []
    for rank in range(n_ranks):
        origin = 1_000_000.0 + (offsets_us[rank] if offsets_us is not None else 0.0)
        made = events(program, times, rank, world=n_ranks, origin_us=origin, **options)
        path = folder / f"rank{rank}.json"
        path.write_bytes(msgspec.json.encode(made))
        paths.append(path)
    return paths


def doubled(program, name, factor=2.0):
    """The program with one kernel's mean changed."""
    return [replace(c, mean_us=factor * c.mean_us) if c.name == name else c for c in program]
