"""The part of the engine that a second process compiles; the first one finds it in the cache."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np

from prism.engine.arrays import Keys, Step
from prism.engine.blocks import new_block, new_work
from prism.engine.cache import compile_for, is_kept
from prism.engine.effects import draw_ranks, fill_bank
from prism.engine.random import fill_pool
from prism.engine.step import run_blocks, run_phase


def is_compiled() -> bool:
    """Tell whether a block needs no compilation, or none that would be found."""
    return is_kept(run_blocks)


def make_blank(kind: Any) -> Any:
    """Make a tuple, array or number of a kind: of one thing each, with the types that all have."""
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind, include_extras=True)
        return kind(*(make_blank(hints[name]) for name in kind._fields))
    if hasattr(kind, "__metadata__"):  # such as "int32[op, term]"
        dtype, _, axes = kind.__metadata__[0].partition("[")
        return np.zeros((1,) * len(axes.split(",")), dtype)
    return kind(1)


def compile_part() -> None:
    """Compile, for any step, what takes long and `run_blocks` calls last."""
    step, keys = make_blank(Step), make_blank(Keys)
    walk, block, work = step.walk(), new_block(step), new_work(step, keys, np.zeros(1, np.int64))
    coef_a, coef_r = np.zeros((1, 1, 1), np.float32), np.zeros((1, 1), np.float32)
    compile_for(run_phase, walk, work, coef_a, coef_r, keys, 0, 0, (0, 1), 0)
    compile_for(fill_bank, step.shared(), step.tables, keys.stream, 0, block, 0, 0, work.vectors[0])
    compile_for(
        fill_pool, step.tables, 0, keys.residual, work.row, work.order, block.words, work.pool,
        work.slow,
    )  # fmt: skip
    compile_for(
        draw_ranks, step.ranks, step.tables, 0, keys.stream[0], np.ones((1, 1, 1), np.float32)
    )
