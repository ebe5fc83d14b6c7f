"""Sizes as expressions of names: numbers, + - * / //, parentheses, min and max, and nothing else.

An expression is parsed to Python's syntax tree, of which only the nodes named here are computed;
nothing is ever run.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from prism.jobs.jobspec.values import MAX_NUMBER
from prism.jobs.jobspec.yaml import near

Size = int | float | str
LONGEST = 300  # characters; deeper trees than this allows are what Python's parser refuses
WRITTEN = "numbers, names, + - * / // ( ) min max"
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_CALLS: dict[str, Callable[..., float]] = {"min": min, "max": max}


@lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr:
    """Parse an expression; ValueError where it is none."""
    if len(text) > LONGEST:
        raise ValueError(f"expected at most {LONGEST} characters, got {len(text)}; name a part")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of text such as "1if 2"
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, Warning, ValueError, MemoryError, RecursionError):
        raise ValueError(f"expected a size of {WRITTEN}, got {text!r}") from None
    for node in _nodes(tree):
        if node is not None:
            shown = ast.unparse(node)
            raise ValueError(f"expected a size of {WRITTEN}, got {shown!r} in {text!r}")
    return tree


def _nodes(node: ast.expr) -> Iterator[ast.expr | None]:
    """Walk a tree: each node that is no part of an expression, None for the others."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield None
        case ast.Name(id=name) if name not in _CALLS:
            yield None
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            yield from _nodes(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            yield from _nodes(left)
            yield from _nodes(right)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in _CALLS:
            for arg in args:
                yield from _nodes(arg)
        case _:
            yield node


def parse_size(value: object) -> Size:
    """Return a number or an expression as it is; ValueError where it is neither."""
    if isinstance(value, str):
        _tree(value)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a size of {WRITTEN}, got {value!r}")
    return value


def names_in(size: Size) -> set[str]:
    """Names that a size is computed from."""
    nodes = ast.walk(_tree(size)) if isinstance(size, str) else ()
    return {node.id for node in nodes if isinstance(node, ast.Name)} - _CALLS.keys()


def compute(size: Size, names: Mapping[str, float]) -> float:
    """Compute a size; ValueError where a name has no value, and beyond what prism counts."""
    try:
        found = _value(_tree(size), names) if isinstance(size, str) else float(size)
    except ZeroDivisionError:
        raise ValueError(f"{size} divides by 0") from None
    except OverflowError:
        found = math.inf
    if not abs(found) <= MAX_NUMBER:
        raise ValueError(f"{str(size)[:60]} is more than {MAX_NUMBER:g}; give less")
    return found


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.Name(id=name):
            if name not in names:
                meant = near(name, names, 1)
                hint = f"did you mean {meant[0]}?" if meant else f"known: {', '.join(names)}"
                raise ValueError(f"{name} has no value; give it under model.dims, {hint}")
            return names[name]
        case ast.UnaryOp(operand=inner):
            return -_value(inner, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _CALLS[name](_value(arg, names) for arg in args)
    raise AssertionError(ast.dump(node))  # `_tree` lets nothing else through


def compute_all(
    dims: Mapping[str, Size], known: Mapping[str, float]
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Compute named sizes that may name each other: values, and what is wrong with which."""
    values, wrong = dict(known), list[tuple[str, str]]()
    needs = {name: names_in(size) & dims.keys() for name, size in dims.items()}
    sorter = TopologicalSorter(needs)
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        values |= dict.fromkeys(dims, 1.0)
        loop = error.args[1][::-1]
        text = f"is computed from itself: {' -> '.join(loop[:6])}; give one of them a number"
        return values, [(loop[0], text)]
    for name in order:
        try:
            values[name] = compute(dims[name], values)
        except ValueError as error:
            values[name] = 1.0
            wrong.append((name, str(error)))
    return values, wrong
