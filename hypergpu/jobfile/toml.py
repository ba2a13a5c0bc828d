"""TOML text into tables and structs, with the line of each key: job files and world files alike."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest
from hypergpu.jobfile.schema import quoted_value

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-\" ]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+|\"[^\"]*\")\s*(?:\.\s*([A-Za-z0-9_\-]+)\s*)?=")
_SYNTAX_LINE = re.compile(r"\(at line ([0-9]+), column [0-9]+\)$")
_UNITS = ("_ms", "_s", "_mbit_s", "_percent", "_mib", "_packets")
_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
Read = TypeVar("Read")


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
        for key, line in _keys(text):
            self._lines.setdefault(key, line)

    def below(self, table: str) -> "KeyLines":
        """Return the same lines for keys that are counted from a table of the text."""
        return KeyLines(self._source, self._text, table=f"{table}.")

    def of(self, key: str) -> str:
        """Return ``FILE:LINE [table]`` of a dotted key, or of the nearest table that has a line."""
        line = self.line(key)
        place = f"{self._source}:{line}" if line else self._source
        return f"{place} {_name_of(self._table + key)}" if key else place

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
        if header := _HEADER.fullmatch(line):
            table = _path_of(header[2].replace('"', "").split("."), counts)
            if header[1] == "[[":
                counts[table] += 1
                table = f"{table}.{counts[table] - 1}"
            yield table, number
        elif found := _KEY.match(line):
            words = [table, found[1].strip('"'), found[2] or ""]
            yield ".".join(word for word in words if word), number


def _path_of(words: Sequence[str], counts: Counter[str]) -> str:
    """The path of a header: below an array it belongs to the array's newest table."""
    path = words[0].strip()
    for word in words[1:]:
        newest = f".{counts[path] - 1}" if counts[path] else ""
        path = f"{path}{newest}.{word.strip()}"
    return path


def load_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; ``source`` names the text in messages.

    Raises:
        JobFileError: It is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as broken:
        # The parser names the place in words at the end; people's editors want ``FILE:LINE``.
        found = _SYNTAX_LINE.search(str(broken))
        line = int(found[1]) if found else max(1, len(text.splitlines()))
        fix = "correct the syntax there, for example the quotes around a text"
        problem = Problem("", f"it is not TOML: {broken}", fix, f"{source}:{line}")
        raise JobFileError([problem]) from broken
    except RecursionError as broken:
        fix = "no setting is a list of lists or a table of tables"
        raise JobFileError([Problem("", "it is nested too deeply", fix, source)]) from broken


def read_struct(tree: Mapping[str, object], kind: type[Read], lines: KeyLines) -> Read:
    """Convert a table into a struct.

    Args:
        tree: The parsed table.
        kind: A struct that forbids unknown fields. It may raise a `ValueError`, whose first line is
            the problem and whose second one the fix.
        lines: Where the table's keys stand.

    Raises:
        JobFileError: A key is wrong; the first one, with its place.
    """
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as wrong:
        message, _, at = str(wrong).partition(" - at `$")
        path = re.sub(r"\[(\d+)\]", r".\1", at.rstrip("`")).strip(".").split(".")
        problem = _problem(message, [word for word in path if word], tree, kind, lines)
        raise JobFileError([problem]) from None


def _problem(
    message: str, path: list[str], tree: Mapping[str, object], kind: type, lines: KeyLines
) -> Problem:
    types = _types_at(inspect.type_info(kind), path)
    fields = {each.encode_name: each for each in _fields(types)}
    _, _, name = message.rstrip("`").rpartition("`")
    if message.startswith("Object contains unknown field"):
        path, what = [*path, name], f"there is no key {name} here"
        fix = _key_suggestion(name, list(fields))
    elif message.startswith("Object missing required field"):
        path, what, fix = [*path, name], f"{name} is missing", _example(name, types)
    elif message.startswith("Invalid"):
        value = message.partition("'")[2].rstrip("'")
        meant = nearest(value, choices := _choices(types))
        fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(choices)}"
        what = f'"{value}" is unknown'
    elif message.startswith("Expected"):
        what, fix = f"it is {quoted_value(_value_at(tree, path))}", _constraint_text(message)
    else:
        what, _, fix = message.partition("\n")
    key = ".".join(path)
    return Problem(key, what, fix, lines.of(key))


def _types_at(root: inspect.Type, path: Sequence[str]) -> list[inspect.Type]:
    """What may stand at a path, unions taken apart."""
    found = _alternatives(root)
    for word in path:
        inner = [each.item_type for each in found if isinstance(each, inspect.ListType)]
        if not word.isdecimal():
            inner = [field.type for field in _fields(found) if field.encode_name == word]
            if word == _tag_field(found):
                return found
        found = [option for each in inner for option in _alternatives(each)]
    return found


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
    meant = nearest(key, known)
    return f"did you mean {meant}?" if meant else f"the keys are {join_words(known)}"


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


def _constraint_text(message: str) -> str:
    """The constraint of a message such as "Expected `float | null` >= 0.0, got `str`"."""
    _, types, rest = message.partition(", got")[0].split("`", 2)
    words = [_TYPES.get(each, each) for each in types.split(" | ") if each != "null"]
    return f"give {' or '.join(words)}{rest.removesuffix('.0')}"
