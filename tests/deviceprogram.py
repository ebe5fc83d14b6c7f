"""A training program on host and GPU whose truth is known, and the profiler traces it leaves.

A rank's program is the list of one step's host actions. Its host walks the list step after step
and waits only where an action does, or where its queue is full; the GPU runs what was issued.
`simulate` gives a `Run`: true times, and Kineto files of them. Draws are keyed by seed, step and
rank, so that a what-if differs from its run by nothing else. `programs_made` has programs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

LATENCY = 5e-6
"""From the end of a launching call to the earliest start on the device [s]."""
GAP = 1.2e-6
"""From the end of what an activity waits for, on its stream or another, to its start [s]."""
RETURN = 4e-6
"""From an activity's end to the return of the call that waits for it [s]."""


@dataclass(frozen=True)
class Action:
    """One host call: launch (kernel, copy, fill), collective, graph, record, wait or sync."""

    do: str
    name: str = ""
    seconds: float = 0.0  # on the device; of a collective from the last arrival
    stream: int = 7  # of a sync, -1 for the device
    python: float = 12e-6  # host time before the call [s]
    call: float = 8e-6  # length of the call where it need not wait [s]
    op: str = ""  # host op around it
    thread: int = 1
    event: str = ""  # recorded or waited for
    group: tuple[int, ...] = ()  # ranks of a collective
    n_bytes: int = 0  # of a copy, fill or message
    graph: tuple[tuple[str, float], ...] = ()  # kernels of a graph: name, seconds
    optimizer: bool = False

    @property
    def kernels(self) -> tuple[tuple[str, float], ...]:
        """Name and seconds of what it puts on the device."""
        one = ((self.name, self.seconds),) if self.do in ("launch", "collective") else ()
        return self.graph or one


@dataclass(frozen=True)
class Program:
    """The actions of one step of each rank; `slowness` is a factor on each rank's own kernels."""

    ranks: tuple[Sequence[Action], ...]
    slowness: tuple[float, ...] = ()
    depth: int = 1024  # launches that may be pending on a device
    kernel_cv: float = 0.0
    host_cv: float = 0.0
    step_cv: float = 0.0  # of a factor that all own kernels of a step share, on all ranks


@dataclass(eq=False, slots=True)
class Activity:
    """What runs on the device; times [s] are not a number until known."""

    name: str
    action: Action
    seconds: float  # without waiting for other ranks
    issue: float  # when the launching call has put it into the queue
    after: list[Activity]  # what it waits for
    key: tuple = ()  # of a collective: group and number
    start: float = math.nan
    end: float = math.nan


@dataclass(eq=False, slots=True)
class Call:
    """A host call as it went: `begin` of the Python before it, `start` and `end` of the call."""

    action: Action
    step: int
    correlation: int
    begin: float
    start: float = math.nan
    end: float = math.nan
    made: list[Activity] = field(default_factory=list)
    record: Call | None = None  # of the event that a wait is for


class _Rank:
    def __init__(self, program: Program, rank: int, n_steps: int, seed: int, scales) -> None:
        self.program, self.rank, self.n_steps = program, rank, n_steps
        self.seed, self.scales = seed, scales
        self.calls: list[Call] = []
        self.begins: list[float] = []  # of steps on the host, and of the one after the last
        self.queues: dict[int, deque[Activity]] = {}
        self.last: dict[int, Activity] = {}
        self.waits: dict[int, list[Activity]] = {}
        self.launched: list[Activity] = []  # the last one of each launch

    def _draw(self, step: int) -> tuple[Iterator[float], Iterator[float], Iterator[float]]:
        """Factors of the step's own kernels, collectives and host actions."""
        p, actions = self.program, self.program.ranks[self.rank]
        shared, own = (np.random.default_rng([self.seed, step, r]) for r in (0, self.rank + 1))

        def factors(generator, cv, size):
            return np.exp(cv * generator.standard_normal(size) - 0.5 * cv**2)

        slow = p.slowness[self.rank] if p.slowness else 1.0
        slow *= self.scales[0] * factors(shared, p.step_cv, 1)[0]
        together = self.scales[0] * factors(shared, p.kernel_cv, len(actions))
        kernels = slow * factors(own, p.kernel_cv, sum(len(a.kernels) for a in actions))
        host = self.scales[1] * factors(own, p.host_cv, len(actions))
        return iter(kernels.tolist()), iter(together.tolist()), iter(host.tolist())

    def walk(self) -> Iterator[Activity]:
        """Run the host; yields each activity whose end it must know to go on."""
        now, met, records = 0.0, Counter(), {}
        for step in range(self.n_steps):
            kernels, together, host = self._draw(step)
            self.begins.append(now)
            for action in self.program.ranks[self.rank]:
                factor = next(host)
                call = Call(action, step, 100 + len(self.calls), now, now + factor * action.python)
                self.calls.append(call)
                until = call.start
                if action.kernels and len(self.launched) >= self.program.depth:
                    slot = self.launched[-self.program.depth]
                    yield slot
                    until = max(until, slot.end)
                now = until + factor * action.call
                for name, seconds in action.kernels:
                    drawn = seconds * next(together if action.group else kernels)
                    key = (action.group, met[action.group]) if action.group else ()
                    met[action.group] += 1
                    made = Activity(name, action, drawn, now, self.awaited(action.stream), key)
                    call.made.append(made)
                    self.last[action.stream] = made
                    self.waits[action.stream] = []
                    self.queues.setdefault(action.stream, deque()).append(made)
                if action.do == "record":
                    records[action.event] = call, self.awaited(action.stream)
                elif action.do == "wait":
                    call.record, awaited = records[action.event]
                    self.waits.setdefault(action.stream, []).extend(awaited)
                if call.made:
                    self.launched.append(call.made[-1])
                returns = call.made if "Pageable" in action.name else []
                if action.do == "sync":
                    returns = [a for s, a in self.last.items() if action.stream in (s, -1)]
                for awaited in returns:
                    yield awaited
                    now = max(now, awaited.end + RETURN)
                call.end = now
        self.begins.append(now)

    def awaited(self, stream: int) -> list[Activity]:
        """List what the stream's next activity waits for."""
        before = [self.last[stream]] if stream in self.last else []
        return before + self.waits.get(stream, [])

    def settle(self, meetings: dict[tuple, list[Activity]]) -> bool:
        """Give times to all activities whose past is known; says whether there were any."""
        moved, again = False, True
        while again:
            again = False
            for queue in self.queues.values():
                while queue:
                    a = queue[0]
                    if math.isnan(a.start):
                        ends = [before.end for before in a.after]
                        if any(map(math.isnan, ends)):
                            break
                        a.start = max([a.issue + LATENCY, *(end + GAP for end in ends)])
                        moved = True
                        members = meetings.setdefault(a.key, []) if a.key else []
                        members.append(a)
                        if len(members) == max(1, len(a.action.group)):
                            end = max(m.start for m in members) + max(m.seconds for m in members)
                            for member in members:
                                member.end = end
                    if math.isnan(a.end):
                        break
                    queue.popleft()
                    again = True
        return moved


def simulate(
    program: Program, steps: int = 10, seed: int = 0, kernel_scale: float = 1.0,
    launch_scale: float = 1.0,
) -> Run:  # fmt: skip
    """Run a program from an empty queue; scales are of device seconds and of host seconds."""
    scales = kernel_scale, launch_scale
    ranks = [_Rank(program, r, steps, seed, scales) for r in range(len(program.ranks))]
    meetings: dict[tuple, list[Activity]] = {}
    hosts = {rank: rank.walk() for rank in ranks}
    needs: dict[_Rank, Activity | None] = dict.fromkeys(ranks)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank in hosts and ((need := needs[rank]) is None or not math.isnan(need.end)):
                moved = True
                needs[rank] = next(hosts[rank], None)
                if needs[rank] is None:
                    del hosts[rank]
            moved |= rank.settle(meetings)
    assert not hosts and not any(q for rank in ranks for q in rank.queues.values()), "deadlock"
    return Run(program, [rank.calls for rank in ranks], np.array([r.begins for r in ranks]).T)


def _uncovered(begin: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Seconds between successive edges in which none of the intervals lies."""
    order = np.argsort(begin, kind="stable")
    until = np.maximum.accumulate(end[order])[:-1]
    width = np.maximum(begin[order][1:] - until, 0.0)
    total = np.c_[np.r_[0.0, np.cumsum(width)[:-1]], np.cumsum(width)].ravel()
    return np.diff(np.interp(edges, np.c_[until, until + width].ravel(), total))


@dataclass
class Run:
    """A program as it ran: `calls` by rank, and when steps begin on the hosts, [step + 1, rank]."""

    program: Program
    calls: list[list[Call]]
    begins: np.ndarray

    def activities(self, rank: int) -> list[Activity]:
        """Device activities of a rank in the order of their launch."""
        return [a for call in self.calls[rank] for a in call.made]

    @cached_property
    def ends(self) -> np.ndarray:
        """When the device work of each step ends, [step, rank] s."""
        ends = np.full((len(self.begins) - 1, len(self.calls)), -np.inf)
        for rank, calls in enumerate(self.calls):
            for call in calls:
                for a in call.made:
                    ends[call.step, rank] = max(ends[call.step, rank], a.end)
        return ends

    @property
    def periods(self) -> np.ndarray:
        """From one step's last end over ranks to the next one's, [step - 1] s."""
        return np.diff(self.ends.max(axis=1))

    @property
    def lead(self) -> np.ndarray:
        """From the end of a step on the host to that on the device, [step, rank] s."""
        return self.ends - self.begins[1:]

    @property
    def most_pending(self) -> list[int]:
        """Most launches that were issued and had not ended, of each rank."""
        found = []
        for calls in self.calls:
            issue, end = np.array([(c.made[-1].issue, c.made[-1].end) for c in calls if c.made]).T
            left = np.searchsorted(np.sort(end), issue, side="right")
            found.append(int((np.arange(1, issue.size + 1) - left).max()))
        return found

    def period(self, first: int = 0) -> float:
        """Mean period from the end of step `first` on [s]."""
        return float(self.periods[first:].mean())

    def gap_share(self, first: int = 0, since: str = "issue") -> float:
        """Share of the periods in which a GPU had nothing queued; since="start": nothing ran."""
        edges, free = self.ends.max(axis=1)[first:], 0.0
        for rank in range(len(self.calls)):
            found = self.activities(rank)
            begin = np.array([getattr(a, since) for a in found])
            free += _uncovered(begin, np.array([a.end for a in found]), edges).sum()
        return free / len(self.calls) / (edges[-1] - edges[0])

    def busy(self, waiting: bool = True) -> dict[str, float]:
        """Mean seconds per step and rank by name; `waiting` for other ranks included or not."""
        total: Counter[str] = Counter()
        for rank in range(len(self.calls)):
            for a in self.activities(rank):
                total[a.name] += a.end - a.start if waiting else a.seconds
        return {name: seconds / self.ends.size for name, seconds in total.items()}

    def write(
        self, folder: Path, marks: str = "profiler", clock_offset_s: Sequence[float] = (),
        clock_drift: Sequence[float] = (), first_step_recorded: int = 0, record_waits: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Write one Kineto file a rank; `marks` are "profiler", "optimizer" or "none".

        Of what was launched before the first step recorded, only the activities that start later
        are written. `record_waits` adds the synchronisation events that say who waits for whom.
        """
        assert marks in ("profiler", "optimizer", "none")
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank in range(len(self.calls)):
            offset = clock_offset_s[rank] if len(clock_offset_s) else 0.0
            rate = 1.0 + (clock_drift[rank] if len(clock_drift) else 0.0)
            writer = _Writer(self, rank, 1e6 + 1e6 * offset, 1e6 * rate)
            made = writer.trace(marks, first_step_recorded, record_waits)
            paths.append(folder / f"rank{rank}.json")
            paths[-1].write_bytes(msgspec.json.encode(made))
        return paths


_API = {
    "launch": "cudaLaunchKernel", "collective": "cudaLaunchKernel", "graph": "cudaGraphLaunch",
    "record": "cudaEventRecord", "wait": "cudaStreamWaitEvent", "sync": "cudaStreamSynchronize",
}  # fmt: skip


class _Writer:
    def __init__(self, run: Run, rank: int, origin_us: float, us: float) -> None:
        self.run, self.rank, self.origin_us, self.us = run, rank, origin_us, us
        self.events: list[dict] = []

    def add(self, cat: str, name: str, begin: float, end: float, tid: int, **args) -> None:
        ts, until = (round(float(self.origin_us + self.us * t), 3) for t in (begin, end))
        pid = self.rank if cat.startswith(("kernel", "gpu")) else 4000 + self.rank
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts,
                            "dur": round(until - ts, 3), "args": args})  # fmt: skip

    def trace(self, marks: str, first: int, record_waits: bool) -> dict:
        begins, world = self.run.begins[:, self.rank], len(self.run.calls)
        optimizer: dict[int, list[Call]] = {}
        for call in self.run.calls[self.rank]:
            if call.step >= first:
                self.host(call, record_waits)
                if call.action.optimizer:
                    optimizer.setdefault(call.step, []).append(call)
            for idx, a in enumerate(call.made):
                if call.step >= first or a.start >= begins[first]:
                    self.device(call, a, idx)
        for step in range(first, len(begins) - 1):
            if marks == "profiler":
                name = f"ProfilerStep#{step}"
                self.add("user_annotation", name, begins[step], begins[step + 1], 1)
            if marks != "none" and step in optimizer:
                calls, name = optimizer[step], "Optimizer.step#AdamW.step"
                self.add("user_annotation", name, calls[0].begin, calls[-1].end, 1)
        now, last = begins[-1] + 2e-5, self.run.ends[:, self.rank].max() + RETURN
        self.add("cuda_runtime", "cudaDeviceSynchronize", now, max(now, last), 1, correlation=99)
        self.events.sort(key=lambda event: event["ts"])
        info = {"backend": "nccl", "rank": self.rank, "world_size": world}
        return {"schemaVersion": 1, "distributedInfo": info, "displayTimeUnit": "ms",
                "baseTimeNanoseconds": 1_790_000_000_000_000_000,
                "traceEvents": self.events}  # fmt: skip

    def host(self, call: Call, record_waits: bool) -> None:
        a = call.action
        api = _API[a.do]
        if a.name.startswith("Mem"):
            api = "cudaMemsetAsync" if a.name.startswith("Memset") else "cudaMemcpyAsync"
        elif a.name.startswith("nvjet"):
            api = "cuLaunchKernelEx"
        elif a.do == "sync" and a.stream < 0:
            api = "cudaDeviceSynchronize"
        inside = 0.5 * (call.begin + call.start)
        if a.op:
            self.add("cpu_op", a.op, inside, call.end, a.thread)
        if a.group:
            name = "record_param_comms"
            self.add("cpu_op", name, inside, call.end, a.thread, **self.message(a))
        cat = "cuda_driver" if api.startswith("cuL") else "cuda_runtime"
        self.add(cat, api, call.start, call.end, a.thread, correlation=call.correlation)
        if call.record is not None and record_waits:
            self.add(
                "cuda_sync", "Stream Wait Event", call.start, call.end, a.stream, stream=a.stream,
                correlation=call.correlation, wait_on_stream=call.record.action.stream,
                wait_on_cuda_event_record_corr_id=call.record.correlation,
            )  # fmt: skip

    def device(self, call: Call, made: Activity, idx: int) -> None:
        a, cat = call.action, "kernel"
        args = {"device": self.rank, "stream": a.stream, "correlation": call.correlation}
        if made.name.startswith("Mem"):
            cat = "gpu_memset" if made.name.startswith("Memset") else "gpu_memcpy"
            args |= {"bytes": a.n_bytes}
        else:
            args |= {"grid": [round(1e6 * a.seconds) + 1, 1, 1], "block": [128, 1, 1]}
        if a.graph:
            args |= {"graph id": 1, "graph node id": idx + 1}
        self.add(cat, made.name, made.start, made.end, a.stream, **args, **self.message(a))

    def message(self, a: Action) -> dict:
        if not a.group:
            return {}
        kind, n = a.name.split("_")[1].lower(), a.n_bytes // 2  # ncclDevKernel_AllReduce_...
        return {"Collective name": kind, "In msg nelems": n, "Out msg nelems": n,
                "dtype": "BFloat16", "Group size": len(a.group),
                "Process Group Name": "_".join(map(str, a.group)),
                "Process Group Ranks": str(list(a.group))}  # fmt: skip
