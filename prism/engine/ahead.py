"""The part of the engine that a second process compiles; the first one finds it in the cache."""

from __future__ import annotations

import numpy as np

from prism.engine.arrays import LANES, Block, Step, Walk, Work
from prism.engine.cache import compile_for, is_kept
from prism.engine.effects import draw_stalls, end_block, fill_bank
from prism.engine.step import run_phase, run_range


def is_compiled() -> bool:
    """Tell whether a block needs no compilation, or none that would be found."""
    return is_kept(run_range)


def compile_part(step: Step, walk: Walk, block: Block, work: Work) -> None:
    """Compile, for any step, what takes long and `run_range` calls last."""
    lanes, events = np.zeros(LANES, np.float32), (work.ev_op, work.ev_lane, work.ev_delay)
    compile_for(run_phase, walk, block, work, 0, (0, 1), 0)
    compile_for(end_block, step.stalls, step.jitter, step.step_table, block, lanes, lanes)
    compile_for(fill_bank, step.bank, step.links, block, 0, 0, work.vectors[0])
    compile_for(draw_stalls, step.stalls, block, 0, events)
