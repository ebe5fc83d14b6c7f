"""Integer arithmetic and comparisons of a shell, of 64 bits."""

import ast
import operator
from collections.abc import Callable

MOST_FORMULA = 1000  # characters


def _quotient(a: int, b: int) -> int:
    """Divide as a shell does, towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: _quotient, ast.Mod: lambda a, b: a - b * _quotient(a, b),
}  # fmt: skip
_ORDERS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.Lt: operator.lt,
    ast.GtE: operator.ge, ast.LtE: operator.le,
}  # fmt: skip
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt,
    "-ge": operator.ge, "-le": operator.le,
}  # fmt: skip


def evaluate(text: str) -> int | None:
    """Evaluate a formula of numbers; None where it is none, or beyond 64 bits."""
    if len(text) > MOST_FORMULA:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _within(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _within(node.value)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        left, right = _value(node.left), _value(node.comparators[0])
        return int(_ORDERS[type(node.ops[0])](left, right))
    raise ValueError("not understood")


def _within(number: int) -> int:
    """Give a number that a shell can hold, of 64 bits."""
    if not -(2**63) <= number < 2**63:
        raise ValueError("too large")
    return number
