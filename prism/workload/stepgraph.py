"""The step graph: which op of a training step waits for which.

Left out: contention between the streams of one GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from prism.cluster.groups import count_replicas
from prism.common.errors import PrismError
from prism.jobs.job import Job
from prism.jobs.pipelineshape import Action, Schedule, VirtualStages, play_rows
from prism.jobs.schedule import make_schedule
from prism.workload.build import Collective, Workload
from prism.workload.opgraph import START, Builder, OpType, StepGraph, build_arrays, step_seconds

Message = tuple[str, int, int]  # kind, virtual stage, microbatch


class Meeting(NamedTuple):
    """A blocking transfer: two neighbours exchange messages (kind, virtual stage, microbatch)."""

    stages: tuple[int, int]
    messages: frozenset[Message]


@dataclass(frozen=True)
class GraphOptions:
    """How a step is laid out; see the job file's `parallelism` block for meanings."""

    n_replicas: int = 1
    group_size: int = 1
    resolution: str = "op"
    p2p: str = "async"
    overlap: bool = True
    prefetch: int = 1
    reshard_after_forward: bool = False


@dataclass
class _Stage:
    """What a stage has reached."""

    last: list[int]  # last node of every group member
    pending: Counter[int]  # gradients still to come, by chunk
    split: frozenset[tuple[int, int]]  # (chunk, microbatch) of split backwards
    uses: list[int] = field(default_factory=list)  # chunks whose parameters are gathered, in order
    n_used: int = 0
    gathers: list[tuple[int, int]] = field(default_factory=list)  # by use: before it, beside it
    gather_stream: int = START
    reduce_stream: int = START
    gathered: dict[str, int] = field(default_factory=dict)  # group -> its last gather
    reduced: dict[str, int] = field(default_factory=dict)  # group -> its last reduce
    # gradients to reduce, and since when that may be, if not since now
    reduces: list[tuple[Collective, list[int] | None]] = field(default_factory=list)


class _Route(NamedTuple):
    """Where an action's input comes from and its output goes."""

    source: int | None  # virtual stage; None: none
    virtual: int
    link: int  # -1: no transfer


class _StepBuilder:
    """Walks the schedule once and lays the step's ops into a `Builder`."""

    def __init__(self, workload: Workload, schedule: Schedule, options: GraphOptions) -> None:
        schedule = Schedule(schedule)
        self.work, self.options, self.b = workload, options, Builder()
        self.virtual_stages = schedule.virtual_stages
        self.n_calls = 0
        members = options.group_size if options.resolution == "kernel" else 1
        splits = map(schedule.split_of, range(len(schedule)))
        self.stages = [
            _Stage([START] * members, Counter(a.chunk for a in row if a.kind == "B"), split)
            for row, split in zip(schedule, splits, strict=True)
        ]
        for s, (stage, row) in enumerate(zip(self.stages, schedule, strict=True)):
            uses = [a.chunk for a in row if a.kind != "W" and workload.gathers[s][a.chunk]]
            stage.uses = uses if options.reshard_after_forward else list(dict.fromkeys(uses))
        self.op_types: dict[tuple[str, int, int, bool], list[list[int]]] = {}
        self.routes: dict[tuple[str, int, int], _Route] = {}
        self.transfers: dict[tuple[int, int], list[int]] = {}  # (sender, link) -> op types
        self.arrived: dict[Message, int] = {}  # message -> node
        self.sent: dict[tuple[int, int], int] = {}  # (sender, far link) -> its last node
        self.blocking = options.p2p == "blocking" and len(schedule) > 1
        self.items: list[list[Action | Meeting]] = (
            blocking_items(schedule) if self.blocking else [list(a) for a in schedule]
        )

    def build(self) -> tuple[Builder, int]:
        """Lay all items in an order in which their inputs exist, then the step's end."""
        if not play_rows(self.items, self._try):
            raise PrismError("schedule: deadlock; some action comes before its input can exist")
        return self.b, self._end_of_step()

    def _try(self, s: int, heads: list[int]) -> bool:
        item = self.items[s][heads[s]]
        if isinstance(item, Meeting):
            peer = item.stages[0] if item.stages[1] == s else item.stages[1]
            if self.items[peer][heads[peer] : heads[peer] + 1] != [item]:
                return False
            self._meet(item)
            heads[peer] += 1
        else:
            kind, chunk, microbatch = item
            route = self.routes.get((kind, s, chunk)) or self._route(s, item)
            inputs = []
            if route.source is not None:
                arrived = self.arrived.get((kind, route.source, microbatch))
                if arrived is None:
                    return False
                inputs = [arrived]
            self._action(s, item, inputs, route)
        return True

    def _route(self, s: int, action: Action) -> _Route:
        """Find the way of all microbatches of a chunk."""
        stages, link = self.virtual_stages, None
        virtual, reader = stages.virtual(s, action.chunk), stages.next_of(action, s)
        if reader is not None and not self.blocking:
            link = stages.link(virtual, reader)
        source = stages.source_of(action, s)
        found = _Route(source, virtual, -1 if link is None else link)
        self.routes[action.kind, s, action.chunk] = found
        return found

    def _meet(self, meeting: Meeting) -> None:
        a, b = (self.stages[s] for s in meeting.stages)
        low, preds = min(meeting.stages), a.last + b.last
        for transfer in self.work.transfers(low):
            # one that takes time in a replica if any of its messages is sent there
            first = min(microbatch for _, _, microbatch in meeting.messages)
            number = self.b.number(OpType("transfer", low, collective=transfer, link=low))
            preds = [self.b.add(preds, number, stage=low, microbatch=first)]
        node = preds[0] if len(preds) == 1 else self.b.join(preds, stage=low)
        a.last, b.last = [node] * len(a.last), [node] * len(b.last)

    def _action(self, s: int, action: Action, inputs: list[int], route: _Route) -> None:
        stage = self.stages[s]
        kind, chunk, microbatch = action
        # a weight's gradient needs its input and its output's gradient, not the weight
        before, beside = (START, START) if kind == "W" else self._gather(s, chunk)
        waits = [before, *inputs]
        begin = [*stage.last, *waits]
        split = (chunk, microbatch) in stage.split
        op_types = self.op_types.get((kind, s, chunk, split))
        if op_types is None:
            op_types = self._op_types(s, action, split)
        if self.options.resolution == "kernel":
            self._lay_kernels(s, op_types, waits, action)
        else:
            ((number,),) = op_types
            stage.last = [self.b.add(begin, number, stage=s, microbatch=microbatch, chunk=chunk)]
        if beside != before:
            stage.last = [self.b.join([last, beside], stage=s) for last in stage.last]
        if kind != "W":
            self._send(s, action, route)
        if kind == ("W" if split else "B"):
            self._reduce(s, chunk, begin)

    def _op_types(self, s: int, action: Action, split: bool) -> list[list[int]]:
        """Numbers of an action's op types: one for the group, or one of each member."""
        work = self.work.chunks[s][action.chunk]
        op_kind, kernels = {
            "F": ("forward", work.forward),
            "B": ("backward", work.inputs if split else work.backward),
            "W": ("backward_weight", work.weights),
        }[action.kind]
        if self.options.resolution == "kernel":
            members = range(len(self.stages[s].last))
            types = [
                [OpType(op_kind, s, (k,), member=g) for g in ([-1] if k.group else members)]
                for k in kernels
            ]
        else:
            types = [[OpType(op_kind, s, kernels)]]
        found = [[self.b.number(op_type) for op_type in each] for each in types]
        self.op_types[action.kind, s, action.chunk, split] = found
        return found

    def _lay_kernels(
        self, s: int, op_types: list[list[int]], waits: list[int], action: Action
    ) -> None:
        """Lay every kernel on every rank of the group; a collective joins the group."""
        add = partial(
            self.b.add, stage=s, microbatch=action.microbatch, chunk=action.chunk, call=self.n_calls
        )
        self.n_calls += 1
        last = [self.b.join([p, *waits], stage=s) for p in self.stages[s].last]
        for numbers in op_types:
            if len(numbers) == 1:
                node = add(last, numbers[0])
                last = [node] * len(last)
                continue
            for g, number in enumerate(numbers):
                last[g] = add([last[g]], number)
        self.stages[s].last = last

    def _send(self, s: int, action: Action, route: _Route) -> None:
        end, link = self.b.join(self.stages[s].last, stage=s), route.link
        for i, number in enumerate([] if link < 0 else self._transfers(s, link)):
            # out of a site it queues behind the sender's last one
            queued = i == 0 and link in self.work.far_transfers
            preds = [end, self.sent.get((s, link), START)] if queued else [end]
            end = self.b.add(preds, number, stage=s, microbatch=action.microbatch)
            if queued:
                self.sent[s, link] = end
        self.arrived[action.kind, route.virtual, action.microbatch] = end

    def _transfers(self, s: int, link: int) -> list[int]:
        """Numbers of what a stage's transfer on a link takes in turn."""
        if (s, link) not in self.transfers:
            self.transfers[s, link] = [
                self.b.number(OpType("transfer", s, collective=transfer, link=link))
                for transfer in self.work.transfers(link)
            ]
        return self.transfers[s, link]

    # -- data parallelism -------------------------------------------------------------------

    def _gather(self, s: int, chunk: int) -> tuple[int, int]:
        """Parameters of a chunk, gathered on a stream of their own, prefetched a few uses ahead.

        Gathers and reductions of one group have one communicator, which runs them one at a time in
        the order in which they are issued. Returns what the chunk's kernels wait for, and what runs
        beside them.
        """
        stage = self.stages[s]
        if stage.n_used == len(stage.uses) or stage.uses[stage.n_used] != chunk:
            return START, START  # none, or the stage's order already puts this after the gather
        stage.n_used += 1
        ahead = self.options.prefetch if self.options.overlap else 0
        for use in stage.uses[len(stage.gathers) : stage.n_used + ahead]:
            needed = START
            for collective in self.work.gathers[s][use]:
                before = stage.gather_stream, stage.reduced.get(collective.group, START)
                stage.gather_stream = self._collective(s, [*before, *stage.last], collective)
                stage.gathered[collective.group] = stage.gather_stream
                needed = needed if collective.beside else stage.gather_stream
            stage.gathers.append((needed, stage.gather_stream))
        return stage.gathers[stage.n_used - 1]

    def _reduce(self, s: int, chunk: int, begin: list[int]) -> None:
        """Gradients of a chunk, reduced on a stream of their own after its last weight gradient."""
        stage = self.stages[s]
        stage.pending[chunk] -= 1
        if stage.pending[chunk] > 0 and not self.options.reshard_after_forward:
            return
        for collective in self.work.reduces[s][chunk]:
            stage.reduces.append((collective, begin if collective.beside else None))
        if self.work.hides_gradients:
            self._lay_reduces(s)

    def _lay_reduces(self, s: int) -> None:
        stage = self.stages[s]
        for collective, ready in stage.reduces:
            before = stage.reduce_stream, stage.gathered.get(collective.group, START)
            stage.reduce_stream = self._collective(s, [*(ready or stage.last), *before], collective)
            stage.reduced[collective.group] = stage.reduce_stream
        stage.reduces.clear()

    def _end_of_step(self) -> int:
        """Lay the chain of barriers at the end of the step; the last one is global."""
        for s in range(len(self.stages)):
            self._lay_reduces(s)
        done = [
            self.b.join([*st.last, st.reduce_stream], stage=s, is_global=True)
            for s, st in enumerate(self.stages)
        ]
        if self.work.layernorm_reduce is not None:
            norms = self.work.layernorm_reduce
            done = [self._collective(s, [d], norms) for s, d in enumerate(done)]
        if self.work.embedding_reduce is not None and len(done) > 1:
            both = self._collective(0, [done[0], done[-1]], self.work.embedding_reduce)
            done[0] = done[-1] = both
        if self.work.grad_norm_reduce is not None:
            done = [self._collective(0, done, self.work.grad_norm_reduce)] * len(done)
        exchange, beside = self.work.exchange, START
        for i, per_stage in enumerate((self.work.optimizer, *self.work.param_gathers)):
            for s, last in enumerate(per_stage):
                if last is not None:
                    done[s] = self._collective(s, [done[s]], last)
            if exchange is not None and i == 0:  # of what the optimizer has made
                end = self._collective(0, [] if exchange.beside else done, exchange)
                beside, done = (end, done) if exchange.beside else (START, [end] * len(done))
        return self.b.join([*done, beside], is_global=True)

    def _collective(self, s: int, preds: list[int], collective: Collective) -> int:
        """Lay a collective, of all replicas unless it is a shard group's own."""
        number = self.b.number(OpType(collective.op_kind, s, collective=collective))
        return self.b.add(preds, number, is_global=collective.group != "shard", stage=s)


def _source(action: Action, stage: int, stages: VirtualStages) -> Message | None:
    """Message that an action reads, None where it starts the pipeline or turns around."""
    virtual = stages.source_of(action, stage)
    return None if virtual is None else (action.kind, virtual, action.microbatch)


def blocking_items(schedule: Schedule) -> list[list[Action | Meeting]]:
    """Interleave a schedule of one chunk per stage with its blocking transfers.

    A send followed at once by a receive from the same neighbour is one meeting where the
    neighbour's order mirrors it, as Megatron's send-forward-recv-backward.
    """
    stages = VirtualStages(len(schedule))  # of one chunk each: a virtual stage is a stage
    answers: dict[Message, Message] = {}  # to a message, what its sender then reads from the reader
    for s, actions in enumerate(schedule):
        for a, b in pairwise(actions):
            received = _source(b, s, stages)
            if received is not None and received[1] == stages.next_of(a, s):
                answers[a.kind, s, a.microbatch] = received

    def meeting(message: Message, reader: int) -> Meeting:
        both, answer = (message[1], reader), answers.get(message)
        mutual = answer is not None and answers.get(answer) == message
        messages = (message, answer) if answer is not None and mutual else (message,)
        return Meeting((min(both), max(both)), frozenset(messages))

    items: list[list[Action | Meeting]] = []
    for s, actions in enumerate(schedule):
        row: list[Action | Meeting] = []
        for a in actions:
            received = _source(a, s, stages)
            if received is not None:
                before = meeting(received, s)
                if not row or row[-1] != before:
                    row.append(before)
            row.append(a)
            reader = stages.next_of(a, s)
            if reader is not None:
                row.append(meeting((a.kind, s, a.microbatch), reader))
        items.append(row)
    return items


def job_graph(job: Job, workload: Workload, microbatches: int, resolution: str = "op") -> StepGraph:
    """Build the arrays of a job's step, with a given number of microbatches."""
    return build_step_graph(workload, *_laid_out(job, workload, microbatches, resolution))


def job_seconds(job: Job, workload: Workload, microbatches: int) -> float:
    """Nominal seconds of a job's step, with a given number of microbatches."""
    return step_seconds(_StepBuilder(workload, *_laid_out(job, workload, microbatches)).build()[0])


def _laid_out(
    job: Job, workload: Workload, microbatches: int, resolution: str = "op"
) -> tuple[Schedule, GraphOptions]:
    p, chunks = job.parallelism, len(workload.chunks[0])
    sharded = p.data_parallel in ("fsdp", "hsdp")
    options = GraphOptions(
        n_replicas=count_replicas(job), group_size=p.stage_gpus, resolution=resolution, p2p=p.p2p,
        overlap=p.overlap,
        prefetch=p.prefetch if sharded else chunks,  # zero1 has room for all of its parameters
        reshard_after_forward=sharded and p.reshard_after_forward,
    )  # fmt: skip
    return make_schedule(p.schedule, p.pp, microbatches, chunks), options


def build_step_graph(workload: Workload, schedule: Schedule, options: GraphOptions) -> StepGraph:
    """Build the arrays of one step; PrismError where the schedule deadlocks."""
    builder, final = _StepBuilder(workload, schedule, options).build()
    return build_arrays(builder, final, options.n_replicas, len(schedule))
