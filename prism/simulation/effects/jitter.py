"""Jitter: a time added to every step of the job, whatever its length."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from prism import engine
from prism.distributions.distribution import Distribution, constant
from prism.simulation.effects.effect import Effect, HeldTables, Int, Pick
from prism.simulation.program import Program, Tables

JITTER_CV = 1.0  # of a jitter of which the mean alone is known


class Jitter(NamedTuple):
    """Time added to a step, which the ideal step is without."""

    mean_s: float = 0.0
    shape: Distribution = constant()  # of mean 1


def resolve(pick: Pick) -> Jitter:
    """Return what the job or its library says."""
    return Jitter(pick.value("jitter", "mean_s"), pick.distribution("jitter", JITTER_CV))


def lay(jitter: Jitter, tables: Tables) -> engine.Jitter:
    """Lay it into the engine's arrays."""
    if not jitter.mean_s:
        return engine.NO_JITTER
    return engine.Jitter(jitter.mean_s, tables.add(jitter.shape))


class JitterEffect(Effect):
    """Time added to steps."""

    name = "jitter"
    streams = (engine.JITTER,)

    def tables(self, program: Program) -> Int:
        """One."""
        return np.array([program.jitter.table], np.int32)

    def acts(self, program: Program) -> bool:
        """Tell whether anything is added."""
        return program.jitter.mean_s > 0.0

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Add as much to every step."""
        return replace(
            program, jitter=program.jitter._replace(table=held.one(program.jitter.table))
        )
