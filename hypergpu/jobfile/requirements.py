"""Requirements of a job on its nodes: ``gpu >= 8GB``, ``region = eu``.

One comparison each: a name, an operator, and a number with its unit or a text. A name is a property
that every node tells of itself, or a label that its owner gave it.
"""

import re
from functools import lru_cache

import msgspec

SIZE, COUNT, TEXT = "size", "count", "text"
PROPERTIES = {
    "device": TEXT,
    "gpu": SIZE,
    "memory": SIZE,
    "cores": COUNT,
    "worker": TEXT,
    "software": TEXT,
}
"""What every node tells of itself, and in what: ``gpu`` is the memory of its GPU, 0 without one."""
REQUIREMENTS_MOST = 16
LABELS_MOST = 16
"""Labels of a node."""
_LENGTH_MOST = 128
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_NAME = r"[a-z][a-z0-9_-]{0,31}"
_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9._+-]{0,63})"
_REQUIREMENT = re.compile(rf"\s*({_NAME})\s*(>=|<=|!=|=|>|<)\s*({_VALUE}(?: ?[kMGT]?B)?)\s*")
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([kmgt]?b)?", re.IGNORECASE)


class RequirementError(ValueError):
    """A text that is no requirement or no label; ``fix`` says what would be right."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


class Requirement(msgspec.Struct, frozen=True):
    """One comparison that a node has to meet."""

    text: str
    """As the job file has it."""
    name: str
    operator: str
    value: str | float
    """A number, in bytes where it is a size; else a text, which is compared for equality only."""


@lru_cache(maxsize=256)
def parse_requirement(text: str) -> Requirement:
    """Parse one requirement.

    Raises:
        RequirementError: It is none.
    """
    short_text = text if len(text) <= _LENGTH_MOST else f"{text[:_LENGTH_MOST]}..."
    match = _REQUIREMENT.fullmatch(text) if len(text) <= _LENGTH_MOST else None
    if match is None:
        what = f'"{short_text}" is no comparison'
        raise RequirementError(what, 'write NAME OPERATOR VALUE, such as "gpu >= 8GB"')
    name, operator, word = match[1], match[2], match[3]
    kind = PROPERTIES.get(name)
    quantity = _quantity(word, is_size=kind == SIZE) if kind != TEXT else None
    if kind == SIZE and quantity is None:
        raise RequirementError(f'"{word}" is no size', f'write for example "{name} >= 8GB"')
    if kind == COUNT and quantity is None:
        raise RequirementError(f'"{word}" is no number', f'write for example "{name} >= 4"')
    if quantity is None and operator not in ("=", "!="):
        fix = f'write "{name} = {word}" or "{name} != {word}", or compare with a number'
        raise RequirementError(f'"{word}" is a text, and texts have no order', fix)
    # A label is compared as a text where texts are equal or not: "zone = 7" holds for "7" alone.
    if quantity is None or (kind is None and operator in ("=", "!=")):
        return Requirement(text.strip(), name, operator, word)
    return Requirement(text.strip(), name, operator, quantity)


def _quantity(word: str, *, is_size: bool) -> float | None:
    """The number that a word is, in bytes where it is a size; None: it is none."""
    match = _QUANTITY.fullmatch(word)
    if match is None or (match[2] and not is_size):
        return None
    return float(match[1]) * _UNITS[(match[2] or "").lower()]


def number_in(word: str) -> float | None:
    """The number that a label's value is; None: it is a text."""
    return _quantity(word, is_size=False)


def parse_label(text: str) -> tuple[str, str]:
    """Parse an owner's label, ``NAME=VALUE``.

    Raises:
        RequirementError: It is none, or has the name of a property.
    """
    match = re.fullmatch(rf"\s*({_NAME})\s*=\s*({_VALUE})\s*", text[: _LENGTH_MOST + 1])
    if match is None:
        fix = "write NAME=VALUE of letters, digits, - and _, such as region=eu"
        raise RequirementError(f'"{text[:_LENGTH_MOST]}" is no label', fix)
    if match[1] in PROPERTIES:
        what = f"every node tells its {match[1]} by itself"
        raise RequirementError(what, "give the label another name")
    return match[1], match[2]
