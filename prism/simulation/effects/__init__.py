"""Effects: why a step takes another time than the ideal one, a module for each.

A module says what the job or its library asks for (`resolve`), lays it into the engine's arrays
(`lay`, where it has arrays of its own), and tells `prism rank` whether it acts, how much it varies
and what the program is without it (`Effect`). One that is a factor on ops (`Factor`) or adds a time
to steps (`Added`) is all of that in one class, and is found here. Keys and words are in
`prism.jobs.jobspec.effects`.
"""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from prism.simulation.added import Added
from prism.simulation.effects.congestion import CongestionEffect
from prism.simulation.effects.effect import AddedEffect, Effect, FactorEffect, HeldTables
from prism.simulation.effects.factor import Factor
from prism.simulation.effects.rank import RankEffect
from prism.simulation.effects.residual import Treatment
from prism.simulation.effects.stall import StallEffect
from prism.simulation.effects.tables import TablesEffect
from prism.simulation.program import Program

__all__ = ["ADDED", "EFFECTS", "FACTORS", "Effect", "HeldTables", "Treatment", "hold_effect"]

Kind = TypeVar("Kind", Added, Factor)


def _found(kind: type[Kind]) -> tuple[type[Kind], ...]:
    """All of a kind in the modules here, by stream."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return tuple(sorted(kind.__subclasses__(), key=lambda one: one.stream))


FACTORS = _found(Factor)  # type: ignore[type-abstract]
"""Those that are factors on ops, in the order in which they multiply."""

ADDED = _found(Added)  # type: ignore[type-abstract]
"""Those that add a time to steps, in the order in which they do."""

EFFECTS: dict[str, Effect] = {
    effect.name: effect
    for effect in (
        RankEffect(), *(kind.effect(kind.name, kind.stream) for kind in FACTORS),
        FactorEffect("rank_step", 4), TablesEffect(), CongestionEffect(), StallEffect(),
        *map(AddedEffect, ADDED),
    )
}  # fmt: skip
"""In the order in which a ranking lists them; `rank_step` is of fitted traces alone."""


def hold_effect(program: Program, name: str) -> Program:
    """Return the program with an effect at its median; the graph and the keys stay."""
    held = HeldTables(program)
    return replace(EFFECTS[name].hold(program, held), tables=held.stack())
