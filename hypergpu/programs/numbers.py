"""Arithmetic on the sizes of a program: on numbers alone, each of them bounded.

Python's own operators also repeat lists and texts, and its whole numbers grow without end.
"""

import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hypergpu.programs.container import ITEMS_MOST, ProgramBoundError, ProgramError

INTEGER_MOST = 2**63 - 1
_EXPONENT_MOST = 64

Number = int | float


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > _EXPONENT_MOST:
        raise ProgramBoundError(f"an exponent is beyond {_EXPONENT_MOST}")
    power: Number = base**exponent
    return power


def _bounded(function: Callable[..., Any]) -> Callable[..., Number]:
    """A function that takes and gives bounded numbers alone."""

    def compute(*values: Number) -> Number:
        for value in values:
            if type(value) not in (int, float):
                raise ProgramError(f"it takes numbers alone, and this is {type(value).__name__}")
        number = function(*values)
        if type(number) not in (int, float):
            raise ProgramError(f"it gives no number but {type(number).__name__}")
        if type(number) is int and not -INTEGER_MOST - 1 <= number <= INTEGER_MOST:
            raise ProgramBoundError("its result is beyond 64 bits")
        result: Number = number
        return result

    return compute


def _part(parts: Any, index: Any) -> Any:
    """One of several results of a call."""
    if not isinstance(parts, list | tuple) or type(index) is not int:
        raise ProgramError("it takes a part of several results, by its number")
    if not -len(parts) <= index < len(parts):
        raise ProgramError(f"there are {len(parts)} results, and no number {index}")
    return parts[index]


def check_parts(count: int) -> None:
    """Refuse a call that would give too many results.

    Raises:
        ProgramBoundError: It would give more than `ITEMS_MOST`.
    """
    if count > ITEMS_MOST:
        raise ProgramBoundError(f"it gives {count:,} results, more than {ITEMS_MOST:,}")


NUMBER_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "operator.getitem": _part,
        "operator.add": _bounded(operator.add),
        "operator.sub": _bounded(operator.sub),
        "operator.mul": _bounded(operator.mul),
        "operator.truediv": _bounded(operator.truediv),
        "operator.floordiv": _bounded(operator.floordiv),
        "operator.mod": _bounded(operator.mod),
        "operator.neg": _bounded(operator.neg),
        "operator.pow": _bounded(_power),
        "number.float": _bounded(float),
        "number.sqrt": _bounded(math.sqrt),
        "number.log": _bounded(math.log),
        "number.floor": _bounded(math.floor),
        "number.ceil": _bounded(math.ceil),
        "number.trunc": _bounded(math.trunc),
        "number.max": _bounded(max),
        "number.min": _bounded(min),
    }
)
"""By their names as operators of a program."""
