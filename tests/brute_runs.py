"""Whole runs step by step, from the definition: the reference of `prism.simulation.runs.model`.

Every step of every run is taken on its own, with its own clock for what happens meanwhile. Nothing
is shared with the code under test but the dataclasses of the model. Vectors are runs, so that
20,000 steps of some thousand runs take seconds.
"""

import numpy as np

DAY = 86_400.0


class BruteRuns:
    """`n_runs` runs of `n_steps` steps; run i on cluster i modulo their number."""

    def __init__(self, model, n_steps, n_runs, seed, start_s=0.0):
        self.model, self.n_steps, self.n, self.start = model, n_steps, n_runs, start_s
        self.rng = rng = np.random.default_rng(seed)
        self.t, self.done = np.zeros(n_runs), np.zeros(n_runs, int)
        self.cluster = np.arange(n_runs) % model.mean.shape[0]
        self.drift = rng.standard_normal(n_runs)
        self.effect = 1.0 + model.run_cv * rng.standard_normal(n_runs)
        self.fail = self.clock(0.0 if model.interruptions is None else self.failure_rate())
        self.state, self.switch = np.zeros(n_runs, int), np.full(n_runs, np.inf)
        if model.regime is not None:
            self.leave = model.regime.sum(axis=1)
            # a run begins in a step as any other: by shares of steps, not of time
            flow = model.regime - np.diag(self.leave)
            steps = np.abs(np.linalg.svd(flow.T)[2][-1]) / model.mean.mean(axis=0)
            self.state = rng.choice(steps.size, n_runs, p=steps / steps.sum())
            self.switch = rng.exponential(1.0 / self.leave[self.state])
        self.episodes = [[] for _ in range(n_runs)]  # of (end, ratio, swap)
        self.begin = self.clock(0.0 if model.episodes is None else model.episodes.rate_per_s)
        self.history = [[(0, -np.inf)] for _ in range(n_runs)]  # checkpoints: step, when written
        self.spares = None
        if model.interruptions is not None and model.interruptions.spares is not None:
            self.spares = [[0.0] * model.interruptions.spares for _ in range(n_runs)]
        self.failures, self.productive = np.zeros(n_runs, int), np.zeros(n_runs)

    def failure_rate(self):
        fail = self.model.interruptions
        return fail.per_1000_node_days / 1000.0 * fail.n_nodes / DAY

    def clock(self, rate):
        if rate == 0.0:
            return np.full(self.n, np.inf)
        return self.rng.exponential(1.0 / rate, self.n)

    def run(self):
        """Return the time of every run [s]."""
        while (self.done < self.n_steps).any():
            self.happen()
            self.step()
        return self.t

    def happen(self):
        """Let come what is due before the next step begins."""
        model, rng = self.model, self.rng
        active = self.done < self.n_steps
        while model.regime is not None and (due := active & (self.switch <= self.t)).any():
            for i in np.flatnonzero(due):
                rates = np.cumsum(model.regime[self.state[i]])
                self.state[i] = np.searchsorted(rates, rates[-1] * rng.random(), side="right")
                self.switch[i] += rng.exponential(1.0 / self.leave[self.state[i]])
        kind = model.episodes
        if kind is None:
            return
        for i in np.flatnonzero(active & (self.begin <= self.t)):
            sigma = np.sqrt(np.log1p(kind.cv**2))
            length = rng.lognormal(np.log(kind.mean_s) - 0.5 * sigma**2, sigma)
            swap = kind.replaced and length > kind.detection_s
            end = self.begin[i] + (kind.detection_s if swap else length)
            self.episodes[i].append((end, rng.choice(kind.slowdowns), swap))
            self.begin[i] += rng.exponential(1.0 / kind.rate_per_s)
        for i, found in enumerate(self.episodes):
            if found and active[i]:
                self.episodes[i] = [e for e in found if e[0] > self.t[i] or e[2]]

    def step(self):
        """Take one step of every run that is not done, or fail in it."""
        model, rng, active = self.model, self.rng, self.done < self.n_steps
        slow, swap = np.ones(self.n), np.full(self.n, np.inf)
        for i, found in enumerate(self.episodes if model.episodes is not None else ()):
            if found:
                slow[i] = max(e[1] for e in found)
                swap[i] = min((e[0] for e in found if e[2]), default=np.inf)
        work = np.ones(self.n)
        if model.profile is not None:
            work = model.profile[np.minimum(self.done, self.n_steps - 1)]
        shared = 1.0 + model.drift.cv * self.drift
        phase = 2.0 * np.pi * (self.t + self.start - model.drift.diurnal_peak_s) / DAY
        shared = shared + np.sqrt(2.0) * model.drift.diurnal_cv * np.cos(phase)
        own = model.mean[self.cluster, self.state]
        own = own + model.std[self.cluster, self.state] * rng.standard_normal(self.n)
        seconds = work * own * slow * self.effect * shared
        productive = seconds.copy()
        if model.stalls is not None:
            counts = rng.poisson(model.stalls.rate_per_s * seconds)
            for i in np.flatnonzero(counts):
                seconds[i] += rng.choice(model.stalls.lengths, counts[i]).sum()
        after = self.done + 1
        if model.evaluations is not None:
            e = model.evaluations
            seconds = seconds + np.where(after % e.interval_steps == 0, e.duration_s, 0.0)
        c = model.checkpoints
        if c is not None and c.blocking:
            seconds = seconds + np.where(after % c.interval_steps == 0, c.write_s, 0.0)
        end = self.t + seconds
        stop = active & (np.minimum(self.fail, swap) < end)
        go = active & ~stop
        if c is not None:
            late = 0.0 if c.blocking else c.write_s
            for i in np.flatnonzero(go & (after % c.interval_steps == 0)):
                self.history[i].append((after[i], end[i] + late))
        before = self.t.copy()
        self.t, self.done = np.where(go, end, self.t), np.where(go, after, self.done)
        self.productive += np.where(go, productive, 0.0)
        rate = model.mean[self.cluster, self.state] * slow * self.effect  # nominal length of a step
        elapsed = np.where(go, rate, 0.0)
        for i in np.flatnonzero(stop):
            self.stop(i, bool(self.fail[i] <= swap[i]), min(self.fail[i], swap[i]))
            elapsed[i] = self.t[i] - before[i]
        tau = model.drift.tau_s
        keep = np.exp(-elapsed / tau) if tau > 0.0 else np.zeros(self.n)
        fresh = keep * self.drift + np.sqrt(1.0 - keep**2) * rng.standard_normal(self.n)
        self.drift = np.where(active, fresh, self.drift)

    def stop(self, i, failed, now):
        """Fail, or replace a slow node; go back to the last checkpoint that was written."""
        fail, rng = self.model.interruptions, self.rng
        now = max(now, self.t[i])
        self.episodes[i] = [e for e in self.episodes[i] if not (e[2] and e[0] <= now)]
        written = [x for x in self.history[i] if x[1] <= now]
        self.done[i] = written[-1][0]
        self.history[i] = written
        while True:
            kinds = fail.causes
            detection, restart, replaces = fail.detection_s, fail.restart_s, True
            if not failed:
                detection = 0.0
            elif kinds:
                kind = kinds[rng.choice(len(kinds), p=[k.share for k in kinds])]
                detection, restart, replaces = kind.detection_s, kind.restart_s, kind.replaces
            if failed:
                self.failures[i] += 1
                self.fail[i] = now + rng.exponential(1.0 / self.failure_rate())
            found = now + detection
            if replaces:
                if rng.random() < 1.0 / self.model.n_nodes:
                    self.cluster[i] = rng.integers(self.model.mean.shape[0])
                if self.spares is not None:
                    pool = [*self.spares[i], found + rng.exponential(fail.repair_s)]
                    found = max(found, min(pool))
                    pool.remove(min(pool))
                    self.spares[i] = pool
            if self.fail[i] >= found + restart:
                self.t[i] = found + restart
                return
            now, failed = max(self.fail[i], now), True
