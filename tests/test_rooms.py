"""Rooms: each names in its `__init__` what others import, and nobody imports anything else."""

import ast
import graphlib
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import prism

ROOT = Path(prism.__file__).parent
WHOLE = {"common": {"agreement", "sizes"}, "jobs": {"jobspec.values"}}
"""Modules that others import by their own name."""
ROOMS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists())


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of prism, parsed."""
    return {file: ast.parse(file.read_text()) for file in ROOT.rglob("*.py")}


@cache
def is_module(module: str, name: str) -> bool:
    path = ROOT.parent.joinpath(*module.split("."), name)
    return path.with_suffix(".py").exists() or path.is_dir()


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node: much fewer than its nodes, and imports are statements."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules that a tree imports, and the name it takes of each, if any."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if is_module(node.module, alias.name):
                    yield f"{node.module}.{alias.name}", ""
                else:
                    yield node.module, alias.name


@cache
def crossings() -> list[tuple[Path, str, str, str]]:
    """What modules import from other rooms: file, room, module within it, name."""
    found = []
    for file, tree in trees().items():
        own = file.relative_to(ROOT).parts[0]
        for module, name in imported(tree):
            _, _, below = module.partition("prism.")
            room, _, inner = below.partition(".")
            if module.startswith("prism.") and room in ROOMS and room != own:
                found.append((file, room, inner, name))
    return found


def test_there_are_few_rooms():
    assert len(ROOMS) <= 14


@pytest.mark.parametrize("room", ROOMS)
def test_others_import_what_a_room_shows_and_nothing_else(room):
    shown = importlib.import_module(f"prism.{room}")
    used = {(str(f.relative_to(ROOT)), m, n) for f, r, m, n in crossings() if r == room}
    face = {(m, n) for m, names in getattr(shown, "FACE", {}).items() for n in names.split()}
    named = {(m, n) for _, m, n in used if m and n}
    assert named - face == set(), [x for x in used if x[1:] in named - face]
    assert face - named == set()  # what nobody uses any more
    assert {m for _, m, n in used if m and not n} <= WHOLE.get(room, set())
    assert [x for x in used if x[2].startswith("_")] == []
    assert all(hasattr(shown, name) for _, module, name in used if not module and name)
    assert shown.__doc__


def test_no_module_imports_itself_in_a_circle():
    """Imports inside functions too, but for those of type checkers alone."""
    graph: dict[str, set[str]] = {}
    for file, tree in trees().items():
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[own] = {module for module, _ in imported(at_run_time(tree))} - {own}
    assert not circle(graph)
    assert circle(graph | {"prism.common.errors": {"prism.cli.app"}})  # it would be found


def at_run_time(tree: ast.Module) -> ast.Module:
    """A module without what is read by type checkers alone."""
    return ast.Module([n for n in tree.body if not is_for_types(n)], [])


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def test_files_are_short_enough_to_read():
    lines = {file.relative_to(ROOT): file.read_text().count("\n") for file in trees()}
    assert {file: n for file, n in lines.items() if n > 450} == {}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of a circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


# -- tests ---------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
INSIDE = {
    "naive": "the oracle: the streams' keys and the quantile tables that it draws from",
    "twin_check": "the twin takes the nominal durations of kernels as they are",
    "pipeline_synth": "makes traces as tables, which no file format holds whole",
    "changes_made": "recordings of known changes, also for the scripts that count false alarms",
    "test_kineto": "collectives and clocks of single activities, which no figure shows",
    "test_engine": "words of Philox, table lookup, a group's maximum; bounds checks run it",
    "test_engine_cache": "files of compiled code that are damaged, foreign or absent",
    "test_compiled": "the folder of compiled code is chosen while prism is imported",
    "test_sums": "tails of sums of kernels at 1e-4 to 1e-9, which no simulated step reaches",
    "test_distributions": "distributions in their tails, against scipy; fits of kernels",
    "test_likelihood": "the likelihood of a drift, against dense algebra",
    "test_components": "mean squares and their intervals, against the design matrix",
    "test_agreement": "distances, effective sample size: against scipy, on thousands of samples",
    "test_attribution": "estimators of shares, on made-up runs with known ones",
    "test_differences": "stopping rules on made-up candidates with known differences",
    "test_collectives": "times of single collectives, until a command shows them",
    "test_cluster": "groups and links of ranks, joules of kernels, until a command shows them",
    "test_wiring": "rings and hops of placed groups, counted by brute force",
    "test_placement": "which node holds what, counted by brute force",
    "test_inventory": "names of hosts and benchmarks, one rule each",
    "test_host": "chunks of known launches; messages of gradients, which no command shows",
    "test_measure": "benchmarks without their minutes of a GPU",
    "test_ranges": "figures of model files spoilt one by one",
    "test_tracearrays": "arrays of a fitted trace, op by op",
    "test_explore": "controls of the page without a browser, and its process",
    "test_watch": "a thousand series, each looked at after every step",
}
"""Files of tests that import what is not public, and why they may."""


def private_names(file: Path) -> set[str]:
    """List what a file of tests imports beside `prism`, its plots and its command."""
    found = set()
    for module, name in imported(ast.parse(file.read_text())):
        if module.startswith("prism.") and module not in ("prism.plots", "prism.__main__"):
            found.add(f"{module}.{name}".rstrip("."))
        elif module == "prism" and name and name not in prism.__all__:
            found.add(f"prism.{name}")
    return found


def test_tests_go_through_public_names():
    """Or a change that no user sees would break them."""
    inside = {file.stem for file in TESTS.glob("*.py") if private_names(file)}
    assert inside == set(INSIDE)
    assert len(inside) <= 26 and all(INSIDE.values())
