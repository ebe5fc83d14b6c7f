"""Runs from event to event, many at a time.

Events: a failure, a change of regime, the start or end of a fail-slow episode, a node replaced, a
mark to record. Between two of them n steps take n mu + the sum of the drift + sqrt(n) sigma z +
compound-Poisson stalls + the checkpoints and evaluations among them. A failure sends a run back to
its last checkpoint. Exact but for this: which step an event falls into is found from the expected
speed until then. A replaced node renews the whole cluster with probability 1 / nodes, which keeps
the clusters' spread and gives the memory that an average over nodes would have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.simulation.runs.drift import decay_sum, drift_sum, wave_sum
from prism.simulation.runs.ledger import Ledger
from prism.simulation.runs.outages import Outages, waiting_times
from prism.simulation.runs.parts import Array, Episodes, RunModel
from prism.simulation.runs.rates import stationary

Index = NDArray[np.int64]
CHUNK = 1024  # runs that draw together; the first n runs do not change with their number
MANY = 1000  # stalls beyond which their sum is as good as normal
MAX_EVENTS = 300_000  # of one run, minutes of work
_PLAIN = ("ideal_steps", "slow_steps", "step_noise", "run_effect", "model_error", "congestion")
_OTHER = ("drift", "stalls", "evaluations", "checkpoints", "lost_work", "restarts", "spares")
_NEVER = np.inf


def term_names(model: RunModel) -> tuple[str, ...]:
    """Names of the terms a run of this model consists of."""
    return (*_PLAIN, *dict.fromkeys(e.name for e in model.episodes), *_OTHER)


def wrong_by(model: RunModel, first: int, seed: int) -> Array:
    """Draw what the model is wrong by in each run of a chunk: a factor on all of its steps [1]."""
    if model.model_error == 0.0:
        return np.ones(CHUNK)
    rng = np.random.Generator(np.random.Philox(key=[seed, (first // CHUNK << 8) + 20]))
    return np.asarray(np.exp(model.model_error * rng.standard_normal(CHUNK)))


@dataclass
class Chunk:
    """What the runs of one chunk come to; arrays as in `prism.simulation.runs.parts.Runs`."""

    total: Array
    cluster: Index
    terms: Array  # [term, run]
    marks: Array
    failures: Index


class EventLoop:
    """The state of `CHUNK` runs, advanced together.

    Parameters
    ----------
    first : int
        Number of the first run.
    start_s : float
        Time of day at which runs start [s].
    marks : sequence of int
        Step counts to record, ascending.
    """

    def __init__(
        self, model: RunModel, n_steps: int, first: int, seed: int, start_s: float,
        marks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.model, self.n_steps, self.start_s = model, n_steps, start_s
        self.rng = np.random.Generator(np.random.Philox(key=[seed, (first // CHUNK << 8) + 12]))
        n, rng = CHUNK, self.rng
        self.names = term_names(model)
        self.row = {name: i for i, name in enumerate(self.names)}
        self.cluster = (first + np.arange(n)) % model.mean.shape[0]
        self.began = self.cluster.copy()
        self.time = np.zeros(n)
        start = rng.standard_normal(n)
        if model.drift.initial is not None:
            start = model.drift.initial[self.cluster]
        self.drift = start
        self.own = 1.0 + model.run_cv * rng.standard_normal(n)
        self.effect = self.own * wrong_by(model, first, seed)
        self.ledger = Ledger(len(self.names), n, model.checkpoints)
        self.outages = Outages(model.interruptions, n, rng)
        self.marks = np.asarray(marks, float)
        self.at_mark = np.zeros((n, self.marks.size))
        # the work of the first s steps; steps alike where there is no profile
        profile = model.profile
        self.work = None if profile is None else np.concatenate([[0.0], np.cumsum(profile)])
        self._start_clocks()

    # ------------------------------------------------------------------------------- clocks
    def _start_clocks(self) -> None:
        """Draw when the first failure, change of regime and episode come."""
        model, n = self.model, CHUNK
        self.state = np.zeros(n, np.int64)
        self.switch = np.full(n, _NEVER)
        if model.regime is not None:
            rates = model.regime.rates * (1.0 - np.eye(len(model.regime.rates)))
            self.leave = rates.sum(axis=1)
            self.choice = np.cumsum(rates, axis=1) / np.maximum(self.leave, 1e-300)[:, None]
            share = np.cumsum(stationary(rates))
            self.state = np.searchsorted(share / share[-1], self.rng.random(n), side="right")
            self.switch = waiting_times(self.rng, self.leave[self.state])
        self.begin = np.full((n, len(model.episodes)), _NEVER)
        for j, kind in enumerate(model.episodes):
            if kind.rate_per_s > 0.0:
                self.begin[:, j] = waiting_times(self.rng, np.full(n, kind.rate_per_s))
        self.end = np.full((n, 1), _NEVER)  # [run, slot] of the episodes under way
        self.ratio = np.ones((n, 1))
        self.of_kind = np.zeros((n, 1), np.int64)
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
            if progress is not None and rounds % 20 == 0:
                progress(float(self.done.mean()) / self.n_steps)
            if rounds > MAX_EVENTS:
                raise PrismError(
                    f"a run of {self.n_steps} steps has more than {MAX_EVENTS:,} events; lower the "
                    "rates of failures, fail_slow or regime, or make checkpoints more frequent"
                )
        terms = self._settle(self.ledger.close())
        return Chunk(self.time, self.began, terms, self.at_mark, self.outages.failures)

    def _settle(self, terms: Array) -> Array:
        """Give what is known exactly its due; seconds were shared out evenly over steps till now.

        The difference was lost in failures, or was not.
        """
        model, n, lost = self.model, self.n_steps, self.row["lost_work"]
        c, e = model.checkpoints, model.evaluations
        work = float(n if self.work is None else self.work[n])
        exact = {
            "checkpoints": n // c.interval_steps * c.write_s if c and c.blocking else 0.0,
            "evaluations": n // e.interval_steps * e.duration_s if e else 0.0,
        }
        if model.ideal_s is not None:
            exact["ideal_steps"] = work * model.ideal_s
        for name, seconds in exact.items():
            terms[lost] += terms[self.row[name]] - seconds
            terms[self.row[name]] = seconds
        if model.interruptions is None and not any(x.replaced for x in model.episodes):
            terms[lost] = 0.0  # rounding is no loss
        return terms

    def _advance(self) -> None:
        """Take all runs to their next event, and let it happen."""
        left = self.n_steps - self.done
        clocks = np.column_stack([self.outages.clock, self.switch, self.begin, self.end])
        which = clocks.argmin(axis=1)
        gap = clocks[np.arange(CHUNK), which] - self.time
        n_begin = self.begin.shape[1]
        slot = which - 2 - n_begin
        ends = slot >= 0
        stops = (which == 0) | (ends & self.swap[np.arange(CHUNK), np.maximum(slot, 0)])
        n, over = self._steps_within(gap, left)
        # a step under way goes on through all but a stop
        n = np.where(stops | (gap <= 0.0), n, n + 1.0)
        mark = self._next_mark()
        reached = (n >= np.minimum(left, mark)) | ~np.isfinite(gap)
        n = np.where(reached, np.minimum(left, mark), n)
        self._take(n)
        happens = ~reached & (left > 0.0)
        stop = happens & stops
        if stop.any():
            self._stop(stop, np.where(stop, np.maximum(over, 0.0), 0.0), which == 0)
        if (happens & (which == 1)).any():
            self._switch(np.flatnonzero(happens & (which == 1)))
        for i in np.flatnonzero(happens & ends):
            self.end[i, slot[i]] = _NEVER
            self.ratio[i, slot[i]] = 1.0
        for j in range(n_begin):
            hit = np.flatnonzero(happens & (which == 2 + j))
            if hit.size:
                self._begin(hit, j, self.model.episodes[j])

    def _next_mark(self) -> Array:
        """Find how many steps there are to the next mark [run]."""
        if not self.marks.size:
            return np.full(CHUNK, _NEVER)
        at = np.searchsorted(self.marks, self.done, side="right")
        marks = np.append(self.marks, _NEVER)
        return np.asarray(marks[at] - self.done)

    def _base(self) -> tuple[Array, Array, Array]:
        """Seconds of a unit of work now; its factor by regime; its factor by episodes [run]."""
        mean = self.model.mean
        regime = mean[self.cluster, self.state] / mean[self.cluster, 0]
        slow = self.ratio.max(axis=1)
        slow = np.where(np.isfinite(self.end).any(axis=1), slow, 1.0)
        return mean[self.cluster, 0] * self.effect * regime * slow, regime, slow

    def _rate(self, base: Array) -> Array:
        """Return a step over the memory of the drift [1]."""
        tau = self.model.drift.tau_s
        return base / tau if tau > 0.0 else np.full(CHUNK, np.inf)

    def _work_of(self, n: Array) -> Array:
        """Work of the next n steps, in steps of mean length [1]."""
        if self.work is None:
            return n
        at = self.done.astype(np.int64)
        return np.asarray(self.work[at + n.astype(np.int64)] - self.work[at])

    def _pauses(self, n: Array) -> tuple[Array, Array]:
        """Seconds of checkpoints and of evaluations within the next n steps."""
        out = []
        c, e = self.model.checkpoints, self.model.evaluations
        for interval, seconds in (
            (c.interval_steps, c.write_s if c.blocking else 0.0) if c is not None else (1, 0.0),
            (e.interval_steps, e.duration_s) if e is not None else (1, 0.0),
        ):
            if seconds == 0.0:
                out.append(np.zeros(CHUNK))
                continue
            before = np.floor(self.done / interval)
            out.append(seconds * (np.floor((self.done + n) / interval) - before))
        return out[0], out[1]

    def _steps_within(self, gap: Array, left: Array) -> tuple[Array, Array]:
        """Find how many steps are expected to end within `gap` seconds, and the seconds over."""
        model, (base, _, _) = self.model, self._base()
        about = np.clip(gap / base, 1.0, np.maximum(left, 1.0))
        fade = decay_sum(about, self._rate(base)) / about
        relative = 1.0 + model.drift.cv * self.drift * fade
        if model.drift.diurnal_cv > 0.0:
            relative += self._wave(about, base) / about
        pace = base * np.maximum(relative, 0.05)
        if model.stalls is not None and model.stalls.lengths.size:
            pace = pace * (1.0 + model.stalls.rate_per_s * float(model.stalls.lengths.mean()))
        lengthy, smooth = np.zeros(CHUNK), pace
        for pause, interval in self._pause_rates():
            lengthy, smooth = lengthy + pause, smooth + pause / interval
        if self.work is None:
            low = np.clip(np.floor((gap - lengthy) / smooth) - 1.0, 0.0, left)
            high = np.clip(np.ceil((gap + lengthy) / smooth) + 1.0, 0.0, left)
        else:
            low, high = np.zeros(CHUNK), left.copy()

        def expected(n: Array) -> Array:
            checkpoints, evaluations = self._pauses(n)
            return np.asarray(pace * self._work_of(n) + checkpoints + evaluations)

        while (high > low).any():  # the largest n that ends in time
            middle = np.ceil(0.5 * (low + high))
            fits = expected(middle) <= gap
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1.0)
        over = np.where(np.isfinite(gap), gap, 0.0) - expected(low)
        return low, over

    def _pause_rates(self) -> list[tuple[float, int]]:
        """Length [s] and interval [step] of what pauses the run regularly."""
        c, e = self.model.checkpoints, self.model.evaluations
        out = []
        if c is not None and c.blocking:
            out.append((c.write_s, c.interval_steps))
        if e is not None:
            out.append((e.duration_s, e.interval_steps))
        return out

    def _wave(self, n: Array, base: Array) -> Array:
        """Sum of the daily wave over n steps [1]."""
        drift = self.model.drift
        at = self.time + self.start_s
        wave = wave_sum(at, n, base, drift.diurnal_peak_s)
        return np.asarray(np.sqrt(2.0) * drift.diurnal_cv * wave)

    def _take(self, n: Array) -> None:
        """Take n steps each: their time, by term."""
        model, drift = self.model, self.model.drift
        base, regime, slow = self._base()
        work = self._work_of(n)
        z = self.rng.standard_normal((3, CHUNK))
        each = np.divide(work, n, out=np.ones(CHUNK), where=n > 0.0)
        total, self.drift = drift_sum(self.drift, n, self._rate(base), z[1:])
        relative = drift.cv * total
        if drift.diurnal_cv > 0.0:
            relative = relative + self._wave(n, base)
        moved = base * each * np.maximum(relative, -n)
        std = model.std[self.cluster, self.state] * self.effect * slow * each
        noise = std * np.sqrt(n * (1.0 + drift.cv**2)) * z[0]
        noise = np.maximum(noise, -(base * work + moved))  # steps take no less than nothing
        seconds = np.zeros((len(self.names), CHUNK))
        mean = model.mean[self.cluster, 0]
        ideal = mean if model.ideal_s is None else np.full(CHUNK, model.ideal_s)
        stalls = self._stalls(np.maximum(base * work + moved, 0.0))
        checkpoints, evaluations = self._pauses(n)
        for name, value in (
            ("ideal_steps", work * ideal),
            ("slow_steps", work * (mean - ideal)),
            ("run_effect", work * mean * (self.own - 1.0)),
            ("model_error", work * mean * (self.effect - self.own)),
            ("congestion", work * mean * self.effect * (regime - 1.0)),
            ("step_noise", noise), ("drift", moved), ("stalls", stalls),
            ("checkpoints", checkpoints), ("evaluations", evaluations),
        ):  # fmt: skip
            seconds[self.row[name]] = value
        self._blame_episodes(seconds, base * work * (1.0 - 1.0 / slow))
        spent = seconds.sum(axis=0)
        self.time = self.time + spent
        self.ledger.keep(n, seconds)
        self._record(n)

    def _blame_episodes(self, seconds: Array, delay: Array) -> None:
        """Book what episodes delay under the kind of the worst."""
        if not self.model.episodes:
            return
        worst = self.of_kind[np.arange(CHUNK), self.ratio.argmax(axis=1)]
        for j, kind in enumerate(self.model.episodes):
            seconds[self.row[kind.name]] += np.where(worst == j, delay, 0.0)

    def _stalls(self, exposure: Array) -> Array:
        """Seconds of the stalls that fall into so many seconds of stepping."""
        stalls = self.model.stalls
        if stalls is None or stalls.rate_per_s == 0.0 or not stalls.lengths.size:
            return np.zeros(CHUNK)
        count = self.rng.poisson(stalls.rate_per_s * exposure)
        few = np.where(count <= MANY, count, 0)
        drawn = stalls.lengths[self.rng.integers(0, stalls.lengths.size, int(few.sum()))]
        out = np.bincount(np.repeat(np.arange(CHUNK), few), drawn, CHUNK)
        z = self.rng.standard_normal(CHUNK)
        mean, std = float(stalls.lengths.mean()), float(stalls.lengths.std())
        many = np.maximum(0.0, count * mean + np.sqrt(count) * std * z)
        return np.where(count > MANY, many, out)

    def _record(self, n: Array) -> None:
        """Note the time of runs that came to a mark, again if they had lost what they did."""
        if not self.marks.size:
            return
        at = np.searchsorted(self.marks, self.done)
        there = np.append(self.marks, -1.0)[at] == self.done
        hit = np.flatnonzero(there & (n > 0.0))
        self.at_mark[hit, at[hit]] = self.time[hit]

    # -------------------------------------------------------------------------------- events
    def _stop(self, stop: NDArray[np.bool_], over: Array, failed: NDArray[np.bool_]) -> None:
        """Lose what is not on a checkpoint, wait, and start again."""
        self.time = self.time + over
        saved = self.ledger.saved
        saved[self.row["lost_work"]] += self.ledger.roll_back(stop, over)
        runs = np.flatnonzero(stop)
        ready, waited, renewed = self.outages.restart(runs, failed[runs], self.time[runs])
        still = ready - self.time[runs]
        saved[self.row["spares"], runs] += waited
        saved[self.row["restarts"], runs] += still - waited
        self.time[runs] = ready
        self._pass(runs, still)
        self._renew(renewed)

    def _pass(self, runs: Index, seconds: Array) -> None:
        """Let the drift go on while the job stands still."""
        tau = self.model.drift.tau_s
        rate = seconds / tau if tau > 0.0 else np.full(runs.size, np.inf)
        z = self.rng.standard_normal(runs.size)
        keep = np.exp(-rate)
        self.drift[runs] = keep * self.drift[runs] + np.sqrt(1.0 - keep**2) * z

    def _renew(self, runs: Index) -> None:
        """Replace a node: the cluster is another one with probability 1 / nodes."""
        u = self.rng.random((2, runs.size))
        new = u[0] * self.model.n_nodes < 1.0
        drawn = (u[1] * self.model.mean.shape[0]).astype(np.int64)
        self.cluster[runs] = np.where(new, drawn, self.cluster[runs])

    def _switch(self, runs: Index) -> None:
        """Change the regime."""
        u = self.rng.random(runs.size)
        to = (u[:, None] >= self.choice[self.state[runs]]).sum(axis=1)
        self.state[runs] = np.minimum(to, len(self.choice) - 1)
        self.switch[runs] += waiting_times(self.rng, self.leave[self.state[runs]])

    def _begin(self, runs: Index, j: int, kind: Episodes) -> None:
        """Start an episode in a free slot."""
        if not np.isinf(self.end[runs]).any(axis=1).all():
            self.end = np.column_stack([self.end, np.full(CHUNK, _NEVER)])
            self.ratio = np.column_stack([self.ratio, np.ones(CHUNK)])
            self.of_kind = np.column_stack([self.of_kind, np.zeros(CHUNK, np.int64)])
            self.swap = np.column_stack([self.swap, np.zeros(CHUNK, bool)])
        slot = np.isinf(self.end[runs]).argmax(axis=1)
        sigma = np.sqrt(np.log1p(kind.cv**2))
        z = self.rng.standard_normal(runs.size)
        length = kind.mean_s * np.exp(sigma * z - 0.5 * sigma**2)
        found = kind.replaced & (length > kind.detection_s)
        at = self.begin[runs, j]
        self.end[runs, slot] = at + np.where(found, kind.detection_s, length)
        self.ratio[runs, slot] = kind.slowdowns[
            self.rng.integers(0, kind.slowdowns.size, runs.size)
        ]
        self.of_kind[runs, slot] = j
        self.swap[runs, slot] = found
        self.begin[runs, j] = at + waiting_times(self.rng, np.full(runs.size, kind.rate_per_s))
