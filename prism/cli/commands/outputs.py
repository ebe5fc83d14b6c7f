"""What every command is given, how it ends, and the files that it leaves: all of them or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prism.cli.commands.terminal import print_answer, progress_line, say, to_json
from prism.common.errors import PrismError
from prism.common.files import atomic_files, atomic_write, check_directory

if TYPE_CHECKING:
    import xarray as xr

    from prism.common.results import Result
    from prism.present.answer import Answer


PICTURES = (".png", ".svg", ".pdf")  # endings of pictures that can be written


@dataclass(frozen=True)
class Call:
    """What any command is given, see `prism.cli.commands.options.common_options`."""

    as_json: bool
    seed: int | None
    threads: int | None
    quiet: bool
    details: bool = True
    output: str | None = None  # a folder

    def say(self, text: str) -> None:
        """Write a line to stderr, unless notes are not wanted."""
        if not self.quiet:
            say(text)

    def progress(self, doing: str) -> AbstractContextManager[Callable[[int, int], None] | None]:
        """Show how far work is."""
        return progress_line(doing, self.quiet)

    def run(self, doing: str, analysis: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call what draws, its progress shown."""
        with self.progress(doing) as report:
            return analysis(*args, seed=self.seed, threads=self.threads, progress=report, **options)

    def print(self, answer: Answer) -> None:
        """Print an answer."""
        print_answer(answer, self.as_json, self.details)

    def conclude(
        self, result: Result | xr.Dataset, texts: Mapping[str, str | bytes] | None = None
    ) -> Answer:
        """End a command: write its folder where one was asked for, print the answer and give it."""
        from prism.common.resultfiles import answer

        found: Answer = answer(result)
        if self.output is not None:
            _write_folder(self.output, result, found, self.quiet, texts or {})
        self.print(found)
        return found


def _write_folder(
    directory: str | os.PathLike[str],
    result: Result | xr.Dataset,
    answer: Answer,
    quiet: bool,
    texts: Mapping[str, str | bytes],
) -> None:
    """Write ``result.nc``, ``summary.json`` and pictures (PNG and SVG), all of them or none."""
    from prism import plots
    from prism.common.resultfiles import dataset_of, save
    from prism.simulation.results import made_with

    # results of recordings know nothing of versions themselves
    dataset = dataset_of(result)
    stamped = dataset.assign_attrs(made_with() | dataset.attrs)
    with atomic_files(directory) as folder:
        save(stamped, folder / "result.nc")
        summary = to_json(answer.json(), indent=2) + "\n"
        for name, text in {"summary.json": summary, **texts}.items():
            (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
        for picture in answer.pictures:
            files = (folder / f"{picture.stem}{ending}" for ending in (".png", ".svg"))
            plots.save_figure(picture.draw(), *files)
        names = ", ".join(sorted(file.name for file in folder.iterdir()))
    if not quiet:
        say(f"wrote {directory}: {names}")


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


def check_file_path(path: str | os.PathLike[str], option: str) -> None:
    """Refuse a name for a file that cannot be written, before any work is done for it."""
    file = Path(path)
    if file.is_dir():
        raise PrismError(f"{option} {path}: is a folder; expected the name of a file to write")
    if not file.parent.is_dir():
        raise PrismError(f"{option} {path}: no folder {file.parent}; make it, or choose another")
    check_directory(file.parent, option)


def write_text(path: str | os.PathLike[str], text: str, quiet: bool) -> None:
    """Write a text file under a temporary name first, and say so."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(text.encode())
    if not quiet:
        say(f"wrote {path}")


openmetrics_option = click.option(
    "--openmetrics", metavar="FILE", type=click.Path(), help="Write the forecast as OpenMetrics."
)


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Refuse a name for a picture that cannot be written, before any work is done for it."""
    file = Path(path)
    if file.suffix.lower() not in PICTURES:
        raise PrismError(
            f"{path}: unknown format of a picture; the name must end in {', '.join(PICTURES)}"
        )
    check_directory(file.parent, "--plot")
