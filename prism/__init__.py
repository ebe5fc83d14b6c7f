"""How long a distributed training run takes, with what probability, and why that varies.

Everything a command calls is here and is loaded when it is first used, so that
``import prism`` and ``prism --help`` stay fast. Results are tables and
labelled arrays over an :class:`xarray.Dataset`.
The names live in ``__init__.pyi``, which type checkers and the lazy loader both read.
"""

import lazy_loader as _lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
