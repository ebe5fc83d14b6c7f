"""Where the files that ship with prism are: job files and distribution sets.

A wheel carries them inside the package (``prism/_data``); a checkout has them in
``experiments/jobs`` and ``distributions``. The package data is looked at first, so that
an installed prism never reads a checkout it happens to be run from.
"""

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_CHECKOUT = {"jobs": Path("experiments", "jobs"), "distributions": Path("distributions")}


def data_path(kind: Literal["jobs", "distributions"]) -> Path:
    """Return the folder of one kind of shipped file: an installed wheel's own, else the checkout's.

    Whether it exists is for the reader of a particular file to say.
    """
    packaged = _PACKAGE / "_data" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / _IN_CHECKOUT[kind]
