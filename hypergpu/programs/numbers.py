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


def _number_function(function: Callable[..., Any]) -> Callable[..., Number]:
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
        "operator.add": _number_function(operator.add),
        "operator.sub": _number_function(operator.sub),
        "operator.mul": _number_function(operator.mul),
        "operator.truediv": _number_function(operator.truediv),
        "operator.floordiv": _number_function(operator.floordiv),
        "operator.mod": _number_function(operator.mod),
        "operator.neg": _number_function(operator.neg),
        "operator.pow": _number_function(_power),
        "number.float": _number_function(float),
        "number.sqrt": _number_function(math.sqrt),
        "number.log": _number_function(math.log),
        "number.floor": _number_function(math.floor),
        "number.ceil": _number_function(math.ceil),
        "number.trunc": _number_function(math.trunc),
        "number.max": _number_function(max),
        "number.min": _number_function(min),
    }
)
"""By their names as operators of a program."""
