"""Actions of a pipeline schedule, and the stage on which each virtual stage lies.

Virtual stages are the model's chunks in the order a microbatch passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

Kind = Literal["F", "B", "W"]
Shape = Literal["looped", "v"]
T = TypeVar("T")


class Action(NamedTuple):
    """One chunk's work for one microbatch on the stage whose list it stands in."""

    kind: Kind  # F forward, B backward (only its input half where a W follows), W weight gradient
    chunk: int  # model chunk of the stage, from 0; its virtual stage is `VirtualStages.virtual`
    microbatch: int  # microbatch, from 0


class Traits(NamedTuple):
    """What all schedules of a name have in common."""

    shape: Shape = "looped"
    splits: bool = False
    """Whether weight gradients wait: a backward is an input half (B) and a weight half (W)."""
    chunks: int | None = 1  # chunks of a stage; None: two or more
    rounds: int = 0  # microbatches that it needs at least, over the stages

    def allow_chunks(self, n_chunks: int) -> bool:
        """Tell whether a stage of a pipeline may have this many chunks."""
        return n_chunks > 1 if self.chunks is None else n_chunks == self.chunks


TRAITS = {
    "gpipe": Traits(),
    "1f1b": Traits(),
    "interleaved": Traits(chunks=None),
    "zb-h1": Traits(splits=True),
    "zb-v": Traits("v", splits=True, chunks=2),
    "dualpipe-v": Traits("v", splits=True, chunks=2, rounds=2),
}
"""Traits by the schedule's name."""


@dataclass(frozen=True)
class VirtualStages:
    """Where the chunks of a pipeline of p stages lie.

    Looped, virtual stage v lies on stage v mod p. In a V so do chunks 0, 2, ..., and the others
    go back: they lie on stage p - 1 - v mod p.
    """

    n_stages: int
    n_chunks: int = 1
    shape: Shape = "looped"

    def virtual(self, stage: int, chunk: int) -> int:
        """Virtual stage of a stage's chunk."""
        return chunk * self.n_stages + self._turned(stage, chunk)

    def place(self, virtual: int) -> tuple[int, int]:
        """Stage and chunk of a virtual stage."""
        chunk, position = divmod(virtual, self.n_stages)
        return self._turned(position, chunk), chunk

    def _turned(self, position: int, chunk: int) -> int:
        back = self.shape == "v" and chunk % 2 == 1
        return self.n_stages - 1 - position if back else position

    def rows(self, values: Sequence[T]) -> list[list[T]]:
        """Sort values of virtual stages by [stage][chunk]."""
        return [
            [values[self.virtual(stage, chunk)] for chunk in range(self.n_chunks)]
            for stage in range(self.n_stages)
        ]

    def next_of(self, action: Action, stage: int) -> int | None:
        """Virtual stage that reads what an F or a B gives, None where none does."""
        return self._neighbour(action, stage, 1)

    def source_of(self, action: Action, stage: int) -> int | None:
        """Virtual stage whose F (or B) an F (or B) reads, None where it reads none."""
        return self._neighbour(action, stage, -1)

    def _neighbour(self, action: Action, stage: int, way: int) -> int | None:
        """Virtual stage that comes next for an action's kind, or (way = -1) came before."""
        if action.kind == "W":
            return None
        virtual = self.virtual(stage, action.chunk) + (way if action.kind == "F" else -way)
        return virtual if 0 <= virtual < self.n_stages * self.n_chunks else None

    def link(self, one: int, other: int) -> int | None:
        """Link between neighbouring virtual stages, None on one stage.

        Link s joins stage s to the next one, the last link the last stage to the first.
        """
        low, high = sorted((self.place(one)[0], self.place(other)[0]))
        if low == high:
            return None
        # of two stages the way on and the way round are two links
        wraps = min(one, other) % self.n_stages == self.n_stages - 1 and self.shape == "looped"
        return high if wraps else low

    @property
    def ends_meet(self) -> bool:
        """Whether the first and the last virtual stage lie on one stage."""
        return self.place(self.n_stages * self.n_chunks - 1)[0] == 0


class Schedule(tuple[tuple[Action, ...], ...]):
    """Per stage, its actions in program order; and how its virtual stages lie."""

    shape: Shape

    def __new__(cls, rows: Iterable[Iterable[Action]], shape: Shape | None = None) -> Schedule:
        """Lay rows into a schedule; of another schedule the shape is taken over."""
        made = super().__new__(cls, (tuple(row) for row in rows))
        own: Shape = rows.shape if isinstance(rows, Schedule) else "looped"
        made.shape = own if shape is None else shape
        return made

    @property
    def n_chunks(self) -> int:
        """Chunks of a stage."""
        return 1 + max(action.chunk for row in self for action in row)

    @property
    def virtual_stages(self) -> VirtualStages:
        """Where its chunks lie."""
        return VirtualStages(len(self), self.n_chunks, self.shape)

    def split_of(self, stage: int) -> frozenset[tuple[int, int]]:
        """Backwards of a stage, (chunk, microbatch), whose weight half is an action of its own."""
        return frozenset((a.chunk, a.microbatch) for a in self[stage] if a.kind == "W")

    @property
    def letters(self) -> list[list[str]]:
        """Kinds of the actions [stage][action], the input half of a split backward being ``I``."""
        splits = map(self.split_of, range(len(self)))
        return [
            ["I" if a.kind == "B" and a[1:] in split else a.kind for a in row]
            for row, split in zip(self, splits, strict=True)
        ]


def play_rows(rows: Sequence[Sequence[object]], attempt: Callable[[int, list[int]], bool]) -> bool:
    """Go through rows side by side, each as far as it gets; tell whether all came to their end.

    `attempt` is called with a row and heads, the index of the next item of every row: does that
    item and returns True, or cannot yet. It may move other heads too.
    """
    heads, moved = [0] * len(rows), True
    while moved:
        moved = False
        for row, items in enumerate(rows):
            while heads[row] < len(items) and attempt(row, heads):
                heads[row] += 1
                moved = True
    return all(head == len(items) for head, items in zip(heads, rows, strict=True))
