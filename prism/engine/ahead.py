"""Two parts of the engine, which two processes compile; each finds the other's in the cache."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np

from prism.engine.arrays import LANES, Block, Keys, Step, Work
from prism.engine.blocks import new_block, new_work
from prism.engine.cache import KEPT, compile_for
from prism.engine.effects import draw_ranks, draw_stalls, fill_bank
from prism.engine.step import find_path, run_blocks, run_phase, start_block


def make_blank(kind: Any) -> Any:
    """Make a tuple, array or number of a kind: of one thing each, with the types that all have."""
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return kind(*(make_blank(hints[name]) for name in kind._fields))
    if hasattr(kind, "__metadata__"):  # such as "int32[op, term]"
        dtype, _, axes = kind.__metadata__[0].partition("[")
        return np.zeros((1,) * len(axes.split(",")), dtype)
    return kind(1)


def compile_blocks() -> None:
    """Compile `run_phase` and `run_blocks` for any step: for another process to load.

    A process that compiles `run_blocks` itself runs `run_phase` as that was compiled alone, in
    nearly twice the time of what is loaded, in which it was optimised again.
    """
    if not KEPT:
        return
    step, keys, block, work = _make_arguments()
    walk, coef_a = step.walk(), np.zeros((1, 1, 1), np.float32)
    coef_r = coef_a[0]
    compile_for(run_phase, walk, work, coef_a, coef_r, keys, 0, 0, (0, 1), 0, 0)
    lanes = np.zeros((1, 1, LANES), np.float32)
    out = lanes[0], lanes, lanes
    compile_for(
        run_blocks, 0, walk, step.shared(), keys, block, work, coef_a[None], coef_r[None], out
    )


def compile_rest() -> None:
    """Compile what `run_blocks` calls at its beginning or end, and what is run before it."""
    if not KEPT:
        return
    step, keys, block, work = _make_arguments()
    events = work.ev_op, work.ev_lane, work.ev_delay
    compile_for(draw_stalls, step.stalls, step.tables, keys.stream[0], 0, block.words, 0, events)
    compile_for(find_path, step.walk(), work.chosen, work.on, work.wanted)
    compile_for(start_block, step.walk(), step.shared(), keys, 0, block, work)
    compile_for(fill_bank, step.shared(), step.tables, keys.stream, 0, block, 0, 0, work.vectors[0])
    words, x = block.words, np.ones((1, 1, 1), np.float32)
    compile_for(draw_ranks, step.ranks, step.tables, 0, keys.stream[0], words, words, x)


def _make_arguments() -> tuple[Step, Keys, Block, Work]:
    step, keys = make_blank(Step), make_blank(Keys)
    return step, keys, new_block(step), new_work(step, keys, np.zeros(1, np.int64))
