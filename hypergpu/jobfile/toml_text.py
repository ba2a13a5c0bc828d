"""TOML text into tables, whoever wrote it: bounded before it is parsed, and after."""

import re
import tomllib
from typing import Any

from hypergpu.jobfile.toml import MARK, JobFileError, Problem, short_text

_SYNTAX_LINE = re.compile(r"\(at line ([0-9]+), column [0-9]+\)$")
TEXT_LENGTH_MOST = 1 << 18
_PART = r"""(?:[A-Za-z0-9_\-]++|"(?:[^"\\\n]|\\.){0,60}+"|'[^'\n]{0,60}+')"""
_PARTS_MOST = 32
_DEEP_KEY = re.compile(rf"(?<![A-Za-z0-9_\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{_PARTS_MOST}}}")
"""Dotted keys take the parser time that grows with the square of their parts: a text of 32 kB takes
9 s. All else in TOML is linear in the length."""
_TOO_DEEP = "it is nested too deeply"
_NOT_DEEP = "no setting is a list of lists or a table of tables"
_NUMBER_MOST = 10**40
"""Far above every amount; Python itself refuses decimal numbers of more than 4,300 digits."""


def load_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; ``source`` names the text in messages. A byte order mark is passed over.

    Raises:
        JobFileError: It is not TOML, or longer, deeper or of larger numbers than settings are.
    """
    _refuse_costly(text, source)
    tree = _parsed_toml(text.removeprefix(MARK), source)
    _refuse_unwieldy(tree, source)
    return tree


def _refuse_costly(text: str, source: str) -> None:
    """Refuse a text that takes the parser long, before it is parsed."""
    if len(text) > TEXT_LENGTH_MOST:
        what = f"it has {len(text):,} characters, and settings have at most {TEXT_LENGTH_MOST:,}"
        raise JobFileError([Problem("", what, "name the file of settings", source)])
    if deep := _DEEP_KEY.search(text):
        line = text.count("\n", 0, deep.start()) + 1
        what = f"a key has more than {_PARTS_MOST} parts"
        raise JobFileError([Problem("", what, _NOT_DEEP, f"{source}:{line}")])


def _refuse_unwieldy(tree: dict[str, Any], source: str) -> None:
    """Refuse huge numbers, and tables and lists that are nested too deeply for what follows."""
    stack: list[tuple[str, object, int]] = [(*item, 0) for item in tree.items()]
    while stack:
        name, value, depth = stack.pop()
        if isinstance(value, int) and abs(value) > _NUMBER_MOST:
            what = f"{short_text(name)} has a number of more than 40 digits"
            raise JobFileError([Problem("", what, "give a smaller number", source)])
        if depth > _PARTS_MOST:
            raise JobFileError([Problem("", _TOO_DEEP, _NOT_DEEP, source)])
        if isinstance(value, dict):
            stack += [(*item, depth + 1) for item in value.items()]
        elif isinstance(value, list):
            stack += [(name, each, depth + 1) for each in value]


def _parsed_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser names the place in words at the end; people's editors want ``FILE:LINE``.
        match = _SYNTAX_LINE.search(str(error))
        line = int(match[1]) if match else max(1, len(text.splitlines()))
        fix = "correct the syntax there, for example the quotes around a text"
        problem = Problem("", f"it is not TOML: {error}", fix, f"{source}:{line}")
        raise JobFileError([problem]) from error
    except RecursionError as error:
        raise JobFileError([Problem("", _TOO_DEEP, _NOT_DEEP, source)]) from error
    except ValueError as error:
        # Python's own limit of digits.
        what = "it has a number of more than 4,300 digits"
        raise JobFileError([Problem("", what, "give a smaller number", source)]) from error
