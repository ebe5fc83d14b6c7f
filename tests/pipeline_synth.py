"""Pipeline traces of made-up jobs whose graph and effects are known: an oracle for replay and fit.

`make_trace(layout, effects, seed)` gives a tidy table of ops as a DataFrame and the `Truth` behind
it; `write_tidy(frame, path)` makes it a file, `as_trace(frame)` prism's `Trace`,
`as_production(frame)` the columns of production traces. Schedules 1f1b, gpipe (p2p blocking, as
Megatron batches it, or async) and interleaved (async), any replicas x stages x microbatches x
steps. `Truth.durations` holds every op's own duration; `run(layout, effects, durations)` plays
them through a small event loop that knows nothing of prism, so any change of them has a true
answer. Recorded durations hold the waits.
Effects: lognormal of mean 1 per worker, step (with memory), microbatch content and op; lemons
(factor) and delays (seconds per compute op); gaps, barriers nobody names, missing rows, steps with
other numbers of microbatches, group names, clock jitter, float32, several ways to name transfers.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

WORKER, REPLICA, STAGE, WORLD = "worker", "replica", "stage", "world"


@dataclass(frozen=True)
class Layout:
    """What the job does in every step."""

    replicas: int = 2
    stages: int = 4
    microbatches: int = 8
    steps: int = 12
    schedule: str = "1f1b"  # 1f1b, gpipe, interleaved
    p2p: str = "blocking"  # blocking, async
    chunks: int = 1
    gather: str = "first"  # where params-all-gather stands: first, last, none


@dataclass(frozen=True)
class Effects:
    """How long things take, what varies, and how it is recorded; sd are of the logarithm."""

    forward_s: float = 0.2
    backward_s: float = 0.4
    stage: tuple[float, ...] = ()  # factor per stage, 1 where it ends
    rank_sd: float = 0.0
    step_sd: float = 0.0
    step_memory: float = 0.0  # lag-1 correlation of the step effect
    content_sd: float = 0.0  # of (replica, microbatch, step), for all stages
    content_backward: float = 1.5  # its power in backward, that of forward being 1
    content_last: float = 1.0  # and on the last stage, times the above
    residual_sd: float = 0.01  # of each compute op
    first_microbatch: float = 1.0  # factor
    lemons: dict[tuple[int, int], float] = field(default_factory=dict)  # (replica, stage): factor
    delays: dict[tuple[int, int], float] = field(default_factory=dict)  # seconds per compute op
    transfer_s: float = 0.001
    collective_s: float = 0.05
    optimizer_s: float = 0.02
    other_sd: float = 0.02  # of transfers, collectives and the optimizer
    gap_s: float = 0.0  # mean of an exponential before every op but the first
    barriers: tuple[tuple[str, str, int], ...] = ()  # (before which op, scope, its index or -1)
    missing: float = 0.0  # share of rows not recorded
    odd_steps: dict[int, int] = field(default_factory=dict)  # step: its number of microbatches
    jitter_s: float = 0.0
    float32: bool = False
    groups: bool = False  # name the groups of collectives and transfers
    wording: str = "production"  # of transfers: production, verbs, short, batched


@dataclass
class Truth:
    """What the table was made from; arrays are [step] and exclude steps with odd numbers."""

    layout: Layout
    effects: Effects
    durations: dict[tuple, np.ndarray]  # own duration of every op [s], see `draw`
    step_times: np.ndarray  # last end - first start [s]
    rank: np.ndarray  # [replica, stage] drawn factors, lemons not among them
    step: np.ndarray
    content: np.ndarray  # [replica, microbatch, step]
    steps: np.ndarray  # step numbers


class Action(NamedTuple):
    """One thing a worker does: compute, meet (blocking transfers), post, send, wait, join."""

    do: str
    name: str
    what: tuple = ()  # (chunk, microbatch), sides (way, side, boundary, microbatch), or members
    scope: str = WORKER


def make_trace(layout, effects=None, seed=0):
    """Return (tidy table of ops, truth)."""
    effects = effects or Effects()
    generator = np.random.default_rng(seed)
    normal = np.array([t for t in range(layout.steps) if t not in effects.odd_steps])
    durations, rank, step, content = draw(replace(layout, steps=normal.size), effects, generator)
    frame, times = run(layout, effects, durations)
    frame["step"] = normal[frame["step"]]
    truth = Truth(layout, effects, durations, times, rank, step, content, normal)
    frames = [frame]
    for t, n in effects.odd_steps.items():
        small = replace(layout, microbatches=n, steps=1)
        other, _ = run(small, effects, draw(small, effects, generator)[0])
        frames.append(other.assign(step=t))
    return record(pd.concat(frames, ignore_index=True), effects, generator), truth


# -------------------------------------------------------------------------------- durations
def draw(layout, effects, generator):
    """Draw every op's own duration: {(op, replica, stage, ...): [step]}; -1 for all of a kind.

    Keys: (forward | backward, replica, stage, chunk, microbatch), ("transfer", replica, sides),
    (collective, replica, stage), (optimizer, replica, stage), ("gap", replica, stage, no.).
    """
    e, R, S = effects, layout.replicas, layout.stages
    M, T = layout.microbatches, layout.steps

    def lognormal(sd, *shape):
        return np.exp(sd * generator.standard_normal(shape) - 0.5 * sd**2)

    rank, content = lognormal(e.rank_sd, R, S), lognormal(e.content_sd, R, M, T)
    z = generator.standard_normal(T)
    for t in range(1, T):
        z[t] = e.step_memory * z[t - 1] + np.sqrt(1 - e.step_memory**2) * z[t]
    step = np.exp(e.step_sd * z - 0.5 * e.step_sd**2)
    durations = {}
    for r, s in np.ndindex(R, S):
        for n, action in enumerate(program(layout, effects, s)):
            key = key_of(action, r, s)
            durations["gap", r, s, n] = generator.exponential(1.0, T) * (e.gap_s if n else 0.0)
            if action.do == "compute":
                back, (_, m) = action.name == "backward", action.what
                power = (e.content_backward if back else 1.0) * (
                    e.content_last if s == S - 1 else 1
                )
                value = (e.backward_s if back else e.forward_s) * (*e.stage, *[1.0] * S)[s]
                value *= e.first_microbatch if m == 0 else 1.0
                value *= rank[r, s] * step * content[r, m] ** power * lognormal(e.residual_sd, T)
                durations[key] = value * e.lemons.get((r, s), 1.0) + e.delays.get((r, s), 0.0)
            elif key is not None and key not in durations:
                mean = e.transfer_s if key[0] == "transfer" else e.collective_s
                mean = e.optimizer_s if action.name == "optimizer" else mean
                durations[key] = mean * lognormal(e.other_sd, T)
    return durations, rank, step, content


def key_of(action, r, s):
    """Key of an action's duration, None if it has none."""
    if action.do == "compute":
        return action.name, r, s, *action.what
    if action.do in ("meet", "send", "wait"):
        sides = frozenset((way, b, m) for way, _, b, m in action.what)
        return "transfer", r, sides
    if action.do == "join" and action.name != "barrier":
        at = {WORKER: (r, s), REPLICA: (r, -1), STAGE: (-1, s), WORLD: (-1, -1)}[action.scope]
        return action.name, *at
    return None


# --------------------------------------------------------------------------------- programs
def program(layout, effects, s):
    """Return what the workers of stage s do."""
    actions = passes(layout, s)
    S = layout.stages
    tail = [Action("join", "layernorm-grads-all-reduce")]
    if S > 1 and s in (0, S - 1):
        tail.append(Action("join", "embedding-grads-all-reduce", (0, S - 1), REPLICA))
    tail.append(Action("join", "grads-reduce-scatter", (s,), STAGE))
    tail.append(Action("join", "optimizer-clip-main-grad", tuple(range(S)), WORLD))
    tail.append(Action("join", "optimizer"))
    gather = [Action("join", "params-all-gather", (s,), STAGE)]
    head = gather if layout.gather == "first" else []
    actions = [*head, *actions, *tail, *(gather if layout.gather == "last" else [])]
    for before, scope, index in effects.barriers:
        if scope != STAGE or index in (-1, s):
            at = next(i for i, a in enumerate(actions) if a.name == before)
            members = (s,) if scope == STAGE else tuple(range(S))
            actions.insert(at, Action("barrier", f"before {before}", (members, index), scope))
    return actions


def passes(layout, s):
    """Forward and backward passes of stage s, with their transfers."""
    S, M, V = layout.stages, layout.microbatches, layout.chunks
    if layout.schedule == "interleaved":
        total = M * V
        warmup = min((S - s - 1) * 2 + (V - 1) * S, total)
        places = [(k % (S * V) // S, k // (S * V) * S + k % S) for k in range(total)]
        fs = [("forward", c, m) for c, m in places]
        bs = [("backward", V - 1 - c, m) for c, m in places]
    else:
        warmup = M if layout.schedule == "gpipe" else min(S - s - 1, M)
        fs, bs = ([(way, 0, m) for m in range(M)] for way in ("forward", "backward"))
    order = fs[:warmup]
    for f, b in zip(fs[warmup:], bs, strict=False):
        order += [f, b]
    order += bs[len(fs) - warmup :]
    ends = (0, S * V - 1)

    def side(what, op):  # of the transfer before (recv) or after (send) an op
        way, c, m = op
        v = c * S + s
        if v == ends[(way == "backward") == (what == "recv")]:
            return ()
        behind = (way == "forward") == (what == "recv")
        return ((way, what, v - 1 if behind else v, m),)

    out = []
    if layout.p2p == "async":
        for i, op in enumerate(order):  # a receive is posted one op ahead
            for ahead in order[i : i + 2] if i == 0 else order[i + 1 : i + 2]:
                out += [Action("post", "", (x,)) for x in side("recv", ahead)]
            out += [Action("wait", "", (x,)) for x in side("recv", op)]
            out.append(Action("compute", op[0], op[1:]))
            out += [Action("send", "", (x,)) for x in side("send", op)]
        return out
    assert layout.schedule != "interleaved", "blocking transfers in a ring wait for ever"
    steady = set() if layout.schedule == "gpipe" else set(range(warmup, warmup + 2 * (M - warmup)))
    pending = ()
    for i, op in enumerate(order):
        receive = side("recv", op)
        if pending + receive:
            out.append(Action("meet", "", pending + receive))
        out.append(Action("compute", op[0], op[1:]))
        pending = side("send", op)
        if pending and not (i in steady and i + 1 in steady):
            out.append(Action("meet", "", pending))
            pending = ()
    return out + ([Action("meet", "", pending)] if pending else [])


# -------------------------------------------------------------------------------- event loop
def run(layout, effects, durations):
    """Play durations: (table of what each op would be recorded as, step times [step])."""
    R, S = layout.replicas, layout.stages
    programs = [program(layout, effects, s) for s in range(S)]
    heads, n_steps = np.zeros((R, S), int), next(iter(durations.values())).size
    now = {(r, s): np.zeros(n_steps) for r, s in np.ndindex(R, S)}
    arrived, posted, rows = {}, {}, []
    moved = 1
    while moved:
        moved = 0
        for r, s in np.ndindex(R, S):
            while heads[r, s] < len(programs[s]):
                n = int(heads[r, s])
                action = programs[s][n]
                start = now[r, s] + durations["gap", r, s, n] * (action.do in TIMED)
                end = _try(action, (r, s), start, arrived, posted, durations, layout)
                if end is None:
                    break
                moved, now[r, s] = 1, end
                heads[r, s] += 1
                if action.do in TIMED:
                    rows.append((action, r, s, start, end))
    assert all(heads[r, s] == len(programs[s]) for r, s in np.ndindex(R, S)), "deadlock"
    for (r, side), start in posted.items():
        way, what, boundary, _ = side
        at = (boundary + ((way == "forward") == (what == "recv"))) % S
        end = posted_end(posted, r, side, durations)
        rows.append((Action("meet", "", (side,)), r, at, start, end))
    frame = table(rows, layout, effects)
    last = (frame["start"] + frame["duration"]).groupby(frame["step"]).max()
    return frame, (last - frame.groupby("step")["start"].min()).to_numpy()


TIMED = ("compute", "join", "meet")  # what a launch gap comes before


def _try(action, worker, start, arrived, posted, durations, layout):
    """End of an action, None if it waits for others."""
    r, s = worker
    key = key_of(action, r, s)
    if action.do == "compute" or (action.do == "join" and action.scope == WORKER):
        return start + durations[key]
    if action.do in ("post", "send"):
        posted[r, action.what[0]] = start
        return start
    if action.do == "wait":
        end = posted_end(posted, r, action.what[0], durations)
        return None if end is None else np.maximum(start, end)
    place, members = _meeting(action, worker, layout)
    if action.do == "barrier" and worker not in members:
        return start
    arrived.setdefault(place, {})[worker] = start
    if any(m not in arrived[place] for m in members):
        return None
    latest = np.max([arrived[place][m] for m in members], axis=0)
    return latest if action.do == "barrier" else latest + durations[key]


def _meeting(action, worker, layout):
    """Name of the meeting and the workers in it."""
    r, s = worker
    every = range(layout.replicas)
    if action.do == "meet":
        _, _, boundary, _ = action.what[0]
        pair = [(r, boundary), (r, boundary + 1)]
        return ("meet", r, frozenset((w, b, m) for w, _, b, m in action.what)), pair
    stages, index = action.what if action.do == "barrier" else (action.what, -1)
    if action.scope == STAGE:
        return (action.name, -1, s), [(q, s) for q in every]
    if action.scope == REPLICA:
        alone = action.do != "barrier" or index in (-1, r)
        return (action.name, r, -1), [(r, x) for x in stages] if alone else []
    return (action.name, -1, -1), [(q, x) for q in every for x in stages]


def posted_end(posted, r, side, durations):
    """Arrival of a message that does not block, None if one side is not posted yet."""
    way, _, boundary, m = side
    both = [posted.get((r, (way, what, boundary, m))) for what in ("send", "recv")]
    if any(x is None for x in both):
        return None
    return np.maximum(*both) + durations["transfer", r, frozenset([(way, boundary, m)])]


# -------------------------------------------------------------------------------- recording
KINDS = {
    "forward": ("forward", "compute"),
    "backward": ("backward", "compute"),
    "layernorm-grads-all-reduce": ("all_reduce", "layernorm_all_reduce"),
    "embedding-grads-all-reduce": ("all_reduce", "embedding_all_reduce"),
    "grads-reduce-scatter": ("reduce_scatter", "dp_reduce_scatter"),
    "optimizer-clip-main-grad": ("all_reduce", "world_all_reduce"),
    "optimizer": ("optimizer", "optimizer"),
    "params-all-gather": ("all_gather", "dp_all_gather"),
}
WORDS = {"production": "{way}-{what}", "verbs": "{what}_{way}", "short": "{pass}_{what}"}


def table(rows, layout, effects):
    """Lay recorded ops out as the tidy table."""
    out, made = [], {}
    for action, r, s, start, end in rows:
        if action.do == "meet":
            for name in _transfer_names(action.what, effects.wording):
                k = made[r, s, name] = made.get((r, s, name), -1) + 1
                out.append((name, "transfer", "p2p", r, s, 0, k, f"pp{r}", start, end))
            continue
        name = f"{action.name}-compute" if action.do == "compute" else action.name
        chunk, m = action.what if action.do == "compute" else (0, -1)
        group = {WORKER: "", REPLICA: f"embd{r}", STAGE: f"dp{s}", WORLD: "world"}[action.scope]
        out.append((name, *KINDS[action.name], r, s, chunk, m, group, start, end))
    names = "name op_kind kernel_class dp_rank stage chunk microbatch group".split()
    n = out[0][-1].size
    columns = {c: np.repeat([o[i] for o in out], n) for i, c in enumerate(names)}
    start, end = (np.concatenate([o[i] for o in out]) for i in (-2, -1))
    frame = pd.DataFrame(columns | {"start": start, "duration": end - start})
    frame["step"] = np.tile(np.arange(n), len(out))
    frame["rank"] = frame["dp_rank"] * layout.stages + frame["stage"]
    return frame


def _transfer_names(sides, wording):
    """Names of the rows that one posting of transfers is recorded as."""
    if wording == "batched":
        return ["_".join(f"{what}_{way}" for way, what, _, _ in sides)]
    short = {"forward": "fwd", "backward": "bwd"}
    fill = [{"way": way, "pass": short[way], "what": what} for way, what, _, _ in sides]
    return [WORDS[wording].format(**x) for x in fill]


def record(frame, effects, generator):
    """Return the table as a profiler with a coarse clock and lost rows would write it."""
    frame = frame.copy()
    if not effects.groups:
        frame["group"] = ""
    if effects.jitter_s:
        a, b = effects.jitter_s * generator.standard_normal((2, len(frame)))
        frame["start"] += a
        frame["duration"] = np.maximum(frame["duration"] + b - a, 0.0)
    if effects.float32:
        for c in ("start", "duration"):
            frame[c] = frame[c].astype(np.float32).astype(np.float64)
    frame = frame[generator.random(len(frame)) >= effects.missing]
    return frame.sort_values(["step", "rank", "start"], kind="stable").reset_index(drop=True)


def as_trace(frame, source="made.csv"):
    """Return the table as prism's own."""
    from prism.traces.table import make_trace as tidy  # the only word of prism here

    return tidy({c: frame[c].to_numpy() for c in frame.columns}, source, "tidy")


def write_tidy(frame, path):
    """Write the table as a CSV that prism reads, to the last bit; returns the path."""
    frame.rename(columns={"start": "start_s", "duration": "duration_s"}).to_csv(path, index=False)
    return path


def as_production(frame):
    """Return the columns of production traces, float32 seconds, extra column gmc."""
    compute = frame["name"].str.endswith("-compute")
    ordinal = np.where(frame["microbatch"] < 0, 0, frame["microbatch"])
    return pd.DataFrame({
        "dp_rank": frame["dp_rank"], "stage": frame["stage"], "rank": frame["rank"],
        "step": frame["step"], "optype": frame["name"],
        "start_ts": frame["start"].astype(np.float32),
        "duration": frame["duration"].astype(np.float32), "seq_id": ordinal,
        "mc": np.where(frame["op_kind"] == "transfer", -1, frame["chunk"]),
        "mb_id": np.where(compute, frame["microbatch"], -1),
        "gmc": np.where(compute, 1, -1),
    })  # fmt: skip
