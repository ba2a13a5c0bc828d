"""Descriptions of workloads, and checks of their options.

Plain data; `hypergpu.workloads.registry` builds what they name.
"""

import importlib.util
import math
from collections.abc import Mapping

import msgspec

_NUMBER_MOST = 10**18
OptionValue = str | int | float | bool
Options = Mapping[str, OptionValue]


WORKLOAD_FIELD = "hypergpu.workload"
OPTIONS_FIELD = "hypergpu.options"
"""Metadata of an exported model: its workload's name, and the options as JSON."""
NODE_DATA_FIELD = "hypergpu.node_data"
"""The data set that it was trained on, where that stayed on nodes."""


class OptionError(ValueError):
    """An option is unknown or has an impossible value. The text names it, what is wrong and what is
    right.

    Args:
        text: For people.
        fix: One change that makes it right.
    """

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


class Option(msgspec.Struct, frozen=True):
    """One setting of a workload. The default's type is the option's type."""

    name: str
    default: OptionValue
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int = 1
    divides: str = ""
    """Another option that this one must divide."""
    at_most: tuple[str, ...] = ()
    """Other options that this one must not exceed; those that are 0 set no limit."""
    choices: tuple[str, ...] = ()
    """The only texts there are; empty: any."""


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
    oldest_version: int = 0
    """The oldest version whose jobs this one trains alike; 0: only its own."""
    kind: str = "torch"
    """``torch``, ``numpy`` or ``null``: the worker it needs."""
    metric: str = "accuracy"
    """``accuracy`` and the like: a mean score, higher is better; ``perplexity``: lower is better.
    See `hypergpu.workloads.metrics`.
    """
    options: tuple[Option, ...] = ()
    takes_data: str = "never"
    """Whether a user's folder replaces the dataset: ``never``, ``optional`` or ``required``."""
    takes_node_data: bool = False
    """Whether its samples may stay on the nodes that have them: see `NodeDataWorkload`."""
    needs: tuple[str, ...] = ()
    """Python modules beyond those of its kind: a node that lacks one does not offer the workload.
    """
    install: str = ""
    """What pip installs to have them, such as ``hypergpu[hf]``."""
    preprocessing: str = ""
    """Steps from a stored sample to the input of the model, for the card of an export."""
    split: str = ""
    """Rule by which samples are held out, for the card of an export."""
    exported_files: tuple[str, ...] = ()
    """Files of a job's data, by their paths in it, that an export carries beside the model."""
    optimizer: str = "adamw"
    """Inner optimizer of a job file that names none: another than AdamW where it was measured to
    need fewer samples.
    """
    can_checkpoint: bool = False
    """Whether its modules have ``checkpoint_activations``, by which they compute activations again
    in the backward pass rather than keep them.
    """


class HeldOutExample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A held-out sample as people see it; each evaluation tells the model's output for it."""

    text: str = ""
    """The beginning of a text that the model goes on with, or a text that it judges."""
    image: bytes = b""
    """PNG of at most 32 x 32 pixels."""
    label: str = ""
    """The right answer, where there is one."""


OLDER_JOB_FIX = "hypergpu job continue JOB --rounds N, a new job from its model"
"""What helps a job of an older workload version than those that are installed."""


def trains_version(entry: WorkloadEntry, version: int) -> bool:
    """Whether a workload trains jobs of this version alike."""
    return (entry.oldest_version or entry.version) <= version <= entry.version


def missing_modules(entry: WorkloadEntry) -> tuple[str, ...]:
    """Modules that the workload needs and that are not installed here; none is imported."""
    return tuple(name for name in entry.needs if importlib.util.find_spec(name) is None)


def complete_options(entry: WorkloadEntry, given: Options) -> dict[str, OptionValue]:
    """The given options checked, the others at their defaults, in the entry's order.

    Raises:
        OptionError: Says which option, what is wrong and what would be right.
    """
    options_by_name = {option.name: option for option in entry.options}
    for name in given:
        if name not in options_by_name:
            names = ", ".join(options_by_name) or "none"
            text = f"options.{name}: {entry.name} has no such option; it has: {names}"
            raise OptionError(text, f"leave options.{name} out")
    complete = {
        name: check_value(entry, name, given[name]) if name in given else option.default
        for name, option in options_by_name.items()
    }
    for option in entry.options:
        _check_divisors(entry, option, complete)
        _check_other_limits(entry, option, complete)
    return complete


def _check_divisors(entry: WorkloadEntry, option: Option, complete: Options) -> None:
    name, value, whole = option.name, complete[option.name], complete.get(option.divides, 0)
    if isinstance(value, bool) or not (isinstance(value, int) and isinstance(whole, int)):
        return
    setting_text = f"options.{name} of {entry.name} is {value}"
    if value % option.multiple_of:
        multiple = max(1, round(value / option.multiple_of)) * option.multiple_of
        text = f"{setting_text}; it must be a multiple of {option.multiple_of}"
        raise OptionError(text, f"options.{name} = {multiple}")
    if option.divides and whole % value:
        both = f"{setting_text} and options.{option.divides} is {whole}"
        divisor = next(each for each in range(min(value, whole), 0, -1) if whole % each == 0)
        fix = f"options.{name} = {divisor}"
        raise OptionError(f"{both}; {name} must divide {option.divides}", fix)


def _check_other_limits(entry: WorkloadEntry, option: Option, complete: Options) -> None:
    name, value = option.name, complete[option.name]
    for other in option.at_most:
        limit = complete[other]
        if isinstance(value, int) and isinstance(limit, int) and 0 < limit < value:
            both = f"options.{name} of {entry.name} is {value} and options.{other} is {limit}"
            fix = f"options.{name} = {limit}"
            raise OptionError(f"{both}; {name} must be at most {other}", fix)


def check_value(entry: WorkloadEntry, name: str, value: OptionValue) -> OptionValue:
    """A value of one of the entry's options, as the type of the option.

    Raises:
        OptionError: It is of another type or outside of its range. What it is beside others is for
            `complete_options` to judge.
    """
    (option,) = (each for each in entry.options if each.name == name)
    where = f"options.{option.name} of {entry.name}"
    option_type = type(option.default)
    if isinstance(value, int) and abs(value) > _NUMBER_MOST:
        text = f"{where} is a number of more than {len(str(_NUMBER_MOST)) - 1} digits"
        raise OptionError(text, _default_fix(name, option))
    if option_type is float and type(value) is int:
        value = float(value)
    if type(value) is not option_type:
        raise OptionError(
            f"{where} is {value!r}, a {type(value).__name__}; it must be a {option_type.__name__},"
            f" such as {option.default!r}",
            _default_fix(name, option),
        )
    if isinstance(value, str) and option.choices and value not in option.choices:
        text = f"{where} is {value[:40]!r}; it must be {' or '.join(option.choices)}"
        raise OptionError(text, _default_fix(name, option))
    if isinstance(value, str | bool):
        return value
    _check_number(option, where, value)
    return value


def _default_fix(name: str, option: Option) -> str:
    return f"options.{name} = {msgspec.json.encode(option.default).decode()}"


def _check_number(option: Option, where: str, value: float) -> None:
    if not math.isfinite(value):
        raise OptionError(f"{where} is not a number", _default_fix(option.name, option))
    if option.minimum is not None and value < option.minimum:
        text = f"{where} is {value}; it must be at least {option.minimum:g}"
        raise OptionError(text, f"options.{option.name} = {option.minimum:g}")
    if option.maximum is not None and value > option.maximum:
        text = f"{where} is {value}; it must be at most {option.maximum:g}"
        raise OptionError(text, f"options.{option.name} = {option.maximum:g}")
