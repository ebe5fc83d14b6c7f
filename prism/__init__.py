"""How long a distributed training run takes, with what probability, and why that varies.

Everything a command calls is here and is loaded when it is first used, so that
``import prism`` and ``prism --help`` stay fast. Results are :class:`xarray.Dataset`.
The names live in ``__init__.pyi``, which type checkers and the lazy loader both read.
"""

import os as _os

import lazy_loader as _lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

# Compiled code is kept beside the sources, or below the user's home; where neither can be written
# (a container with a random user) numba would refuse to run at all.
_places = (_os.path.dirname(__file__), _os.path.expanduser("~"))
if "NUMBA_CACHE_DIR" not in _os.environ and not any(_os.access(p, _os.W_OK) for p in _places):
    import tempfile as _tempfile

    _os.environ["NUMBA_CACHE_DIR"] = _os.path.join(
        _tempfile.gettempdir(), f"prism-{__version__}-{_os.getuid()}"
    )
