"""TOML text into tables and structs, with the line of each key and every problem with its fix.

Job files and world files alike.
"""

import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from hypergpu.errors import HyperGPUError, Reason


class Problem(msgspec.Struct, frozen=True):
    """One problem of a job's settings."""

    key: str
    """Dotted, for example ``inner.learning_rate``; empty for the file as a whole."""
    what: str
    fix: str
    where: str = ""
    """The file, its line and the table; empty when the settings came from no file."""

    def __str__(self) -> str:
        return f"{self.where or self.key}: {self.what}. Fix: {self.fix}"


PROBLEMS_MOST = 20
"""More are counted and not told."""


class JobFileError(HyperGPUError):
    """Settings that no job can have. ``problems`` are the first of them, and a count of others."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        shown_problems = list(problems)
        if len(shown_problems) > PROBLEMS_MOST:
            left_count, file = (
                len(shown_problems) - PROBLEMS_MOST,
                shown_problems[0].where.rpartition(":")[0],
            )
            what = f"there are {left_count:,} more problems"
            shown_problems[PROBLEMS_MOST:] = [
                Problem("", what, "correct these first", file or "others")
            ]
        self.problems = tuple(shown_problems)
        super().__init__(Reason.SPEC_INVALID, "; ".join(str(problem) for problem in self.problems))


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that was probably meant, or an empty string."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else ""


def suggestion(word: str, known: Sequence[str]) -> str:
    """The fix for a word that names nothing: the one that was probably meant, or all of them."""
    nearest_word = nearest(word, known)
    return (
        f'did you mean "{nearest_word}"?' if nearest_word else f"choose one of {join_words(known)}"
    )


def join_words(words: Iterable[str]) -> str:
    """Join words as a sentence lists them."""
    return ", ".join(words) or "none"


_SHORT = 80


def short_text(value: object) -> str:
    """Return a value as text that is fit for a sentence, however long the value is."""
    text = str(value)
    if len(text) <= _SHORT:
        return text
    if isinstance(value, int):
        return f"a number of {len(text.removeprefix('-'))} digits"
    return f"{text[:_SHORT]}..."


def quoted_value(value: object) -> str:
    """Return a value as a sentence quotes it."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, str):
        return f'the text "{short_text(value)}"'
    if isinstance(value, int | float):
        text = short_text(value)
        return text if text.startswith("a ") else f"the number {text}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"


_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|s|m|h)", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}


class DurationError(ValueError):
    """A value that is no duration, with the fix. Its text is both, a line each."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\n{fix}")
        self.what = what
        self.fix = fix


def duration_ms(value: object) -> int:
    """Return a duration such as ``"60s"`` in milliseconds.

    Raises:
        DurationError: It is none.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = short_text(value)
        example = text if text[0].isdecimal() else "60"
        fix = f'say the unit, for example "{example}s" or "{example}ms"'
        raise DurationError(f"{text} has no unit", fix)
    if not isinstance(value, str):
        raise DurationError(
            f"it is {quoted_value(value)}, not a duration", 'write, for example, "60s"'
        )
    text = short_text(value.strip())
    if text.isdecimal():
        raise DurationError(f'"{text}" has no unit', f'say the unit, for example "{text}s"')
    match = _DURATION.fullmatch(text)
    if match is None:
        fix = 'write a number and ms, s, m or h, for example "90s"'
        raise DurationError(f'"{text}" is not a duration', fix)
    span_ms = Decimal(match[1]) * _UNIT_MS[match[2]]
    if span_ms != int(span_ms):
        raise DurationError(f'"{text}" is not a whole count of milliseconds', "round it")
    return int(span_ms)


_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-\" ]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+|\"[^\"]*\")\s*(?:\.\s*([A-Za-z0-9_\-]+)\s*)?=")
_UNITS = ("_ms", "_s", "_mbit_s", "_percent", "_mib", "_packets")
_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_EXAMPLES = {"int": "100", "float": "0.001"}
_NUMBER = re.compile(r"[+-]?[0-9._]+([eE][+-]?[0-9]+)?", re.ASCII)
_NICKNAMES = {
    "lr": "learning_rate",
    "h": "inner_steps",
    "steps": "inner_steps",
    "batch": "batch_size",
    "warmup": "warmup_steps",
    "deadline_s": "deadline",
    "timeout": "deadline",
    "min": "nodes",
    "eval_every": "every",
}
"""Names that other systems use."""
_LINE_LENGTH_MOST = 500
"""Longer lines are not looked at: the patterns may go over blanks many times."""
MARK = "\ufeff"
"""Byte order mark that some editors put first."""
_Struct = TypeVar("_Struct")
_CONVERSIONS_MOST = 100


class KeyLines:
    """Lines of a TOML text by dotted key; ``nodes.2.rtt_ms`` is a key of the third ``[[nodes]]``.

    A scan by line, not a TOML parser: a key inside a multi-line text can only mislead a message's
    line number, never a value.
    """

    def __init__(self, source: str, text: str = "", *, table: str = "") -> None:
        self._source = source
        self._text = text
        self._table = table
        self._lines: dict[str, int] = {}
        for key, line in _keys(text.removeprefix(MARK)):
            self._lines.setdefault(key, line)

    def below(self, table: str) -> "KeyLines":
        """Return the same lines for keys that are counted from a table of the text."""
        return KeyLines(self._source, self._text, table=f"{table}.")

    def of(self, key: str) -> str:
        """Return ``FILE:LINE [table]`` of a dotted key, or of the nearest table that has a line."""
        line = self.line(key)
        place = f"{self._source}:{line}" if line else self._source
        return f"{place} {short_text(_name_of(self._table + key))}" if key else place

    def line(self, key: str) -> int:
        """Return the line of a key, or of the nearest table around it; 0 when none has one."""
        around = f"{self._table}{key}"
        while around and around not in self._lines:
            around = around.rpartition(".")[0]
        return self._lines.get(around, 0)


def _name_of(key: str) -> str:
    if re.search(r"\.\d", key):
        return re.sub(r"\.(\d+)", lambda found: f"[{int(found[1]) + 1}]", key)
    table, _, name = key.rpartition(".")
    return f"[{table}] {name}" if table else name


def _keys(text: str) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > _LINE_LENGTH_MOST:
            continue
        if header := _HEADER.fullmatch(line):
            table = _path_of(header[2].replace('"', "").split("."), counts)
            if header[1] == "[[":
                counts[table] += 1
                table = f"{table}.{counts[table] - 1}"
            yield table, number
        elif match := _KEY.match(line):
            words = [table, match[1].strip('"'), match[2] or ""]
            yield ".".join(word for word in words if word), number


def _path_of(words: Sequence[str], counts: Counter[str]) -> str:
    """The path of a header: below an array it belongs to the array's newest table."""
    path = words[0].strip()
    for word in words[1:]:
        newest = f".{counts[path] - 1}" if counts[path] else ""
        path = f"{path}{newest}.{word.strip()}"
    return path


def read_struct(tree: Mapping[str, object], kind: type[_Struct], lines: KeyLines) -> _Struct:
    """Convert a table into a struct.

    Args:
        tree: The parsed table.
        kind: A struct that forbids unknown fields. It may raise a `ValueError`, whose first line is
            the problem and whose second one the fix.
        lines: Lines of the table's keys.

    Raises:
        JobFileError: Keys are wrong; all of them, each with its place.
    """
    record, problems = convert_struct(tree, kind, lines)
    if record is None or problems:
        raise JobFileError(problems)
    return record


def convert_struct(
    tree: Mapping[str, object], kind: type[_Struct], lines: KeyLines
) -> tuple[_Struct | None, list[Problem]]:
    """Convert a table into a struct without the keys that are wrong, and return their problems.

    The struct is None where a required key is missing, or an element of a list is wrong.
    """
    rest = copy.deepcopy(dict(tree))
    problems: list[Problem] = []
    # Each time costs a whole conversion, and finds one problem or all unknown keys of a table.
    for _ in range(_CONVERSIONS_MOST):
        try:
            return msgspec.convert(rest, kind), problems
        except msgspec.ValidationError as wrong:
            message, _, at = str(wrong).partition(" - at `$")
            words = re.sub(r"\[(\d+)\]", r".\1", at.rstrip("`")).strip(".").split(".")
            path = [word for word in words if word]
            new_problems = list(_problems(message, path, rest, kind, lines))
        problems += new_problems
        if not all(_remove(rest, each.key) for each in new_problems):
            break
    return None, problems


def _remove(tree: dict[str, Any], key: str) -> bool:
    """Take a key out; tells whether it was there."""
    *path, name = key.split(".")
    table = _value_at(tree, path)
    if not isinstance(table, dict) or name not in table:
        return False
    del table[name]
    return True


def _problems(
    message: str, path: list[str], tree: Mapping[str, object], kind: type, lines: KeyLines
) -> Iterator[Problem]:
    """The problem of a message; all unknown keys of the table where it is of one."""
    if not message.startswith("Object contains unknown field"):
        yield _problem(message, path, tree, kind, lines)
        return
    root = inspect.type_info(kind)
    types = _types_at(root, path)
    fields = {each.encode_name: each for each in _fields(types)}
    table: Any = _value_at(tree, path)
    # A key of another alternative than the one that is meant is known, and yet has no place here.
    quoted_name = message.rstrip("`").rpartition("`")[2]
    names = [
        name for name in table if name == quoted_name or name not in (*fields, _tag_field(types))
    ]
    for number, name in enumerate(names):
        below = [*path, name]
        what, fix = f"there is no key {short_text(name)} here", ""
        if number < PROBLEMS_MOST:
            what, fix = _unknown_key(below, table[name], fields, root)
        key = ".".join(below)
        yield Problem(key, what, fix, lines.of(key))


def _problem(
    message: str, path: list[str], tree: Mapping[str, object], kind: type, lines: KeyLines
) -> Problem:
    root = inspect.type_info(kind)
    types = _types_at(root, path)
    _, _, name = message.rstrip("`").rpartition("`")
    if message.startswith("Object missing required field"):
        path, what, fix = [*path, name], f"{name} is missing", _example(name, types)
    elif message.startswith("Invalid"):
        value = message.partition("'")[2].rstrip("'")
        what, fix = f'"{value}" is unknown', suggestion(value, _choices(types))
    elif message.startswith("Expected"):
        what, fix = _wrong_value(message, _value_at(tree, path), path)
    else:
        what, _, fix = message.partition("\n")
        fix = fix or "give a smaller number"
    key = ".".join(path)
    return Problem(key, what, fix, lines.of(key))


def _unknown_key(
    path: Sequence[str], value: object, fields: Mapping[str, inspect.Field], root: inspect.Type
) -> tuple[str, str]:
    """The problem of a key that does not exist, and the key that was probably meant."""
    name = path[-1]
    if isinstance(value, dict) and len(path) == 1:
        tables = [each for each, field in fields.items() if _fields(_alternatives(field.type))]
        nearest_table = nearest(name, tables)
        fix = (
            f"did you mean [{nearest_table}]?"
            if nearest_table
            else f"the tables are {join_words(tables)}"
        )
        return "there is no such table", fix
    what = f"there is no key {short_text(name)} here"
    nickname = _NICKNAMES.get(name.lower(), name)
    if nickname in fields:
        return what, f"did you mean {nickname}?"
    homes = []
    for field in _fields([root]):
        below = [each.encode_name for each in _fields(_alternatives(field.type))]
        if nickname in below:
            homes.append(f"[{field.encode_name}]")
        elif nickname == field.encode_name and not below:
            homes.append("the top")
    if homes:
        return what, f"{nickname} belongs to {' or '.join(homes)}"
    return what, _key_suggestion(name, list(fields))


def _wrong_value(message: str, value: object, path: Sequence[str]) -> tuple[str, str]:
    """The problem and the fix of a message such as "Expected `float | null` >= 0.0, got `str`"."""
    _, types, rest = message.partition(", got")[0].split("`", 2)
    names = [each for each in types.split(" | ") if each != "null"]
    type_names = " or ".join(_TYPES.get(each, each) for each in names)
    what, type_name = f"it is {quoted_value(value)}", names[0]
    if rest:
        return what, f"give {type_names}{rest.removesuffix('.0')}"
    what = f"{what}, not {type_names}"
    if type_name == "object":
        return what, f"write [{'.'.join(path)}]"
    if isinstance(value, str) and type_name in _EXAMPLES and not _NUMBER.fullmatch(value.strip()):
        return what, f"give {type_names}, for example {_EXAMPLES[type_name]}"
    if isinstance(value, str) and type_name in ("int", "float", "bool"):
        return what, f"write {type_names} without quotes"
    if isinstance(value, int | float) and type_name == "str":
        return what, f'write it in quotes: "{short_text(value)}"'
    return what, f"give {type_names}"


def _types_at(root: inspect.Type, path: Sequence[str]) -> list[inspect.Type]:
    """What may stand at a path, unions taken apart."""
    alternatives = _alternatives(root)
    for word in path:
        inner = [each.item_type for each in alternatives if isinstance(each, inspect.ListType)]
        if not word.isdecimal():
            inner = [field.type for field in _fields(alternatives) if field.encode_name == word]
            if word == _tag_field(alternatives):
                return alternatives
        alternatives = [option for each in inner for option in _alternatives(each)]
    return alternatives


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    return list(kind.types) if isinstance(kind, inspect.UnionType) else [kind]


def _fields(types: Sequence[inspect.Type]) -> list[inspect.Field]:
    return [
        field for each in types if isinstance(each, inspect.StructType) for field in each.fields
    ]


def _tag_field(types: Sequence[inspect.Type]) -> str | None:
    tags = [each.tag_field for each in types if isinstance(each, inspect.StructType)]
    return tags[0] if tags else None


def _choices(types: Sequence[inspect.Type]) -> list[str]:
    words = [str(each.tag) for each in types if isinstance(each, inspect.StructType) and each.tag]
    return words + [
        str(one) for each in types if isinstance(each, inspect.EnumType) for one in each.cls
    ]


def _key_suggestion(key: str, known: Sequence[str]) -> str:
    stem = next((key.removesuffix(unit) for unit in _UNITS if key.endswith(unit)), key)
    others = [each for each in known if each.startswith(f"{stem}_")]
    if others:
        return f"did you mean {others[0]}? Units are part of the name"
    nearest_key = nearest(key, known)
    return f"did you mean {nearest_key}?" if nearest_key else f"the keys are {join_words(known)}"


def _example(name: str, types: Sequence[inspect.Type]) -> str:
    if name == _tag_field(types):
        return f"choose one of {join_words(_choices(types))}"
    return f"add {name}"


def _value_at(tree: object, path: Sequence[str]) -> object:
    for word in path:
        if isinstance(tree, dict):
            tree = tree.get(word)
        elif isinstance(tree, list):
            tree = tree[int(word)]
    return tree
