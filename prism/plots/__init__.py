"""Plots of results: ``(data, ax=None) -> Axes``, a module per kind of result.

Nothing is simulated here and no figure becomes global state; without ``ax`` a figure of its own
is made, which `save_figure` writes.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

# modules that rooms above may import
FACE = (
    "base", "schedule",
)  # fmt: skip
