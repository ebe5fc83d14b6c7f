"""Unequal work of ranks: embedding tables that lie on single ones. Nothing of it is drawn."""

from dataclasses import replace

import numpy as np

from prism.simulation.effects.effect import Effect, HeldTables
from prism.simulation.program import Program


class TablesEffect(Effect):
    """What ranks with more to read than others cost."""

    name = "tables"
    streams = ()

    def acts(self, program: Program) -> bool:
        """Tell whether ranks differ."""
        return program.origin is not None and program.origin.work is not None

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Give all ranks the mean's work."""
        assert program.origin is not None and program.origin.work is not None
        factor = program.ranks.factor.copy()
        factor[:, program.low.member] /= program.origin.work[:, None, None, :].astype(np.float32)
        return replace(program, ranks=program.ranks._replace(factor=factor))
