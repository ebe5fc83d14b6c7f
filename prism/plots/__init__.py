"""Plots of results: ``(data, ax=None) -> Axes``, a module per kind of result.

Nothing is simulated here. Without ``ax`` a figure of its own is made, in prism's light style or in
the one that `style` chose, and in no global state; `save_figure` writes it.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

# what rooms above may import, by module
FACE = {
    "base": "save_figure style",
    "schedule": "plot_schedule",
}  # fmt: skip
