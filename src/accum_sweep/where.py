"""Conditions on settings, such as `lr * accum_steps < 1 and optimizer == 'SGD'`. Standard library only.

Python's own parser reads them; what it finds is worked out here, node by node, and never run as code.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from accum_sweep.errors import UserError, nearest

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
WORDS = {"null": None, "true": True, "false": False}  # as YAML has them
KNOWN = "compare settings with numbers, 'words' or lists, joined by and, or, not"


def holds(condition: str, settings: Mapping[str, Any]) -> bool:
    """Tell whether `condition` holds for `settings`, by dotted name.

    Where nothing is set (None), no order and no arithmetic holds. Raises UserError for what is no condition.
    """
    try:
        tree = ast.parse(condition.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(f"is no condition ({getattr(error, 'msg', error)}); {KNOWN}") from error
    found = _value(tree.body, settings)
    if not isinstance(found, bool):
        raise UserError(f"is {found!r}, neither true nor false; {KNOWN}")
    return found


def _value(node: ast.expr, settings: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name() | ast.Attribute():
            return _setting(_dotted(node), settings)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, settings) for part in parts]
        case ast.BoolOp(op=ast.And(), values=parts):
            return min([_truth(part, settings) for part in parts])  # each is looked at: a fault is told anyway
        case ast.BoolOp(values=parts):
            return max([_truth(part, settings) for part in parts])
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return not _truth(part, settings)
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return _combined(operator.sub, 0, _value(part, settings))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return _combined(ARITHMETIC[type(op)], _value(left, settings), _value(right, settings))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, settings) for part in (left, *others)]
            pairs = zip(ops, values, values[1:], strict=False)
            return min([_compared(op, one, other) for op, one, other in pairs])
        case _:
            raise UserError(f"holds {ast.unparse(node)}, which means nothing here; {KNOWN}")


def _truth(node: ast.expr, settings: Mapping[str, Any]) -> bool:
    found = _value(node, settings)
    if not isinstance(found, bool):
        raise UserError(f"holds {ast.unparse(node)}, neither true nor false; {KNOWN}")
    return found


def _combined(do: Callable[[Any, Any], Any], one: object, other: object) -> Any:
    if one is None or other is None:
        return None
    if not all(isinstance(value, int | float) for value in (one, other)):
        raise UserError(f"does arithmetic with {one!r} and {other!r}, which are no numbers; {KNOWN}")
    try:
        return do(one, other)
    except (ArithmeticError, OverflowError):  # a division by 0
        return None


def _compared(op: ast.cmpop, one: object, other: object) -> bool:
    if type(op) not in COMPARISONS:
        raise UserError(f"compares by identity; {KNOWN}")
    unordered = one is None or other is None
    if unordered and not isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
        return False
    try:
        return bool(COMPARISONS[type(op)](one, other))
    except TypeError as error:
        raise UserError(f"compares {one!r} with {other!r}, which have no order; {KNOWN}") from error


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case _:
            raise UserError(f"holds {ast.unparse(node)}, which means nothing here; {KNOWN}")


def _setting(name: str, settings: Mapping[str, Any]) -> Any:
    if name in settings:
        return settings[name]
    if name in WORDS:
        return WORDS[name]
    hint = nearest(name, settings, "see --cfg job; words stand in quotes")
    raise UserError(f"names {name}, which is no setting; {hint}")
