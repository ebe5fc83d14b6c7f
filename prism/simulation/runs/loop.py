"""Runs in segments, many at a time: one loop, from whose records all figures of runs are read.

A segment lasts from one event to the next: a failure, a change of regime, the start or end of a
fail-slow episode, a step count to record. How many steps that is follows from the speed that is
expected; what they take is drawn from the distributions of their sums: n mu + the drift +
the noise of n steps + compound-Poisson stalls + the checkpoints and evaluations among them. A stop
loses what is since the last checkpoint. A replaced node renews the whole cluster with probability
1 / nodes, which keeps the clusters' spread and gives the memory of an average over nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.simulation.runs.drift import Decay, drift_moments, rate_of, wave_sum
from prism.simulation.runs.nodestock import NodeStock
from prism.simulation.runs.parts import (
    STOPS,
    Array,
    Cause,
    Index,
    Interruptions,
    RunChunk,
    RunModel,
    term_names,
)
from prism.simulation.runs.rates import step_shares, waiting_times

CHUNK = 1024  # runs that draw together; the first n runs do not change with their number
MANY = 1000  # stalls beyond which their sum is as good as normal
LEAST = 0.05  # of a step's mean: what a spread so wide that it reaches below 0 is cut at
MAX_EVENTS = 300_000  # of one run, minutes of work
BLOCK = 128  # steps drawn one by one at once: arrays of [128, 1024] stay in the cache
AHEAD = 1.5, 8  # of those, the ones expected until the next event by this, and more
CHECKED = 1000  # segments after each of which it is seen whether there will be more
FAILURE, SWITCH, BEGIN, WHOLE, ENDS = range(5)  # rows of the clocks; episodes' from ENDS on
_NEVER, _FAR = np.inf, 1e15  # seconds that no run takes
_RUNS = np.arange(CHUNK)
_NONE = Interruptions(0.0, 1)  # nothing fails, and a planned replacement takes no time


def generator(seed: int, first: int, stream: int) -> np.random.Generator:
    """Return one of the random streams of the chunk that begins with a run."""
    return np.random.Generator(np.random.Philox(key=[seed, (first // CHUNK << 8) + stream]))


class RunLoop:
    """The state of `CHUNK` runs from a first one on, advanced together."""

    def __init__(
        self, model: RunModel, n_steps: int, first: int, seed: int, start_s: float,
        marks: Sequence[int] = (), one_by_one: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.n_steps, self.start_s = model, n_steps, start_s
        self.one_by_one = one_by_one
        self.rng = rng = generator(seed, first, 12)
        n, n_clusters = CHUNK, model.mean.shape[0]
        self.cluster = (first + _RUNS) % n_clusters
        self.began = self.cluster.copy()
        self.time, self.done, self.saved = np.zeros((3, n))  # seconds; steps, those not to be lost
        self.marks = np.append(np.asarray(marks, float), _NEVER)
        self.at_mark = np.zeros((n, len(marks)))
        # what all steps of a run share, and what all models like this one may be wrong by
        self.own = np.maximum(1.0 + model.run_cv * rng.standard_normal(n), LEAST)
        wrong = generator(seed, first, 20).standard_normal(n)
        self.effect = self.own * np.exp(model.model_error * wrong)
        drift = model.drift
        self.drift = rng.standard_normal(n)
        if drift.initial is not None:
            self.drift = drift.initial[self.cluster]
        self.drifts = bool(np.any(np.asarray(drift.cv) > 0.0))
        stall_rate = 0.0 if model.stalls is None else model.stalls.rate_per_s
        self.stall_s = 0.0 if model.stalls is None else float(model.stalls.lengths.mean())
        # [cluster]: drift, stalls, and the mean step over the states of its regime
        of_steps = drift.cv, drift.tau_s, stall_rate, model.mean @ step_shares(model)
        self.of_clusters = [np.broadcast_to(np.asarray(x, float), n_clusters) for x in of_steps]
        # the work of the first s steps; steps alike where there is no profile
        profile = model.profile
        self.work = None if profile is None else np.concatenate([[0.0], np.cumsum(profile)])
        ends = 1.0 if profile is None else np.append(profile, 1.0)
        self.least, self.most = float(np.min(ends)), float(np.max(ends))
        self.pauses = pauses = model.pauses
        # seconds by term: on a checkpoint, and since the last [term, run]
        parts = {"congestion": model.regime, "stalls": model.stalls, "evaluations": None,
                 "checkpoints": None, **pauses}  # fmt: skip
        steps = [x for x in term_names(model) if x not in STOPS]
        self.names = [x for x in steps if parts.get(x, x) is not None]
        self.kept, self.open = np.zeros((2, len(self.names), n))
        self.restarts, self.waits = np.zeros((2, n))
        self.stopped = np.zeros(n, bool)
        self._set_clocks()

    def _set_clocks(self) -> None:
        """Draw when things first happen."""
        model, rng, n = self.model, self.rng, CHUNK
        self.clock = np.full((ENDS + 1, n), _NEVER)
        self.fail = fail = model.interruptions or _NONE
        self.clock[FAILURE] = waiting_times(rng, np.full(n, fail.rate_per_s))
        self.failures = np.zeros(n, np.int64)
        # planned, with nothing to detect: a replica more, and a node found slow, which is replaced
        planned = Cause("found", 0.0, 0.0, fail.restart_s, repair_s=fail.repair_s)
        kinds = (*fail.kinds, replace(planned, nodes=0), planned)
        self.kinds = np.array([(k.detection_s, k.restart_s, k.nodes, k.repair_s) for k in kinds]).T
        self.shares = np.cumsum([k.share for k in fail.kinds])
        self.stock, self.fewer = NodeStock(fail, n), np.ones(n)
        self.state = np.zeros(n, np.int64)
        if model.regime is not None:
            self.leave = model.regime.sum(axis=1)
            leave = np.maximum(self.leave, 1e-300)
            self.choice = np.cumsum(model.regime, axis=1) / leave[:, None]
            share = np.cumsum(step_shares(model))
            self.state = np.searchsorted(share / share[-1], rng.random(n), side="right")
            self.clock[SWITCH] = waiting_times(rng, self.leave[self.state])
        if model.episodes is not None:
            self.clock[BEGIN] = waiting_times(rng, np.full(n, model.episodes.rate_per_s))
        self.ratio = np.ones((1, n))  # [slot, run] of the episodes in progress
        self.found = np.zeros((1, n), bool)  # the node is replaced when it ends
        self._look_up()

    def _look_up(self) -> None:
        """Look up what the clusters of the runs are like, in their states [run]."""
        at, mean = self.cluster, self.model.mean
        self.drift_cv, self.drift_s, self.stall_rate, self.mean = (x[at] for x in self.of_clusters)
        self.wider = np.sqrt(1.0 + self.drift_cv**2)  # noise drifts, too
        self.std, self.regime = self.model.std[at, self.state], mean[at, self.state] / mean[at, 0]
        self.unit = mean[at, 0] * self.effect * self.regime

    def run(self, progress: Callable[[float], None] | None = None) -> RunChunk:
        """Advance until all runs are done; tell ``progress`` what share is."""
        rounds = 0
        while (self.done < self.n_steps).any():
            self._advance()
            rounds += 1
            if rounds % 20:
                continue
            share = float(self.done.mean()) / self.n_steps
            if progress is not None:
                progress(share)
            if rounds % CHECKED == 0 and rounds > share * MAX_EVENTS:
                raise PrismError(
                    f"a run of {format_count(self.n_steps, 'step')} has more than {MAX_EVENTS:,} "
                    "events; lower the rates of failures, fail_slow or regime, or make checkpoints "
                    "more frequent"
                )
        return RunChunk(self.time, self.began, self._terms(), self.at_mark, self.failures)

    def _terms(self) -> Array:
        """Return the seconds by term, which add up to the total [term, run].

        What was lost is all that is left: the seconds of a segment are shared out evenly over its
        steps when some of them are lost, and what is known exactly gets its due here.
        """
        model, n = self.model, self.n_steps
        terms = dict(zip(self.names, self.kept + self.open, strict=True))
        terms |= {"restarts": self.restarts, "spares": self.waits}
        for name, (every, seconds) in self.pauses.items():
            terms[name] = np.full(CHUNK, n // every * seconds)
        if model.ideal_s is not None:
            work = float(n if self.work is None else self.work[n])
            terms["ideal_steps"] = np.full(CHUNK, work * model.ideal_s)
        lost = self.time - np.sum(list(terms.values()), axis=0)
        terms["lost_work"] = np.where(self.stopped, lost, 0.0)  # else it is rounding
        return np.array([terms.get(name, np.zeros(CHUNK)) for name in term_names(model)])

    # ------------------------------------------------------------------------------ segments
    def _advance(self) -> None:
        """Take all runs to their next event, and let it happen."""
        left = self.n_steps - self.done
        self.passed = {k: np.floor(self.done / every) for k, (every, _) in self.pauses.items()}
        event = self.clock.argmin(axis=0)
        slot = np.maximum(event - ENDS, 0)
        failed = event == FAILURE
        stops = failed | ((event >= ENDS) & self.found[slot, _RUNS])
        gap = np.minimum(self.clock.min(axis=0) - self.time, _FAR)
        slow = self.ratio.max(axis=0) * self.fewer
        base = self.unit * slow  # seconds of a unit of work now
        at = np.searchsorted(self.marks, self.done, side="right")
        mark = self.marks[at]
        most = np.minimum(left, mark - self.done)
        self.decay = Decay(rate_of(base, self.drift_s)) if self.drifts else None
        pace, sums = self._expect(gap, left, base), None
        lasting = pace * (1.0 + self.stall_rate * self.stall_s)
        if self.one_by_one:
            ahead = AHEAD[0] * max(0.0, float(np.median((gap / pace)[left > 0.0]))) + AHEAD[1]
            most = np.minimum(most, min(BLOCK, ahead) // 1)
            ends, *sums = self._look_ahead(int(most.max()), pace)
            n = (ends[1:] <= gap).sum(axis=0).astype(float)
            over = gap - ends[n.astype(np.int64), _RUNS]
        else:
            n = self._steps_within(gap, lasting)
            over = gap - lasting * self._work_of(n) - sum(self._pauses(n).values())
        # a step in progress goes on through all but a stop
        n = np.where(stops | (gap <= 0.0), n, n + 1.0)
        happens = (n < most) & (left > 0.0)
        n = np.minimum(n, most)
        if sums is not None:
            sums = [x[n.astype(np.int64), _RUNS] for x in sums]
        self._keep(n, self._safe(lasting), self._draw(n, base, slow, sums))
        hit = np.flatnonzero(self.done == mark)  # again where a run had lost what it did
        self.at_mark[hit, at[hit]] = self.time[hit]
        stop = happens & stops
        if stop.any():
            self.time += np.where(stop, np.maximum(over, 0.0), 0.0)
            self._stop(np.flatnonzero(stop), failed[stop])
        happens &= ~failed
        if not happens.any():  # most often
            return
        ended = np.flatnonzero(happens & (event >= ENDS))
        self.clock[event[ended], ended], self.ratio[slot[ended], ended] = _NEVER, 1.0
        for kind, happen in ((SWITCH, self._switch), (BEGIN, self._begin), (WHOLE, self._grow)):
            here = np.flatnonzero(happens & (event == kind))
            if here.size:
                happen(here)

    def _expect(self, gap: Array, left: Array, base: Array) -> Array:
        """Return the seconds that a unit of work is expected to take until the next event.

        Without stalls.
        """
        about = np.minimum(np.maximum(gap / base, 1.0), np.maximum(left, 1.0))
        relative = 1.0 + self._wave(about, base) / about
        if self.decay is not None:
            fade = self.decay.sum(about) / about
            relative = relative + self.drift_cv * self.drift * fade
        return np.asarray(base * np.maximum(relative, LEAST))

    def _steps_within(self, gap: Array, pace: Array) -> Array:
        """Find the largest number of steps that are expected to end within `gap` seconds."""
        pauses = self.pauses
        rest = gap - sum(s * (self.done / n - self.passed[k]) for k, (n, s) in pauses.items())
        smooth, each = sum(s / n for n, s in pauses.values()), sum(s for _, s in pauses.values())
        low = self._steps_of(np.maximum(rest, 0.0) / (pace + smooth / self.least))
        high = self._steps_of(np.maximum(rest + each, 0.0) / (pace + smooth / self.most)) + 1.0
        high = np.minimum(high, self._steps_of(np.maximum(gap, 0.0) / pace))
        while (high > low).any():
            middle = np.ceil(0.5 * (low + high))
            fits = pace * self._work_of(middle) + sum(self._pauses(middle).values()) <= gap
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1.0)
        return low

    def _steps_of(self, work: Array) -> Array:
        """Count the next steps whose work is within some, as far as there are any."""
        left = self.n_steps - self.done
        if self.work is None:
            return np.minimum(np.floor(work), left)
        wanted = self.work[self.done.astype(np.int64)] + work
        return np.asarray(np.searchsorted(self.work, wanted, side="right") - 1.0 - self.done)

    def _safe(self, pace: Array) -> Array | float:
        """Count the next steps whose checkpoint is written before the next stop that is known."""
        c = self.model.checkpoints
        if c is None or c.blocking:
            return _NEVER
        ends = np.where(self.found, self.clock[ENDS:], _NEVER).min(axis=0)
        gap = np.minimum(self.clock[FAILURE], ends) - self.time - c.write_s
        return np.where(gap < 0.0, -1.0, self._steps_within(np.minimum(gap, _FAR), pace))

    def _work_of(self, n: Array) -> Array:
        """Work of the next n steps, in steps of mean length [1]."""
        if self.work is None:
            return n
        at = self.done.astype(np.int64)
        end = np.minimum(at + n.astype(np.int64), self.n_steps)
        return np.asarray(self.work[end] - self.work[at])

    def _pauses(self, n: Array) -> dict[str, Array]:
        """Seconds of checkpoints and of evaluations within the next n steps."""
        return {
            name: seconds * (np.floor((self.done + n) / every) - self.passed[name])
            for name, (every, seconds) in self.pauses.items()
        }

    def _look_ahead(self, n: int, pace: Array) -> tuple[Array, Array, Array]:
        """Draw the noise and the stalls of the next n steps one by one.

        Returns when each ends, from now on, the noise until then in an undisturbed step's seconds,
        and the stalls, all [step + 1, run], from none on.
        """
        model, rng = self.model, self.rng
        i = np.broadcast_to(np.arange(n + 1.0)[:, None], (n + 1, CHUNK))
        mean = model.mean[self.cluster, 0]
        own = model.residuals[rng.integers(0, model.residuals.size, (n, CHUNK))]
        own = np.maximum(own, -mean) * np.diff(self._work_of(i), axis=0)
        stalls = self._stalls(pace * (1.0 + own / mean))
        noise, stalls = (np.insert(np.cumsum(x, axis=0), 0, 0.0, axis=0) for x in (own, stalls))
        ends = pace * (self._work_of(i) + noise / mean) + stalls
        return ends + sum(self._pauses(i).values()), noise, stalls

    def _wave(self, n: Array, base: Array) -> Array | float:
        """Sum of the daily wave over n steps [1]."""
        drift = self.model.drift
        if drift.diurnal_cv == 0.0:
            return 0.0
        wave = wave_sum(self.time + self.start_s, n, base, drift.diurnal_peak_s)
        return np.asarray(np.sqrt(2.0) * drift.diurnal_cv * wave)

    def _draw(self, n: Array, base: Array, slow: Array, sums: Sequence[Array] | None) -> Array:
        """Draw what the next n steps take [term, run]; noise and stalls may be there already."""
        model, work = self.model, self._work_of(n)
        each = np.divide(work, n, out=np.ones(CHUNK), where=n > 0.0)
        known = base * work
        moved = known * (self._drifted(n) - 1.0) + base * each * self._wave(n, base)
        # what the factor on all steps adds to the noise belongs to what that is made of
        if sums is None:
            noise = self.std * np.sqrt(n) * self.rng.standard_normal(CHUNK) * each
        else:
            noise = sums[0] * self.regime
        steps = known + moved
        noise = np.maximum(noise * slow * self.wider, -steps / self.effect)  # no less than nothing
        mean, own = work * self.mean, self.own
        ideal = self.mean if model.ideal_s is None else model.ideal_s
        terms = {
            "ideal_steps": work * ideal,
            "slow_steps": work * (self.mean - ideal),
            "step_noise": noise,
            "run_effect": (mean + noise) * (own - 1.0),
            "model_error": (mean + noise) * (self.effect - own),
            "drift": moved,
            **self._pauses(n),
        }
        if model.regime is not None:
            terms["congestion"] = work * (base / slow - self.effect * self.mean)
        if model.episodes is not None:
            terms["fail_slow"] = known * (1.0 / self.fewer - 1.0 / slow)
        if self.fail.shrink is not None:
            terms["fewer_replicas"] = known * (1.0 - 1.0 / self.fewer)
        if model.stalls is not None:
            terms["stalls"] = self._stalls(steps) if sums is None else sums[1]
        return np.array([terms[name] for name in self.names])

    def _drifted(self, n: Array) -> Array | float:
        """Draw the mean factor of n steps by the drift, and how it goes on.

        Notes
        -----
        Steps' factors are lognormal with mean 1, and so is their mean, nearly: with its variance
        (Fenton and Wilkinson), and the exponent the mean of theirs.
        """
        if self.decay is None:
            return 1.0
        z, y = self.rng.standard_normal((2, CHUNK))
        m = drift_moments(n, self.decay)
        std = np.sqrt(m.variance)
        total = m.decay * self.drift + m.along * z + m.across * y
        self.drift = m.left * self.drift + m.std * z
        total = np.divide(total, std, out=np.zeros(CHUNK), where=std > 0.0)
        sigma = np.sqrt(np.log1p((self.drift_cv * std / np.maximum(n, 1.0)) ** 2))
        return np.asarray(np.exp(sigma * total - 0.5 * sigma**2))

    def _stalls(self, exposure: Array) -> Array:
        """Draw the seconds of the stalls in the given seconds of stepping [run] or [step, run]."""
        if self.model.stalls is None:
            return np.zeros(exposure.shape)
        rng, lengths = self.rng, self.model.stalls.lengths
        count = rng.poisson(self.stall_rate * np.maximum(exposure, 0.0))
        few = np.where(count <= MANY, count, 0).ravel()
        at, drawn = np.repeat(np.arange(few.size), few), rng.choice(lengths, int(few.sum()))
        out = np.bincount(at, drawn, few.size).reshape(count.shape)
        normal = lengths.std() * rng.standard_normal(CHUNK)
        many = np.maximum(0.0, count * self.stall_s + np.sqrt(count) * normal)
        return np.where(count > MANY, many, out)

    def _keep(self, n: Array, safe: Array | float, seconds: Array) -> None:
        """Book n steps and their seconds; those up to the last checkpoint can't be lost any more.

        A blocking checkpoint is there when its step ends; one in the background once it is written.
        """
        before, self.done = self.done, self.done + n
        self.time = self.time + seconds.sum(axis=0)
        c = self.model.checkpoints
        if c is None:
            self.open += seconds
        else:
            last = np.floor((before + np.minimum(n, safe)) / c.interval_steps) * c.interval_steps
            passed = last > before
            tail = np.where(passed, (self.done - last) / np.maximum(n, 1.0), 1.0)
            self.kept += np.where(passed, self.open + (1.0 - tail) * seconds, 0.0)
            self.open = np.where(passed, 0.0, self.open) + tail * seconds
            self.saved = np.where(passed, last, self.saved)

    # -------------------------------------------------------------------------------- events
    def _stop(self, runs: Index, failed: NDArray[np.bool_], planned: int = -1) -> None:
        """Go back to the last checkpoint; stand still until ready again, or the next failure.

        That one begins all of it again. What did not fail is of a planned kind.
        """
        self.open[:, runs], self.done[runs], self.stopped[runs] = 0.0, self.saved[runs], True
        self.failures[runs] += failed
        at, clock, rng = self.time[runs], self.clock[FAILURE], self.rng
        kind = np.searchsorted(self.shares, rng.random(runs.size) * self.shares[-1], side="right")
        detection, restart, nodes, repair = self.kinds[:, np.where(failed, kind, planned)]
        if self.fail.restart_success < 1.0:
            restart = restart * rng.geometric(self.fail.restart_success, runs.size)
        found, gone, wait = at + detection, nodes > 0.0, np.zeros(runs.size)
        wait[gone] = self.stock.take(runs[gone], found[gone], nodes[gone], repair[gone], rng)
        again, new = self.stock.fails_at(runs, at, rng), failed | (gone & (clock[runs] > at))
        clock[runs] = np.where(new, again, clock[runs])
        until = np.minimum(found + wait + restart, np.maximum(clock[runs], at))
        waited = np.clip(until - found, 0.0, wait)
        self.waits[runs] += waited
        self.restarts[runs] += until - at - waited
        self.time[runs] = until
        if self.fail.shrink is not None:
            self.fewer[runs], self.clock[WHOLE, runs] = self.stock.fewer(runs, until)
        # the drift goes on; a node replaced makes it another cluster with probability 1 / nodes
        left = np.exp(-rate_of(until - at, self.drift_s[runs]))
        z = rng.standard_normal(runs.size)
        self.drift[runs] = left * self.drift[runs] + np.sqrt(1.0 - left**2) * z
        renewed = runs[gone][rng.random(int(gone.sum())) * self.model.n_nodes < nodes[gone]]
        if renewed.size:
            self.cluster[renewed] = rng.integers(0, self.model.mean.shape[0], renewed.size)
            self._look_up()

    def _grow(self, runs: Index) -> None:
        """Restart with one replica more, after a checkpoint."""
        self.kept[:, runs] += self.open[:, runs]
        self.open[:, runs], self.saved[runs] = 0.0, self.done[runs]
        self._stop(runs, np.zeros(runs.size, bool), planned=-2)

    def _switch(self, runs: Index) -> None:
        """Change the regime."""
        u = self.rng.random(runs.size)
        to = (u[:, None] >= self.choice[self.state[runs]]).sum(axis=1)
        self.state[runs] = np.minimum(to, len(self.choice) - 1)
        self.clock[SWITCH, runs] += waiting_times(self.rng, self.leave[self.state[runs]])
        self._look_up()

    def _begin(self, runs: Index) -> None:
        """Start an episode in a free slot."""
        kind, rng = self.model.episodes, self.rng
        assert kind is not None
        if not np.isinf(self.clock[ENDS:, runs]).any(axis=0).all():
            self.clock = np.vstack([self.clock, np.full(CHUNK, _NEVER)])
            self.ratio = np.vstack([self.ratio, np.ones(CHUNK)])
            self.found = np.vstack([self.found, np.zeros(CHUNK, bool)])
        slot = np.isinf(self.clock[ENDS:, runs]).argmax(axis=0)
        sigma = np.sqrt(np.log1p(kind.cv**2))
        length = kind.mean_s * np.exp(sigma * rng.standard_normal(runs.size) - 0.5 * sigma**2)
        found = kind.replaced & (length > kind.detection_s)
        at = self.clock[BEGIN, runs]
        self.clock[ENDS + slot, runs] = at + np.where(found, kind.detection_s, length)
        self.ratio[slot, runs] = rng.choice(kind.slowdowns, runs.size)
        self.found[slot, runs] = found
        self.clock[BEGIN, runs] = at + waiting_times(rng, np.full(runs.size, kind.rate_per_s))
