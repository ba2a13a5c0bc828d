"""Descriptions of workloads, and checks of the options that users give them."""

import math
from collections.abc import Mapping

import msgspec

Value = str | int | float | bool
Options = Mapping[str, Value]


class OptionError(ValueError):
    """An option is unknown or has an impossible value. The text names it, what is wrong and what is
    right.
    """


class Option(msgspec.Struct, frozen=True):
    """One setting of a workload. The default's type is the option's type."""

    name: str
    default: Value
    meaning: str
    minimum: float | None = None
    maximum: float | None = None


class WorkloadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a workload. Importing one never imports torch."""

    name: str
    dataset: str
    meaning: str
    builder: str
    """``package.module:function``; called with the complete options, it returns a
    `workload.Workload`.
    """
    version: int = 1
    """Raised whenever the same options would train something else: nodes of another version take no
    part.
    """
    kind: str = "torch"
    """``torch``, ``numpy`` or ``null``: the worker it needs."""
    metric: str = "accuracy"
    """``accuracy`` and the like: a mean score, higher is better; ``perplexity``: lower is better.
    """
    options: tuple[Option, ...] = ()
    takes_data: str = "never"
    """Whether a user's folder replaces the dataset: ``never``, ``optional`` or ``required``."""


LOWER_IS_BETTER = frozenset({"perplexity"})
"""Metrics that fall as a model learns. All others rise."""


def has_reached(target: float, metric: float, *, name: str) -> bool:
    """Whether the metric called ``name`` is at the target or beyond it; a target of 0 never is."""
    if not target:
        return False
    return metric <= target if name in LOWER_IS_BETTER else metric >= target


def complete_options(entry: WorkloadEntry, given: Options) -> dict[str, Value]:
    """The given options checked, the others at their defaults, in the entry's order.

    Raises:
        OptionError: Says which option, what is wrong and what would be right.
    """
    known = {option.name: option for option in entry.options}
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            raise OptionError(f"options.{name}: {entry.name} has no such option; it has: {names}")
    return {
        name: _check_value(entry, option, given[name]) if name in given else option.default
        for name, option in known.items()
    }


def _check_value(entry: WorkloadEntry, option: Option, value: Value) -> Value:
    where = f"options.{option.name} of {entry.name}"
    wanted = type(option.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(
            f"{where} is {value!r}, a {type(value).__name__}; it must be a {wanted.__name__},"
            f" such as {option.default!r}"
        )
    if isinstance(value, str | bool):
        return value
    if math.isnan(value):
        raise OptionError(f"{where} is not a number")
    if option.minimum is not None and value < option.minimum:
        raise OptionError(f"{where} is {value}; it must be at least {option.minimum:g}")
    if option.maximum is not None and value > option.maximum:
        raise OptionError(f"{where} is {value}; it must be at most {option.maximum:g}")
    return value
