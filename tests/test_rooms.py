"""Rooms: each names in its `__init__` what others may import, and nobody imports anything else."""

import ast
import graphlib
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import prism

ROOT = Path(prism.__file__).parent
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
    face = set(getattr(shown, "FACE", ()))
    inner = {m for _, m, _ in used if m}
    if "*" in face:  # all modules of a command's name
        commands = {file.stem for file in (ROOT / "cli" / "commands").glob("[a-z]*.py")}
        face = face - {"*"} | {name for name in commands if (ROOT / room / f"{name}.py").exists()}
    assert inner - face == set(), [x for x in used if x[1] in inner - face]
    assert face - inner == set()  # what nobody uses any more
    assert [x for x in used if x[2].startswith("_")] == []
    assert all(hasattr(shown, name) for _, module, name in used if not module and name)
    assert shown.__doc__


def test_no_module_imports_itself_in_a_circle():
    """What is imported at the top of a module; imports inside functions come later."""
    graph: dict[str, set[str]] = {}
    for file, tree in trees().items():
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        top = ast.Module([n for n in tree.body if is_import(n)], [])
        graph[own] = {module for module, _ in imported(top)} - {own}
    assert not circle(graph)
    assert circle(graph | {"prism.common.errors": {"prism.cli.app"}})  # it would be found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of a circle, if there is one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom | ast.With)
