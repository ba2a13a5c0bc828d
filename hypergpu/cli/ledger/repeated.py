"""A command that a fix names is given the folder again that the failed one was given."""

import functools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from hypergpu.errors import HyperGPUError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_NAMED = {
    "--state-dir": re.compile(
        r"hypergpu (?:node wallet|ledger (?:claim|dispute|enforce BUNDLE|register(?: --stake \d+)?"
        r"|(?:un)?stake(?: (?:AMOUNT|\d+))?))(?![\w-])"
    ),
    "--data-dir": re.compile(r"hypergpu (?:up|ledger (?:bond|unbond|reclaim(?: JOB)?))(?![\w-])"),
}
"""By the option for its folder, every command that takes it and that a fix may name."""


def repeats(option: str) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """For a function whose keyword ``whose`` begins with the folder; None: none was given."""

    def decorated(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def called(*args: _Given.args, **given: _Given.kwargs) -> _Result:
            try:
                return function(*args, **given)
            except HyperGPUError as refused:
                whose = given.get("whose")
                folder = whose[0] if isinstance(whose, tuple) else None
                if not isinstance(folder, Path):
                    raise
                fix = with_folder(refused.fix, option, folder)
                raise HyperGPUError(refused.reason, refused.detail, fix=fix) from refused

        return called

    return decorated


def with_folder(text: str, option: str, folder: Path) -> str:
    """The text, its commands with their folder; one that names it already stays as it is."""
    named = f"{option} {shlex.quote(str(folder))}"
    if named in text:
        return text
    return _NAMED[option].sub(lambda found: f"{found[0]} {named}", text)
