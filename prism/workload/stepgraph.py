"""The step graph: which op of a training step waits for which.

Left out: contention between the streams of one GPU.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
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
    pending: Counter[int]  # gradients still to come, by chunk
    split: frozenset[tuple[int, int]]  # (chunk, microbatch) of split backwards
    uses: list[int] = field(default_factory=list)  # chunks whose parameters are gathered, in order
    n_used: int = 0
    gathers: list[int] = field(default_factory=list)  # last node of every use's gathers
    gather_stream: int = START
    reduce_stream: int = START
    gathered: dict[str, int] = field(default_factory=dict)  # group -> its last gather
    reduced: dict[str, int] = field(default_factory=dict)  # group -> its last reduce
    reduces: list[Collective] = field(default_factory=list)


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
            source = _source(item, s, self.virtual_stages)
            if source is not None and source not in self.arrived:
                return False
            self._action(s, item, [] if source is None else [self.arrived[source]])
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

    def _action(self, s: int, action: Action, inputs: list[int]) -> None:
        stage = self.stages[s]
        # a weight's gradient needs its input and its output's gradient, not the weight
        waits = inputs if action.kind == "W" else self._gather(s, action.chunk) + inputs
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
            self._send(s, action)
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

    def _send(self, s: int, action: Action) -> None:
        end = self.b.join(self.stages[s].last, stage=s)
        virtual = self.virtual_stages.virtual(s, action.chunk)
        reader = self.virtual_stages.next_of(action, s)
        link = None if reader is None else self.virtual_stages.link(virtual, reader)
        if link is not None and not self.blocking:
            for i, transfer in enumerate(self.work.transfers(link)):
                op_type = OpType("transfer", s, collective=transfer, link=link)
                # out of a site it queues behind the sender's last one
                queued = i == 0 and link in self.work.far_transfers
                preds = [end, self.sent.get((s, link), START)] if queued else [end]
                end = self.b.add(preds, op_type, stage=s, microbatch=action.microbatch)
                if queued:
                    self.sent[s, link] = end
        self.arrived[action.kind, virtual, action.microbatch] = end

    # -- data parallelism -------------------------------------------------------------------

    def _gather(self, s: int, chunk: int) -> list[int]:
        """Parameters of a chunk, gathered on a stream of their own, prefetched a few uses ahead.

        Gathers and reductions of one group have one communicator, which runs them one at a time in
        the order in which they are issued.
        """
        stage = self.stages[s]
        if stage.n_used == len(stage.uses) or stage.uses[stage.n_used] != chunk:
            return []  # none, or the stage's own order already puts this after the gather
        stage.n_used += 1
        ahead = self.options.prefetch if self.options.overlap else 0
        for use in stage.uses[len(stage.gathers) : stage.n_used + ahead]:
            for collective in self.work.gathers[s][use]:
                before = stage.gather_stream, stage.reduced.get(collective.group, START)
                stage.gather_stream = self._collective(s, [*before, *stage.last], collective)
                stage.gathered[collective.group] = stage.gather_stream
            stage.gathers.append(stage.gather_stream)
        return [stage.gathers[stage.n_used - 1]]

    def _reduce(self, s: int, chunk: int) -> None:
        """Gradients of a chunk, reduced on a stream of their own after its last weight gradient."""
        stage = self.stages[s]
        stage.pending[chunk] -= 1
        if stage.pending[chunk] > 0 and not self.options.reshard_after_forward:
            return
        stage.reduces.extend(self.work.reduces[s][chunk])
        if self.options.overlap:
            self._lay_reduces(s)

    def _lay_reduces(self, s: int) -> None:
        stage = self.stages[s]
        for collective in stage.reduces:
            before = stage.reduce_stream, stage.gathered.get(collective.group, START)
            stage.reduce_stream = self._collective(s, [*stage.last, *before], collective)
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
        for per_stage in (self.work.optimizer, *self.work.param_gathers):
            for s, last in enumerate(per_stage):
                if last is not None:
                    done[s] = self._collective(s, [done[s]], last)
        return self.b.join(done, is_global=True)

    def _collective(self, s: int, preds: list[int], collective: Collective) -> int:
        """Lay a collective, of all replicas unless it is a shard group's own."""
        op_type = OpType(collective.op_kind, s, collective=collective)
        return self.b.add(preds, op_type, is_global=collective.group != "shard", stage=s)


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


def build_step_graph(workload: Workload, schedule: Schedule, options: GraphOptions) -> StepGraph:
    """Build the arrays of one step; PrismError where the schedule deadlocks."""
    builder, final = _StepBuilder(workload, schedule, options).build()
    return build_arrays(builder, final, options.n_replicas, len(schedule))
