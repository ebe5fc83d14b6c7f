"""Files that a command leaves behind: a folder of result, summary and plots, or a model.

Everything is written or nothing. Left out: what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.cli.commands.terminal import answer, print_answer, say, tell_warnings, to_json
from prism.common.errors import PrismError
from prism.common.files import atomic_files, check_directory

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes
    from rich.console import RenderableType


PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures that can be written."""


def write_folder(
    directory: str | os.PathLike[str],
    result: xr.Dataset,
    numbers: Mapping[str, Any],
    draw: Callable[[xr.Dataset], Mapping[str, Axes]],
    quiet: bool,
    texts: Mapping[str, str | bytes] | None = None,
) -> None:
    """Write ``result.nc``, ``summary.json`` and plots (PNG and SVG), all of them or none."""
    from prism import plots
    from prism.common.resultfiles import save
    from prism.simulation.results import made_with

    # results of recordings know nothing of versions themselves
    stamped = result.assign_attrs(made_with() | result.attrs)
    with atomic_files(directory) as folder:
        save(stamped, folder / "result.nc")
        (folder / "summary.json").write_text(to_json(numbers, indent=2) + "\n", encoding="utf-8")
        for name, text in (texts or {}).items():
            (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        for stem, ax in draw(result).items():
            plots.save_figure(ax, folder / f"{stem}.png")
            plots.save_figure(ax, folder / f"{stem}.svg")
        names = ", ".join(sorted(file.name for file in folder.iterdir()))
    if not quiet:
        say(f"wrote {directory}: {names}")


def conclude(
    result: xr.Dataset,
    *,
    output: str | None,
    as_json: bool,
    details: bool,
    quiet: bool,
    texts: Mapping[str, str | bytes] | None = None,
) -> None:
    """End a command: write its folder where one was asked for, tell warnings, print the answer."""
    from prism.common.resultfiles import answer_of

    answer = answer_of(result)
    numbers = answer.json()
    if output is not None:

        def draw(_: xr.Dataset) -> dict[str, Axes]:
            return {picture.stem: picture.draw() for picture in answer.pictures}

        write_folder(output, result, numbers, draw, quiet, texts)
    print_answer(answer, as_json, details)


def conclude_view(
    result: xr.Dataset,
    numbers: Mapping[str, Any],
    view: Callable[[Mapping[str, Any]], RenderableType],
    draw: Callable[[xr.Dataset], Mapping[str, Axes]],
    *,
    output: str | None,
    as_json: bool,
    quiet: bool,
    texts: Mapping[str, str | bytes] | None = None,
) -> None:
    """End a command: write its folder where one was asked for, tell warnings, print the answer."""
    if output is not None:
        write_folder(output, result, numbers, draw, quiet, texts)
    tell_warnings(numbers)
    answer(numbers, as_json, view)


def check_model_path(path: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Refuse a name for a model that cannot be written, before any work is done for it."""
    file = Path(path)
    if file.is_dir():
        raise PrismError(f"{path}: is a folder; -o takes the model's file here, as in {file}/m.nc")
    if file.suffix != ".nc":
        raise PrismError(f"{path}: expected a name that ends in .nc, such as {file.name}.nc")
    for name in inputs:
        if file.exists() and Path(name).exists() and file.samefile(name):
            raise PrismError(f"{path}: is an input of this fit; choose another name with -o")
    if not file.parent.exists():
        raise PrismError(f"{path}: no folder {file.parent}; make it, or choose another with -o")
    check_directory(file.parent)


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Refuse a name for a picture that cannot be written, before any work is done for it."""
    file = Path(path)
    if file.suffix.lower() not in PICTURES:
        raise PrismError(
            f"{path}: unknown format of a picture; the name must end in {', '.join(PICTURES)}"
        )
    check_directory(file.parent, "--plot")
