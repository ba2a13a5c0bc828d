"""A user's data as items in order: each with its id and the value that a node gets.

A row that cannot become an item is told by itself, and the job goes on; a file that is not of its
kind is refused as a whole, before anything is sent.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.picture_items import PictureFile, folder_items, picture_value
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.row_files import SUFFIXES
from hypergpu.workloads.finetuning.rows import file_rows

_TEXT_FIELDS = ("text", "prompt", "content", "sentence")
FORMS = (
    "a file that ends in .jsonl, .json, .csv or .parquet, a folder of text files, a DataFrame, a"
    " datasets.Dataset, or a list of texts or objects"
)
_TEXT_BYTES_MOST = 4 << 20
"""Size of a text at most: an item has to fit into a chunk."""
SourceRow = Mapping[str, Any]


class SourceItem(NamedTuple):
    """One item of a user's data."""

    id: str | int
    value: Any
    error: str = ""
    """Why the row cannot become an item; then it has no value."""


class ItemFields(NamedTuple):
    """Names of the fields that items are made of; empty: the usual ones."""

    text: str = ""
    id: str = ""


class FileStamp(NamedTuple):
    """What changes where a file does."""

    path: Path
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The stamp of a file at this moment.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it cannot be read.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error
        return cls(path, status.st_size, status.st_mtime_ns)


class ItemSource:
    """Items of a user's data. They can be read as often as wanted.

    Args:
        given: One of `FORMS`.
        form: What an item is made of.
        fields: Names of the fields.
    """

    def __init__(self, given: Any, form: ItemForm, fields: ItemFields) -> None:
        self._given = Path(given).expanduser() if isinstance(given, str | Path) else given
        self._form = form
        self._fields = fields
        self._stamps: dict[Path, FileStamp] = {}

    def items(self) -> Iterator[SourceItem]:
        """All items in order.

        Raises:
            HyperGPUError: The data cannot be used, an id occurs twice, or a file changed while it
                was read.
        """
        ids: set[str | int] = set()
        for position, (row, place, name) in enumerate(self._rows()):
            identifier = self._id(row, position, place, name)
            if identifier in ids:
                detail = f"the id {identifier!r} occurs twice, the second time in {place}"
                raise HyperGPUError(
                    Reason.FILE_UNUSABLE, detail, fix="make ids unique, or leave the id field out"
                )
            ids.add(identifier)
            yield self._item(identifier, row, place)
        self._check_unchanged()

    def _id(self, row: Any, position: int, place: str, name: str) -> str | int:
        if not self._fields.id:
            return name or position
        value = row.get(self._fields.id) if isinstance(row, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, str | int):
            detail = f"{place} has no id: its field {self._fields.id!r} is {type(value).__name__}"
            raise HyperGPUError(
                Reason.FILE_UNUSABLE, detail, fix="give each row a text or whole number as its id"
            )
        return value

    def _item(self, identifier: str | int, row: Any, place: str) -> SourceItem:
        value, error = _VALUES[self._form](row, self._fields.text)
        if not error and isinstance(value, str) and len(value.encode()) > _TEXT_BYTES_MOST:
            error = f"the text is longer than {_TEXT_BYTES_MOST} bytes"
        if error:
            return SourceItem(identifier, None, f"{place}: {error}")
        return SourceItem(identifier, value)

    def _rows(self) -> Iterator[tuple[Any, str, str]]:
        """Rows with their place for messages, and their own name where each is a file."""
        if isinstance(self._given, Path):
            yield from self._rows_of_path(self._given)
            return
        for number, row in enumerate(_object_rows(self._given), 1):
            yield row, f"row {number}", ""

    def _rows_of_path(self, path: Path) -> Iterator[tuple[Any, str, str]]:
        if path.is_dir():
            yield from self._rows_of_folder(path)
            return
        if path.suffix.lower() not in SUFFIXES:
            detail = f"{path} is of no known kind" if path.exists() else f"there is no file {path}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=f"give {FORMS}")
        self._stamp(path)
        with _translate_file_errors(path):
            for row, _, place in file_rows(path, 0, path.name):
                yield row, place, ""

    def _rows_of_folder(self, folder: Path) -> Iterator[tuple[Any, str, str]]:
        """Each text file as an item whose id is its path; each picture, where there are pictures
        alone and the kind takes them.
        """
        names, are_pictures = folder_items(folder, self._form)
        for name in sorted(names):
            self._stamp(names[name])
            try:
                content = names[name].read_bytes()
            except OSError as error:
                raise HyperGPUError(Reason.FILE_UNUSABLE, f"{name}: {error.strerror}") from error
            yield (PictureFile(content) if are_pictures else _file_text(content)), name, name

    def _stamp(self, path: Path) -> None:
        self._stamps[path] = FileStamp.of(path)

    def _check_unchanged(self) -> None:
        for path, stamp in self._stamps.items():
            if FileStamp.of(path) != stamp:
                detail = f"{path} changed while it was read; nothing was sent"
                raise HyperGPUError(
                    Reason.FILE_UNUSABLE, detail, fix="try again once nobody writes to it"
                )


def _file_text(content: bytes) -> str | None:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


@contextlib.contextmanager
def _translate_file_errors(path: Path) -> Iterator[None]:
    """Raise errors of files as those of HyperGPU."""
    try:
        yield
    except DatasetError as error:
        detail, _, fix = str(error).partition(" Fix: ")
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail.rstrip("."), fix=fix) from error
    except UnicodeDecodeError as error:
        detail = f"{path} is not UTF-8: {error.reason}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="convert it") from error
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error


def _object_rows(given: Any) -> Iterable[Any]:
    """Rows of data in memory.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, they have none of the forms that are known.
    """
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # a DataFrame
        rows: Iterable[Any] = given.to_dict("records")
        return rows
    if hasattr(given, "column_names") and hasattr(given, "__len__"):  # datasets.Dataset
        return (given[number] for number in range(len(given)))
    if isinstance(given, list | tuple):
        return given
    raise HyperGPUError(
        Reason.ARGUMENT_INVALID, f"data of type {type(given).__name__}", fix=f"give {FORMS}"
    )


_Value = tuple[Any, str]


def _text(row: Any, field: str) -> _Value:
    value, error = _field_value(row, field)
    if error or isinstance(value, str):
        return value, error or _unicode_error(value)
    return None, f"its {_field_text(field)} is {type(value).__name__}, not a text"


def _field_value(row: Any, field: str) -> _Value:
    """A field of a row; the row itself where it is no object."""
    if not isinstance(row, Mapping):
        return (None, "it is not UTF-8") if row is None else (row, "")
    names = [field] if field else [name for name in _TEXT_FIELDS if name in row]
    if not names and len(row) == 1:
        names = list(row)
    if not names or names[0] not in row:
        fields = ", ".join(map(str, list(row)[:8])) or "none"
        return None, f"it has no field {field or 'text'!r}; its fields are {fields}"
    return row[names[0]], ""


def _field_text(field: str) -> str:
    return f"field {field!r}" if field else "text"


def _unicode_error(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return "its text is not Unicode"
    return ""


def _scored_text(row: Any, field: str) -> _Value:
    if isinstance(row, Mapping) and "continuation" in row and not field:
        pair = {name: row.get(name) for name in ("context", "continuation")}
        if all(isinstance(each, str) for each in pair.values()):
            return pair, _unicode_error("".join(map(str, pair.values())))
        return None, "its fields context and continuation are not both texts"
    return _text(row, field)


def _prompt(row: Any, field: str) -> _Value:
    if isinstance(row, Mapping) and "messages" in row and field in {"", "messages"}:
        messages = row["messages"]
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return [{"role": each["role"], "content": each["content"]} for each in messages], ""
        return None, "its field messages is no list of objects with the texts role and content"
    return _text(row, field)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


def _whole_row(row: Any, field: str) -> _Value:
    return _field_value(row, field) if field else (row, "")


def _text_or_picture(row: Any, field: str) -> _Value:
    return picture_value(row) if isinstance(row, PictureFile) else _text(row, field)


_VALUES: Mapping[ItemForm, Callable[[Any, str], _Value]] = {
    ItemForm.TEXT: _text,
    ItemForm.TEXT_OR_PICTURE: _text_or_picture,
    ItemForm.SCORED: _scored_text,
    ItemForm.PROMPT: _prompt,
    ItemForm.JSON: _whole_row,
}
