"""Effects: why a step takes another time than the ideal one, a module and a line here for each.

A module says what the job or its library asks for (`resolve`), lays it into the engine's arrays
(`lay`, where it has arrays of its own), and tells `prism rank` whether it acts, how much it varies
and what the program is without it (`Effect`). One that adds a time to steps is all of that in one
class (`Added`). Keys and words are in `prism.jobs.jobspec.effects`.
"""

from dataclasses import replace

from prism.simulation.added import Added
from prism.simulation.effects.call import CallEffect, ExpertEffect, RankStepEffect
from prism.simulation.effects.congestion import CongestionEffect
from prism.simulation.effects.effect import AddedEffect, Effect, HeldTables
from prism.simulation.effects.jitter import Jitter
from prism.simulation.effects.loader import Loader
from prism.simulation.effects.microbatch import MicrobatchEffect
from prism.simulation.effects.rank import RankEffect
from prism.simulation.effects.residual import Treatment
from prism.simulation.effects.stall import StallEffect
from prism.simulation.effects.step import StepEffect
from prism.simulation.effects.tables import TablesEffect
from prism.simulation.program import Program

__all__ = ["ADDED", "EFFECTS", "Effect", "HeldTables", "Treatment", "hold_effect"]

ADDED: tuple[type[Added], ...] = (Jitter, Loader)
"""Those that add a time to steps, in the order in which they do."""

EFFECTS: dict[str, Effect] = {
    effect.name: effect
    for effect in (
        RankEffect(), StepEffect(), MicrobatchEffect(), CallEffect(), RankStepEffect(),
        ExpertEffect(), TablesEffect(), CongestionEffect(), StallEffect(),
        *map(AddedEffect, ADDED),
    )
}  # fmt: skip
"""In the order in which a ranking lists them."""


def hold_effect(program: Program, name: str) -> Program:
    """Return the program with an effect at its median; the graph and the keys stay."""
    held = HeldTables(program)
    return replace(EFFECTS[name].hold(program, held), tables=held.stack())
