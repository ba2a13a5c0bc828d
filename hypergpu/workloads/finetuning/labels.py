"""Labels of rows as class numbers: a class's name first, else its number where that is clear."""

from collections.abc import Sequence
from typing import Any

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.rows import DataRow


def class_number(place: str, label: Any, names: Sequence[str]) -> int:
    """The class that a row's label names.

    A whole number is a class's number only where no class is named by a number. ``1.0`` is 1;
    ``true`` is 1 and ``false`` 0 of two classes; names may differ in upper and lower case.

    Args:
        place: File and row, for the message.
        label: As the row has it.
        names: The classes', in the order of their numbers.

    Raises:
        DatasetError: It names no class.
    """
    text = _label_text(label)
    if text in names:
        return names.index(text)
    alike = [number for number, name in enumerate(names) if name.casefold() == text.casefold()]
    if len(alike) == 1:
        return alike[0]
    if isinstance(label, bool) and len(names) == 2:
        return int(label)
    if _is_whole(text) and not any(map(_is_whole, names)) and 0 <= int(text) < len(names):
        return int(text)
    label_text = "no label" if label is None else f"the label {text!r}"
    numbers = "" if any(map(_is_whole, names)) else f", or their numbers 0 to {len(names) - 1}"
    raise DatasetError(
        f"{place} has {label_text}, and the classes are {', '.join(names)}{numbers}."
        " Fix: set options.labels to the names that the rows have"
    )


def check_numbers(rows: Sequence[DataRow], names: Sequence[str]) -> None:
    """Refuse rows that have both names and numbers of classes, and numbers that begin at 1.

    Raises:
        DatasetError: It is not clear which class a number is.
    """
    if any(map(_is_whole, names)):
        return
    texts = {_label_text(row.values.get("label")): row.place for row in rows}
    numbers = {int(text): place for text, place in texts.items() if _is_whole(text)}
    others = [text for text in texts if not _is_whole(text) and text.casefold() not in _TRUTHS]
    if numbers and others:
        number = min(numbers)
        raise DatasetError(
            f"{numbers[number]} has the label {number}, and other rows have names of classes."
            " Fix: give all rows names"
        )
    if numbers and 0 not in numbers and len(numbers) > 1 and len(names) > 2:
        raise DatasetError(
            f"the labels are {', '.join(map(str, sorted(numbers)))} without 0, and the classes"
            f" {', '.join(names)}: it is not clear whether the first class is 0 or 1."
            " Fix: give all rows names"
        )


_TRUTHS = frozenset({"true", "false"})


def _label_text(label: Any) -> str:
    """A label as text; whole numbers alike whatever type a file gave them."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label).strip()


def _is_whole(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit()
