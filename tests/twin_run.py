"""Whole runs in plain NumPy, step after step, from the job's own keys; goes on from `twin`.

`simulate_runs` is the loop: each step takes one of its cluster's simulated steps, times what all
steps of a run share, what drifts, and a slow node while there is one. A failure, or a slow node
that is taken out, sends a run back to its last checkpoint that was written (`Stops`).
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from twin import DAY, GRID, NORMAL, PER_CLUSTER, Effects, Walk, lognormal

Array = np.ndarray
HOUR = 3600.0
NEVER = np.inf


def simulate_runs(
    job: Any, work: Any, library: Any, model_error: float, clusters: int, runs: int, seed: int
) -> dict[str, Array]:
    """Runs of a job: ``total``, ``down`` and ``productive`` seconds, and ``failures`` [run].

    `model_error` is the standard deviation of the log of what all steps may be wrong by.
    """
    rng, run, e = np.random.default_rng(seed), job.run, Effects(job, library)
    quiet = Effects(job, library, off=("step", "regime"))
    steps = Walk(job, work, quiet, PER_CLUSTER * clusters, rng).run().reshape(clusters, -1)
    own = 1.0 + e.value("run", "cv") * rng.standard_normal(runs)
    own = own * np.exp(model_error * rng.standard_normal(runs))
    drift, memory_s = rng.standard_normal(runs), e.value("step", "correlation_time_s")
    wave, start_s = job.variability.effects.step, 0.0
    if run.start is not None:
        start_s = HOUR * run.start.hour + 60.0 * run.start.minute + run.start.second
    every, write_s, waits = checkpoints(run.checkpoint, float(steps.mean()))
    stall_rate, stall_s = e.stall("job")
    slow = SlowNodes(job, work, library, runs, rng)
    stops = Stops(job, clusters, runs, rng)
    productive = np.zeros(runs)
    while (active := stops.done < job.n_steps).any():
        now = stops.time.copy()
        factor = e.at("step", np.interp(drift, NORMAL, GRID))
        if wave is not None and wave.diurnal_cv:
            peak = 15.0 if wave.diurnal_peak_h is None else wave.diurnal_peak_h
            phase = 2.0 * np.pi * (now + start_s - HOUR * peak) / DAY
            factor = factor + sqrt(2.0) * wave.diurnal_cv * np.cos(phase)
        seconds = steps[stops.cluster, rng.integers(0, steps.shape[1], runs)] * own * factor
        seconds = seconds * slow.factor(now, active)
        useful = seconds
        if stall_rate:
            count = rng.poisson(stall_rate * seconds)
            seconds = seconds * (1.0 - stall_rate * stall_s) + e.stall_seconds(rng, count)
        after = stops.done + 1
        if run.evaluation is not None:
            seconds = seconds + run.evaluation.duration * (
                after % run.evaluation.interval_steps == 0
            )
        saves = after % every == 0 if every else np.zeros(runs, bool)
        end = now + seconds + write_s * (saves & waits)
        taken_out = slow.taken_out(now)
        ends = active & (np.minimum(stops.clock, taken_out) >= end)
        for i in np.flatnonzero(ends & saves):
            stops.saved[i].append((after[i], end[i] + (0.0 if waits else write_s)))
        stops.time, stops.done = np.where(ends, end, now), np.where(ends, after, stops.done)
        productive += np.where(ends, useful, 0.0)
        for i in np.flatnonzero(active & ~ends):
            failed = bool(stops.clock[i] <= taken_out[i])
            at = max(min(stops.clock[i], taken_out[i]), now[i])
            slow.end(i, at)
            stops.stop(i, at, failed)
        keep = np.exp(-(stops.time - now) / memory_s) if memory_s else np.zeros(runs)
        fresh = keep * drift + np.sqrt(1.0 - keep**2) * rng.standard_normal(runs)
        drift = np.where(active, fresh, drift)
    return {"total": stops.time, "down": stops.down, "productive": productive,
            "failures": stops.failures}  # fmt: skip


def checkpoints(block: Any, step_s: float) -> tuple[int, float, bool]:
    """Steps between two checkpoints (0: none), seconds that one takes, whether the job waits."""
    if block is None:
        return 0, 0.0, False
    every = block.interval_steps or max(1, round(block.interval / step_s))
    return every, block.write_s or 0.0, block.mode == "blocking"


class Stops:
    """Where each run is, its failures and checkpoints, and its stock of spares."""

    def __init__(self, job: Any, clusters: int, runs: int, rng: Any) -> None:
        fail = job.run.failures
        self.fail = None if fail in (None, "none") else fail
        self.rng, self.n_nodes, self.clusters = rng, job.n_nodes, clusters
        self.rate = 0.0
        if self.fail is not None:
            self.rate = self.fail.per_1000_node_days * job.n_nodes / 1000.0 / DAY
        self.clock = rng.exponential(1.0 / self.rate, runs) if self.rate else np.full(runs, NEVER)
        self.cluster, self.time = np.arange(runs) % clusters, np.zeros(runs)
        self.done, self.down = np.zeros(runs, int), np.zeros(runs)
        self.failures = np.zeros(runs, int)
        self.saved = [[(0, -NEVER)] for _ in range(runs)]  # steps, and when that is written
        spares = None if self.fail is None else self.fail.spares
        self.away = [[0.0] for _ in range(runs)]  # when nodes that failed are replaced
        self.spares = None if spares is None else [[0.0] * spares for _ in range(runs)]

    def stop(self, i: int, now: float, failed: bool) -> None:
        """Go back to the last checkpoint; stand still until the job steps again."""
        self.saved[i] = [s for s in self.saved[i] if s[1] <= now]
        self.done[i], end = self.saved[i][-1][0], now
        while True:
            found, restart, lost, repair = self.after(end, failed)
            if failed:
                self.failures[i] += 1
            if lost:
                if self.rng.random() * self.n_nodes < lost:  # GPUs of these nodes are others
                    self.cluster[i] = self.rng.integers(self.clusters)
                if self.spares is not None:
                    repaired = found + self.rng.exponential(repair)
                    held = sorted([*self.spares[i], *[repaired] * lost])
                    self.away[i] += held[:lost]
                    self.spares[i], found = held[lost:], max(found, *self.away[i])
            if failed or lost:
                self.clock[i] = self.fails_at(i, end)
            if self.clock[i] >= found + restart:  # else it fails again meanwhile
                break
            end, failed = self.clock[i], True
        self.down[i] += found + restart - now
        self.time[i] = found + restart

    def fails_at(self, i: int, now: float) -> float:
        """When the next node fails: any, and none if that one is not there."""
        while self.rate and now < NEVER:
            now += self.rng.exponential(1.0 / self.rate)
            if self.rng.random() * self.n_nodes >= sum(back > now for back in self.away[i]):
                return now
        return NEVER

    def after(self, now: float, failed: bool) -> tuple[float, float, int, float]:
        """When a stop is noticed, seconds from there to a step, nodes replaced, their repair."""
        if self.fail is None:
            return now, 0.0, 1, DAY
        detection, restart, lost = self.fail.detection, self.fail.restart, 1
        repair = self.fail.repair or DAY
        if failed and self.fail.causes:
            causes = list(self.fail.causes.values())
            share = np.array([cause.share for cause in causes])
            cause = causes[self.rng.choice(len(causes), p=share / share.sum())]
            detection = detection if cause.detection is None else cause.detection
            restart = restart if cause.restart is None else cause.restart
            lost = cause.nodes if cause.replace else 0
            repair = cause.repair or repair
        if self.fail.restart_success < 1.0:
            restart *= self.rng.geometric(self.fail.restart_success)
        return now + (detection if failed else 0.0), restart, lost, repair


class SlowNodes:
    """Episodes of a slow node; where there are several at a time the slowest decides."""

    def __init__(self, job: Any, work: Any, library: Any, runs: int, rng: Any) -> None:
        self.block, self.rng, self.n_nodes = job.variability.effects.fail_slow, rng, job.n_nodes
        self.now: list[list[tuple[float, float, bool]]] = [[] for _ in range(runs)]
        self.next = np.full(runs, NEVER)
        if self.block is None:
            return
        self.rate = self.block.rate_per_1000_node_days * self.n_nodes / 1000.0 / DAY
        self.next = rng.exponential(1.0 / self.rate, runs)
        self.mean_s = self.block.duration or {"compute": 600.0, "network": 1440.0}[self.block.kind]
        factor = self.block.factor or {"compute": 1.2, "network": 3.0}[self.block.kind]
        ideal = Walk(job, work, Effects(job, library), 1).run()[0]
        self.ratio = []  # step time while a node is slow, over that without, by node
        for node in range(self.n_nodes):
            slow = {"cluster.node_slowdowns": {node: {self.block.kind: factor}}}
            walk = Walk(job.replace(slow), work, Effects(job, library), 1, known_nodes=True)
            self.ratio.append(float(walk.run()[0]) / ideal)

    def factor(self, now: Array, active: Array) -> Array:
        """How many times longer a step takes now; begins the episodes that are due."""
        for i in np.flatnonzero(active & (self.next <= now)):
            begin, cv = self.next[i], self.block.duration_cv
            length = self.mean_s * float(np.interp(self.rng.random(), GRID, lognormal(cv)))
            detection = NEVER if self.block.detection is None else self.block.detection
            out = bool(self.block.replace and length > detection)
            end = begin + (detection if out else length)
            self.now[i].append((end, self.ratio[self.rng.integers(self.n_nodes)], out))
            self.next[i] = begin + self.rng.exponential(1.0 / self.rate)
        slow = np.ones(now.size)
        for i, found in enumerate(self.now):
            self.now[i] = found = [e for e in found if e[0] > now[i] or e[2]]
            slow[i] = max([1.0, *(e[1] for e in found)])
        return slow

    def taken_out(self, now: Array) -> Array:
        """When the next slow node is taken out [run]."""
        return np.array([min([NEVER, *(e[0] for e in found if e[2])]) for found in self.now])

    def end(self, i: int, now: float) -> None:
        """Slow nodes that were found are gone."""
        self.now[i] = [e for e in self.now[i] if not (e[2] and e[0] <= now)]
