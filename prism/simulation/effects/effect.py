"""What every effect of a step says of itself to estimates and to `prism rank`."""

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prism.distributions.distribution import Distribution, lognormal
from prism.distributions.library import Library
from prism.distributions.tables import N_CELLS, sample_table
from prism.jobs.job import Job
from prism.simulation.added import Added
from prism.simulation.draws import spread_values
from prism.simulation.program import Program
from prism.workload.work import Workload

Int = NDArray[np.int32]


class Pick:
    """Values and distributions of effects: the job's, else the library's, else a default."""

    def __init__(self, job: Job, library: Library | None, workload: Workload | None) -> None:
        self.job, self.effects, self.library = job, job.variability.effects, library
        self.workload = workload  # of the job; None: to build where it is needed

    def value(self, effect: str, name: str, default: float = 0.0) -> float:
        """Return a figure of an effect."""
        given = getattr(getattr(self.effects, effect), name, None)
        if given is not None:
            return float(given)
        entry = f"{effect}/{name}"
        if self.library is not None and entry in self.library:
            return self.library.value(entry)
        return default

    def distribution(self, effect: str, default_cv: float = 0.0) -> Distribution:
        """Return the distribution of an effect, with the job's CV; lognormal without a library."""
        cv = getattr(getattr(self.effects, effect), "cv", None)
        if self.library is not None and effect in self.library:
            distribution = self.library.distribution(effect)
            return distribution if cv is None else distribution.scaled_to(cv)
        return lognormal(default_cv if cv is None else cv)


class HeldTables:
    """Tables of a program, and copies of them held at their median."""

    def __init__(self, program: Program) -> None:
        self.tables = program.tables
        self.index: dict[int, int] = {-1: -1}
        self.extra: list[NDArray[np.float32]] = []

    def __call__(self, indices: Int) -> Int:
        """Return indices of the held tables; -1 stays."""
        out = np.array([self.one(int(i)) for i in np.ravel(indices)], np.int32)
        return out.reshape(np.shape(indices))

    def one(self, i: int) -> int:
        """Return the index of one held table."""
        if i not in self.index:
            self.index[i] = len(self.tables) + len(self.extra)
            at_median = np.zeros((N_CELLS, 2), np.float32)
            at_median[:, 0] = sample_table(self.tables[i], np.array([1 << 31], np.uint32))[0]
            self.extra.append(at_median)
        return self.index[i]

    def stack(self) -> NDArray[np.float32]:
        """All tables, the held ones behind."""
        return np.concatenate([self.tables, self.extra]) if self.extra else self.tables


class Effect(ABC):
    """A shared effect in a program: what draws it, whether it acts, and the program without it."""

    name: str
    streams: tuple[int, ...]  # of the engine's draws
    term: str = ""  # of a run, where one is its alone

    def tables(self, program: Program) -> Int:
        """Quantile tables that it is drawn from, -1: none; it has none unless it says so."""
        return np.zeros(0, np.int32)

    def acts(self, program: Program) -> bool:
        """Tell whether it makes any step differ from another."""
        return bool((self.tables(program) >= 0).any())

    @abstractmethod
    def hold(self, program: Program, held: HeldTables) -> Program:
        """Return the program with it at its median; the caller lays the tables."""

    def cv(self, program: Program) -> float:
        """Coefficient of variation of one draw, where it acts most [1]; NaN: it has none."""
        used = set(np.ravel(self.tables(program)).tolist()) - {-1}
        cvs = (float(spread_values(program.tables[i]).std()) for i in used)
        return max(cvs, default=float("nan"))


class FactorEffect(Effect):
    """A factor on ops."""

    def __init__(self, name: str, stream: int) -> None:
        self.name, self.streams = name, (stream,)

    def tables(self, program: Program) -> Int:
        """Those of its row of the bank."""
        if self.name not in program.factors:
            return super().tables(program)
        return np.asarray(program.bank.table[program.factors.index(self.name)])

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Hold it in every vector."""
        table = program.bank.table.copy()
        if self.name in program.factors:
            own = program.factors.index(self.name)
            table[own] = held(table[own])
        return replace(program, bank=program.bank._replace(table=table))


class AddedEffect(Effect):
    """One that adds a time to steps."""

    def __init__(self, kind: type[Added]) -> None:
        self.name, self.streams = kind.name, (kind.stream,)

    def acts(self, program: Program) -> bool:
        """Tell whether what is added differs between steps."""
        return program.added != self.hold(program, HeldTables(program)).added

    def hold(self, program: Program, held: HeldTables) -> Program:
        """Add the same to every step."""
        added = tuple(x.held() if x.name == self.name else x for x in program.added)
        return replace(program, added=added)

    def cv(self, program: Program) -> float:
        """Coefficient of variation of what is added [1]; NaN where it follows from the steps."""
        moments = (x.moments() for x in program.added if x.name == self.name)
        return next((m[1] for m in moments if m), float("nan"))
