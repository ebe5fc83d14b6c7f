"""Runs from event to event, many at a time.

Events: a failure, a change of regime, the start or end of a fail-slow episode, a node replaced, a
mark to record. Between two of them the steps of a short run are drawn one by one
(`prism.simulation.runs.stepped`); those of a long one take n mu + the sum of the drift + sqrt(n)
sigma z + compound-Poisson stalls + the checkpoints and evaluations among them, and which step an
event falls into is found from the expected speed until then. A failure sends a run back to its last
checkpoint. A replaced node renews the whole cluster with probability 1 / nodes, which keeps
the clusters' spread and gives the memory that an average over nodes would have.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.simulation.runs.drift import decay_sum, drift_sum, wave_sum
from prism.simulation.runs.ledger import Ledger
from prism.simulation.runs.outages import Outages, waiting_times
from prism.simulation.runs.parts import STOPS, Array, Index, RunModel
from prism.simulation.runs.rates import step_shares
from prism.simulation.runs.stepped import BLOCK, SteppedRuns, draw_steps

CHUNK = 1024  # runs that draw together; the first n runs do not change with their number
MANY = 1000  # stalls beyond which their sum is as good as normal
LEAST = 0.05  # of a step's mean: what a spread so wide that it reaches below 0 is cut at
MAX_EVENTS = 300_000  # of one run, minutes of work
CHECKED = 1000  # events after each of which it is seen whether there will be more
AHEAD = 1.5, 8  # steps drawn at a time: those expected until the next event by this, and more
_PLAIN = ("ideal_steps", "slow_steps", "step_noise", "run_effect", "model_error", "congestion")
_OTHER = ("drift", "stalls", "evaluations", "checkpoints", *STOPS)
_NEVER = np.inf


class Chunk(NamedTuple):
    """What the runs of one chunk come to; arrays as in `prism.simulation.runs.parts.Runs`."""

    total: Array
    cluster: Index
    terms: Array  # [term, run]
    marks: Array
    failures: Index


def term_names(model: RunModel) -> tuple[str, ...]:
    """Names of the terms a run of this model consists of."""
    return (*_PLAIN, *([] if model.episodes is None else ["fail_slow"]), *_OTHER)


def stack_terms(model: RunModel, terms: Mapping[str, Array | float]) -> Array:
    """Lay terms into rows [term, run]; the model's others are 0."""
    return np.array([np.broadcast_to(terms.get(x, 0.0), CHUNK) for x in term_names(model)])


def generator(seed: int, first: int, stream: int) -> np.random.Generator:
    """Return one of the random streams of the chunk that begins with a run."""
    return np.random.Generator(np.random.Philox(key=[seed, (first // CHUNK << 8) + stream]))


def draw_run_effect(model: RunModel, rng: np.random.Generator) -> Array:
    """Draw the factor that all steps of each run of a chunk share [1]."""
    return np.maximum(1.0 + model.run_cv * rng.standard_normal(CHUNK), LEAST)


def wrong_by(model: RunModel, first: int, seed: int) -> Array:
    """Draw what the model is wrong by in each run of a chunk: a factor on all of its steps [1]."""
    if model.model_error == 0.0:
        return np.ones(CHUNK)
    z = generator(seed, first, 20).standard_normal(CHUNK)
    return np.asarray(np.exp(model.model_error * z))


class EventLoop:
    """The state of `CHUNK` runs from a first one on, advanced together."""

    def __init__(
        self, model: RunModel, n_steps: int, first: int, seed: int, start_s: float,
        marks: Sequence[int] = (), stepped: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.n_steps, self.start_s, self.stepped = model, n_steps, start_s, stepped
        self.rng = generator(seed, first, 12)
        n, rng = CHUNK, self.rng
        # terms of this model's steps; those of stops are never lost
        parts = {"congestion": model.regime, "stalls": model.stalls, "evaluations": None,
                 "checkpoints": None, **model.pauses}  # fmt: skip
        steps = [x for x in term_names(model) if x not in STOPS]
        self.names = [x for x in steps if parts.get(x, x) is not None]
        self.stopped = {name: np.zeros(n) for name in STOPS}
        self.cluster = (first + np.arange(n)) % model.mean.shape[0]
        self.began = self.cluster.copy()
        self.time = np.zeros(n)
        self.drift = rng.standard_normal(n)
        if model.drift.initial is not None:
            self.drift = model.drift.initial[self.cluster]
        self.own = draw_run_effect(model, rng)
        self.effect = self.own * wrong_by(model, first, seed)
        self.ledger = Ledger(len(self.names), n, model.checkpoints)
        self.outages = Outages(model.interruptions, n, rng)
        self.marks = np.append(np.asarray(marks, float), _NEVER)
        self.at_mark = np.zeros((n, len(marks)))
        # the work of the first s steps; steps alike where there is no profile
        profile = model.profile
        self.work = None if profile is None else np.concatenate([[0.0], np.cumsum(profile)])
        self.least = 1.0 if profile is None else float(profile.min(initial=1.0))
        self.most = 1.0 if profile is None else float(profile.max(initial=1.0))
        self.mean = model.mean @ step_shares(model)  # [cluster] over the states of its regime
        # clocks: of the first failure (`outages`), change of regime and episode
        self.state = np.zeros(n, np.int64)
        self.switch = np.full(n, _NEVER)
        if model.regime is not None:
            rates = model.regime
            self.leave = rates.sum(axis=1)
            self.choice = np.cumsum(rates, axis=1) / np.maximum(self.leave, 1e-300)[:, None]
            share = np.cumsum(step_shares(model))
            self.state = np.searchsorted(share / share[-1], rng.random(n), side="right")
            self.switch = waiting_times(rng, self.leave[self.state])
        self.begin = np.full(n, _NEVER)
        if model.episodes is not None and model.episodes.rate_per_s > 0.0:
            self.begin = waiting_times(rng, np.full(n, model.episodes.rate_per_s))
        self.end = np.full((n, 1), _NEVER)  # [run, slot] of the episodes in progress
        self.ratio = np.ones((n, 1))
        self.swap = np.zeros((n, 1), bool)  # the node is replaced when it ends

    @property
    def done(self) -> Array:
        """Steps done [run]."""
        return self.ledger.done

    # --------------------------------------------------------------------------------- steps
    def run(self, progress: Callable[[float], None] | None = None) -> Chunk:
        """Advance until all runs are done; tell ``progress`` what share is."""
        rounds = 0
        while (self.done < self.n_steps).any():
            self._advance()
            rounds += 1
            share = float(self.done.mean()) / self.n_steps
            if progress is not None and rounds % 20 == 0:
                progress(share)
            if rounds % CHECKED == 0 and rounds > share * MAX_EVENTS:
                raise PrismError(
                    f"a run of {format_count(self.n_steps, 'step')} has more than {MAX_EVENTS:,} "
                    "events; lower the rates of failures, fail_slow or regime, or make checkpoints "
                    "more frequent"
                )
        found = dict(zip(self.names, self.ledger.close(), strict=True)) | self.stopped
        terms = stack_terms(self.model, self._settle(found))
        return Chunk(self.time, self.began, terms, self.at_mark, self.outages.failures)

    def _settle(self, terms: dict[str, Array]) -> dict[str, Array]:
        """Give what is known exactly its due; seconds were shared out evenly over steps till now.

        The difference was lost in failures, or was not.
        """
        model, n = self.model, self.n_steps
        exact = {name: n // every * seconds for name, (every, seconds) in model.pauses.items()}
        if model.ideal_s is not None:
            exact["ideal_steps"] = float(n if self.work is None else self.work[n]) * model.ideal_s
        for name, seconds in exact.items():
            terms["lost_work"] += terms[name] - seconds
            terms[name] = np.full(CHUNK, seconds)
        if model.interruptions is None and (model.episodes is None or not model.episodes.replaced):
            terms["lost_work"][:] = 0.0  # rounding is no loss
        return terms

    def _advance(self) -> None:
        """Take all runs to their next event, and let it happen."""
        left = self.n_steps - self.done
        clocks = np.column_stack([self.outages.clock, self.switch, self.begin, self.end])
        which, runs = clocks.argmin(axis=1), np.arange(CHUNK)
        gap = clocks[runs, which] - self.time
        slot = which - 3
        stops = (which == 0) | ((slot >= 0) & self.swap[runs, np.maximum(slot, 0)])
        pace = self._base()
        mark = self.marks[np.searchsorted(self.marks, self.done, side="right")] - self.done
        most, drawn = np.minimum(left, mark), None
        if self.stepped:
            ahead = AHEAD[0] * float(np.median((gap / pace[0])[left > 0.0])) + AHEAD[1]
            most = np.minimum(most, min(BLOCK, ahead) // 1)
            drawn = self._draw(int(most.max()))
            n, over = drawn.within(gap)
        else:
            n, over = self._steps_within(gap, left, pace[0])
        # a step in progress goes on through all but a stop
        n = np.where(stops | (gap <= 0.0), n, n + 1.0)
        reached = (n >= most) | ~np.isfinite(gap)
        n = np.where(reached, most, n)
        self._take(n, drawn, *pace)
        happens = ~reached & (left > 0.0)
        stop = happens & stops
        if stop.any():
            self._stop(stop, np.where(stop, np.maximum(over, 0.0), 0.0), which == 0)
        if (happens & (which == 1)).any():
            self._switch(np.flatnonzero(happens & (which == 1)))
        ended = np.flatnonzero(happens & (slot >= 0))
        self.end[ended, slot[ended]] = _NEVER
        self.ratio[ended, slot[ended]] = 1.0
        if (happens & (which == 2)).any():
            self._begin(np.flatnonzero(happens & (which == 2)))

    def _base(self) -> tuple[Array, Array, Array]:
        """Seconds of a unit of work now; its factor by regime; its factor by episodes [run]."""
        mean, slow = self.model.mean, self.ratio.max(axis=1)
        regime = mean[self.cluster, self.state] / mean[self.cluster, 0]
        return mean[self.cluster, 0] * self.effect * regime * slow, regime, slow

    def _work_of(self, n: Array) -> Array:
        """Work of the next n steps, in steps of mean length [1]."""
        if self.work is None:
            return n
        at = self.done.astype(np.int64)
        return np.asarray(self.work[at + n.astype(np.int64)] - self.work[at])

    def _pauses(self, n: Array) -> dict[str, Array]:
        """Seconds of checkpoints and of evaluations within the next n steps."""
        return {
            name: seconds * (np.floor((self.done + n) / every) - np.floor(self.done / every))
            for name, (every, seconds) in self.model.pauses.items()
        }

    def _steps_within(self, gap: Array, left: Array, base: Array) -> tuple[Array, Array]:
        """Find how many steps are expected to end within `gap` seconds, and the seconds over."""
        model, drift = self.model, self.model.drift.of(self.cluster)
        about = np.minimum(np.maximum(gap / base, 1.0), np.maximum(left, 1.0))
        fade = decay_sum(about, drift.rate(base)) / about
        relative = 1.0 + drift.cv * self.drift * fade + self._wave(about, base) / about
        pace = base * np.maximum(relative, LEAST)
        if model.stalls is not None:
            pace = pace * (1.0 + model.stalls.of(self.cluster).per_second)
        pauses = model.pauses.values()
        lengthy = sum(pause for _, pause in pauses)
        smooth = sum(pause / every for every, pause in pauses)
        low = np.floor((gap - lengthy) / (pace * self.most + smooth)) - 1.0
        high = np.ceil((gap + lengthy) / (pace * self.least + smooth)) + 1.0
        low, high = (np.minimum(np.maximum(x, 0.0), left) for x in (low, high))

        def expected(n: Array) -> Array:
            seconds = pace * self._work_of(n)
            for pause in self._pauses(n).values():
                seconds = seconds + pause
            return seconds

        while (high > low).any():  # the largest n that ends in time
            middle = np.ceil(0.5 * (low + high))
            fits = expected(middle) <= gap
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1.0)
        over = np.where(np.isfinite(gap), gap, 0.0) - expected(low)
        return low, over

    def _wave(self, n: Array, base: Array) -> Array | float:
        """Sum of the daily wave over n steps [1]."""
        drift = self.model.drift
        if drift.diurnal_cv == 0.0:
            return 0.0
        wave = wave_sum(self.time + self.start_s, n, base, drift.diurnal_peak_s)
        return np.asarray(np.sqrt(2.0) * drift.diurnal_cv * wave)

    def _draw(self, n: int) -> SteppedRuns:
        """Draw the next n steps of all runs one by one."""
        i = np.arange(n + 1)[:, None]
        work, pauses = np.ones((n, CHUNK)), np.zeros((n + 1, CHUNK))
        if self.model.profile is not None:
            at = (self.done + i[:-1]).astype(np.int64)
            work = self.model.profile[np.minimum(at, self.n_steps - 1)]
        for every, seconds in self.model.pauses.values():
            pauses += seconds * ((self.done + i) // every - self.done // every)
        scale = self.effect * self.ratio.max(axis=1)
        at_s = self.start_s + self.time
        return draw_steps(
            self.model, self.cluster, self.state, scale, work, pauses, self.drift, at_s, self.rng
        )

    def _sums(self, n: Array, base: Array, slow: Array) -> tuple[Array, Array, Array | float]:
        """Draw noise, drift and stalls of n steps each from the distributions of their sums [s]."""
        model, drift = self.model, self.model.drift.of(self.cluster)
        work = self._work_of(n)
        z = self.rng.standard_normal((3, CHUNK))
        each = np.divide(work, n, out=np.ones(CHUNK), where=n > 0.0)
        total, self.drift = drift_sum(self.drift, n, drift.rate(base), z[1:])
        relative = drift.cv * total + self._wave(n, base)
        moved = base * each * np.maximum(relative, -n)
        std = model.std[self.cluster, self.state] * self.effect * slow * each
        noise = std * np.sqrt(n * (1.0 + drift.cv**2)) * z[0]
        noise = np.maximum(noise, -(base * work + moved))  # steps take no less than nothing
        return noise, moved, self._stalls(np.maximum(base * work + moved, 0.0))

    def _take(
        self, n: Array, drawn: SteppedRuns | None, base: Array, regime: Array, slow: Array
    ) -> None:
        """Take n steps each: their time, by term."""
        model, work = self.model, self._work_of(n)
        if drawn is None:
            noise, moved, stalls = self._sums(n, base, slow)
        else:
            noise, moved, stalls, self.drift = drawn.after(n)
        noise = noise / self.effect  # what that adds to it belongs to what the factor is made of
        mean = self.mean[self.cluster]
        ideal = mean if model.ideal_s is None else model.ideal_s
        now = model.mean[self.cluster, 0] * regime
        terms = {
            "ideal_steps": work * ideal,
            "slow_steps": work * (mean - ideal),
            "run_effect": (work * mean + noise) * (self.own - 1.0),
            "model_error": (work * mean + noise) * (self.effect - self.own),
            "congestion": work * self.effect * (now - mean),
            "fail_slow": base * work * (1.0 - 1.0 / slow),
            "step_noise": noise,
            "drift": moved,
            "stalls": stalls,
            **self._pauses(n),
        }
        seconds = np.array([terms[name] for name in self.names])
        self.time = self.time + seconds.sum(axis=0)
        self.ledger.keep(n, seconds)
        # again where a run had lost what it did
        at = np.searchsorted(self.marks, self.done)
        hit = np.flatnonzero((self.marks[at] == self.done) & (n > 0.0))
        self.at_mark[hit, at[hit]] = self.time[hit]

    def _stalls(self, exposure: Array) -> Array | float:
        """Seconds of the stalls that fall into the given seconds of stepping."""
        if self.model.stalls is None:
            return 0.0
        stalls = self.model.stalls.of(self.cluster)
        count = self.rng.poisson(stalls.rate_per_s * exposure)
        few = np.where(count <= MANY, count, 0)
        drawn = stalls.lengths[self.rng.integers(0, stalls.lengths.size, int(few.sum()))]
        out = np.bincount(np.repeat(np.arange(CHUNK), few), drawn, CHUNK)
        z = self.rng.standard_normal(CHUNK)
        mean, std = float(stalls.lengths.mean()), float(stalls.lengths.std())
        many = np.maximum(0.0, count * mean + np.sqrt(count) * std * z)
        return np.where(count > MANY, many, out)

    # -------------------------------------------------------------------------------- events
    def _stop(self, stop: NDArray[np.bool_], over: Array, failed: NDArray[np.bool_]) -> None:
        """Lose what is not on a checkpoint, wait, and start again."""
        self.time = self.time + over
        self.stopped["lost_work"] += self.ledger.roll_back(stop, over)
        runs = np.flatnonzero(stop)
        ready, waited, renewed = self.outages.restart(runs, failed[runs], self.time[runs])
        still = ready - self.time[runs]
        self.stopped["spares"][runs] += waited
        self.stopped["restarts"][runs] += still - waited
        self.time[runs] = ready
        keep = np.exp(
            -self.model.drift.of(self.cluster[runs]).rate(still)
        )  # the drift goes on meanwhile
        z = self.rng.standard_normal(runs.size)
        self.drift[runs] = keep * self.drift[runs] + np.sqrt(1.0 - keep**2) * z
        # of each node replaced, the cluster is another one with probability 1 / nodes
        u = self.rng.random((2, renewed.size))
        new = u[0] * self.model.n_nodes < 1.0
        drawn = (u[1] * self.model.mean.shape[0]).astype(np.int64)
        self.cluster[renewed] = np.where(new, drawn, self.cluster[renewed])

    def _switch(self, runs: Index) -> None:
        """Change the regime."""
        u = self.rng.random(runs.size)
        to = (u[:, None] >= self.choice[self.state[runs]]).sum(axis=1)
        self.state[runs] = np.minimum(to, len(self.choice) - 1)
        self.switch[runs] += waiting_times(self.rng, self.leave[self.state[runs]])

    def _begin(self, runs: Index) -> None:
        """Start an episode in a free slot."""
        kind = self.model.episodes
        assert kind is not None
        if not np.isinf(self.end[runs]).any(axis=1).all():
            self.end = np.column_stack([self.end, np.full(CHUNK, _NEVER)])
            self.ratio = np.column_stack([self.ratio, np.ones(CHUNK)])
            self.swap = np.column_stack([self.swap, np.zeros(CHUNK, bool)])
        slot = np.isinf(self.end[runs]).argmax(axis=1)
        sigma = np.sqrt(np.log1p(kind.cv**2))
        z = self.rng.standard_normal(runs.size)
        length = kind.mean_s * np.exp(sigma * z - 0.5 * sigma**2)
        found = kind.replaced & (length > kind.detection_s)
        at, n = self.begin[runs], runs.size
        self.end[runs, slot] = at + np.where(found, kind.detection_s, length)
        self.ratio[runs, slot] = kind.slowdowns[self.rng.integers(0, kind.slowdowns.size, n)]
        self.swap[runs, slot] = found
        self.begin[runs] = at + waiting_times(self.rng, np.full(n, kind.rate_per_s))
