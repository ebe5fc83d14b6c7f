"""The step graph: which op of a training step waits for which.

Turns a workload and a pipeline schedule into ops: compute and transfers of every stage, gathers and
reductions of parameters and gradients, and the barriers at the end of the step. Left out:
durations' variability (see `prism.simulation.variability`) and contention between the streams of
one GPU.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from prism.common.errors import PrismError
from prism.jobs.pipelineshape import Action, Schedule, VirtualStages, play_rows
from prism.workload.build import Collective, Kernel, Workload
from prism.workload.opgraph import START, Builder, OpType, StepGraph, build_arrays

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
    starts: list[list[int]] = field(default_factory=list)  # nodes before each use of parameters
    gathered: set[int] = field(default_factory=set)  # chunks
    gather_stream: int = START
    reduce_stream: int = START
    pending: dict[int, int] = field(default_factory=dict)  # chunk -> gradients still to come
    split: frozenset[tuple[int, int]] = frozenset()  # (chunk, microbatch) of split backwards
    reduces: list[Collective] = field(default_factory=list)


class _StepBuilder:
    """Walks the schedule once and lays the step's ops into a `Builder`."""

    def __init__(self, workload: Workload, schedule: Schedule, options: GraphOptions) -> None:
        schedule = Schedule(schedule)
        self.work, self.schedule, self.options = workload, schedule, options
        self.b = Builder()
        self.n_stages = len(schedule)
        self.virtual_stages = schedule.virtual_stages
        self.n_calls = 0
        members = options.group_size if options.resolution == "kernel" else 1
        self.stages = [
            _Stage([START] * members, split=schedule.split_of(s)) for s in range(self.n_stages)
        ]
        for stage, actions in zip(self.stages, schedule, strict=True):
            for a in actions:
                if a.kind == "B":
                    stage.pending[a.chunk] = stage.pending.get(a.chunk, 0) + 1
        self.arrived: dict[Message, int] = {}  # message -> node
        self.sent: dict[tuple[int, int] | None, int] = {}  # (sender, far link) -> its last node

    def build(self) -> tuple[Builder, int]:
        """Lay all items in an order in which their inputs exist, then the step's end."""
        blocking = self.options.p2p == "blocking" and self.n_stages > 1
        items: list[list[Action | Meeting]] = (
            blocking_items(self.schedule) if blocking else [list(a) for a in self.schedule]
        )
        if not play_rows(items, lambda s, heads: self._try(s, items, heads, blocking)):
            raise PrismError("schedule: deadlock; some action comes before its input can exist")
        return self.b, self._end_of_step()

    def _try(
        self, s: int, items: list[list[Action | Meeting]], heads: list[int], blocking: bool
    ) -> bool:
        item = items[s][heads[s]]
        if isinstance(item, Meeting):
            peer = item.stages[0] if item.stages[1] == s else item.stages[1]
            if heads[peer] >= len(items[peer]) or items[peer][heads[peer]] != item:
                return False
            self._meet(item)
            heads[peer] += 1
        else:
            source = _source(item, s, self.virtual_stages)
            if source is not None and source not in self.arrived:
                return False
            self._action(s, item, blocking)
        return True

    def _meet(self, meeting: Meeting) -> None:
        a, b = (self.stages[s] for s in meeting.stages)
        low, preds = min(meeting.stages), a.last + b.last
        for transfer in self.work.transfers(low):
            # one that takes time in a replica if any of its messages is sent there
            first = min(microbatch for _, _, microbatch in meeting.messages)
            op_type = OpType("transfer", low, collective=transfer, link=low)
            preds = [self.b.add(preds, op_type, stage=low, microbatch=first)]
        node = preds[0] if len(preds) == 1 else self.b.join(preds, stage=low)
        a.last, b.last = [node] * len(a.last), [node] * len(b.last)

    def _action(self, s: int, action: Action, blocking: bool) -> None:
        stage = self.stages[s]
        source = _source(action, s, self.virtual_stages)
        # a weight's gradient needs its input and its output's gradient, not the weight
        waits = [] if action.kind == "W" else self._gather(s, action.chunk)
        if source is not None:
            waits.append(self.arrived[source])
        work, split = self.work.chunks[s][action.chunk], action[1:] in stage.split
        op_kind, kernels = {
            "F": ("forward", work.forward),
            "B": ("backward", work.inputs if split else work.backward),
            "W": ("backward_weight", work.weights),
        }[action.kind]
        if self.options.resolution == "kernel":
            self._lay_kernels(s, op_kind, kernels, waits, action.microbatch)
        else:
            op_type = OpType(op_kind, s, kernels)
            node = self.b.add(stage.last + waits, op_type, stage=s, microbatch=action.microbatch)
            stage.last = [node]
        if action.kind != "W":
            self._send(s, action, blocking)
        if action.kind == ("W" if split else "B"):
            self._reduce(s, action.chunk)

    def _lay_kernels(
        self, s: int, op_kind: str, kernels: tuple[Kernel, ...], waits: list[int], microbatch: int
    ) -> None:
        """Lay every kernel on every rank of the group; a collective joins the group."""
        call, self.n_calls = self.n_calls, self.n_calls + 1
        last = [self.b.join([p, *waits], stage=s) for p in self.stages[s].last]
        for kernel in kernels:
            if kernel.group:
                op_type = OpType(op_kind, s, (kernel,))
                node = self.b.add(last, op_type, stage=s, microbatch=microbatch, call=call)
                last = [node] * len(last)
                continue
            for g in range(len(last)):
                op_type = OpType(op_kind, s, (kernel,), member=g)
                last[g] = self.b.add([last[g]], op_type, stage=s, microbatch=microbatch, call=call)
        self.stages[s].last = last

    def _send(self, s: int, action: Action, blocking: bool) -> None:
        end = self.b.join(self.stages[s].last, stage=s)
        virtual = self.virtual_stages.virtual(s, action.chunk)
        reader = self.virtual_stages.next_of(action, s)
        link = None if reader is None else self.virtual_stages.link(virtual, reader)
        if link is not None and not blocking:
            end = self._lay_transfer(s, link, end, action.microbatch)
        self.arrived[action.kind, virtual, action.microbatch] = end

    def _lay_transfer(self, s: int, link: int, end: int, microbatch: int) -> int:
        """Lay what a transfer takes; out of a site it queues behind the sender's last one."""
        for i, transfer in enumerate(self.work.transfers(link)):
            op_type = OpType("transfer", s, collective=transfer, link=link)
            queue = (s, link) if i == 0 and link in self.work.far_transfers else None
            preds = [end, self.sent[queue]] if queue in self.sent else [end]
            end = self.b.add(preds, op_type, stage=s, microbatch=microbatch)
            if queue is not None:
                self.sent[queue] = end
        return end

    # -- data parallelism -------------------------------------------------------------------

    def _gather(self, s: int, chunk: int) -> list[int]:
        """Parameters of a chunk, gathered on a stream of their own, prefetched a few uses ahead."""
        collectives = self.work.gathers(s, chunk)
        stage = self.stages[s]
        if not collectives:
            return []
        if chunk in stage.gathered and not self.options.reshard_after_forward:
            return []  # the stage's own order already puts this after the gather
        stage.starts.append(list(stage.last))
        ahead = self.options.prefetch if self.options.overlap else 0
        k = len(stage.starts) - 1 - ahead
        issued = stage.starts[k] if k >= 0 else []
        for collective in collectives:
            stage.gather_stream = self.b.add(
                [stage.gather_stream, *issued],
                OpType(collective.op_kind, s, collective=collective),
                is_global=collective.group != "shard",
                stage=s,
            )
        stage.gathered.add(chunk)
        return [stage.gather_stream]

    def _reduce(self, s: int, chunk: int) -> None:
        """Gradients of a chunk, reduced on a stream of their own after its last weight gradient."""
        stage = self.stages[s]
        stage.pending[chunk] -= 1
        if stage.pending[chunk] > 0 and not self.options.reshard_after_forward:
            return
        for collective in self.work.reduces(s, chunk):
            if self.options.overlap:
                self._lay_reduce(s, collective, stage.last)
            else:
                stage.reduces.append(collective)

    def _lay_reduce(self, s: int, collective: Collective, after: list[int]) -> None:
        stage = self.stages[s]
        stage.reduce_stream = self.b.add(
            [*after, stage.reduce_stream],
            OpType(collective.op_kind, s, collective=collective),
            is_global=collective.group != "shard",
            stage=s,
        )

    def _end_of_step(self) -> int:
        """Lay the chain of barriers at the end of the step; the last one is global."""
        for s, stage in enumerate(self.stages):
            for collective in stage.reduces:
                self._lay_reduce(s, collective, stage.last)
        done = [
            self.b.join([*st.last, st.reduce_stream], stage=s, is_global=True)
            for s, st in enumerate(self.stages)
        ]
        if self.work.layernorm_reduce is not None:
            done = [self._end_op(s, [d], self.work.layernorm_reduce) for s, d in enumerate(done)]
        if self.work.embedding_reduce is not None and self.n_stages > 1:
            both = self._end_op(0, [done[0], done[-1]], self.work.embedding_reduce)
            done[0] = done[-1] = both
        if self.work.grad_norm_reduce is not None:
            done = [self._end_op(0, done, self.work.grad_norm_reduce)] * self.n_stages
        gathers = self.work.param_gather, self.work.expert_param_gather
        for per_stage in (self.work.optimizer, *gathers):
            for s, last in enumerate(per_stage):
                if last is not None:
                    done[s] = self._end_op(s, [done[s]], last)
        return self.b.join(done, is_global=True)

    def _end_op(self, s: int, preds: list[int], collective: Collective) -> int:
        op_type = OpType(collective.op_kind, s, collective=collective)
        return self.b.add(preds, op_type, is_global=True, stage=s)


def _source(action: Action, stage: int, stages: VirtualStages) -> Message | None:
    """Message that an action reads, None where it starts the pipeline or turns around."""
    virtual = stages.source_of(action, stage)
    return None if virtual is None else (action.kind, virtual, action.microbatch)


def _target(action: Action, stage: int, stages: VirtualStages) -> int | None:
    """Stage that reads what an action sends, None where no other stage does."""
    virtual = stages.next_of(action, stage)
    reader = stage if virtual is None else stages.place(virtual)[0]
    return None if reader == stage else reader


def blocking_items(schedule: Schedule) -> list[list[Action | Meeting]]:
    """Interleave a schedule of one chunk per stage with its blocking transfers.

    A send followed at once by a receive from the same neighbour is one meeting where the
    neighbour's order mirrors it, as Megatron's send-forward-recv-backward.
    """
    stages = VirtualStages(len(schedule))
    adjacent: list[dict[Message, Message]] = []
    for s, actions in enumerate(schedule):
        pairs: dict[Message, Message] = {}
        for a, b in zip(actions, actions[1:], strict=False):
            received, peer = _source(b, s, stages), _target(a, s, stages)
            if received is not None and peer is not None and received[1] == peer:
                pairs[a.kind, s, a.microbatch] = received
        adjacent.append(pairs)

    def meeting(message: Message, reader: int) -> Meeting:
        sender = message[1]
        messages = {message}
        answer = adjacent[sender].get(message)
        if answer is not None and adjacent[answer[1]].get(answer) == message:
            messages.add(answer)
        return Meeting((min(sender, reader), max(sender, reader)), frozenset(messages))

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
            peer = _target(a, s, stages)
            if peer is not None:
                row.append(meeting((a.kind, s, a.microbatch), peer))
        items.append(row)
    return items


def build_step_graph(workload: Workload, schedule: Schedule, options: GraphOptions) -> StepGraph:
    """Build the arrays of one step.

    Parameters
    ----------
    workload : Workload
        Ops with nominal durations [s].
    schedule : Schedule
        Action lists per stage.

    Raises
    ------
    PrismError
        The schedule deadlocks.
    """
    builder, final = _StepBuilder(workload, schedule, options).build()
    return build_arrays(builder, final, options.n_replicas, len(schedule))
