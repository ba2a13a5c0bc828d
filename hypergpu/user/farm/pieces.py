"""Results as rows: each accepted result becomes a piece, and all pieces in order the output."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hypergpu.durable import SHARED, fill_durably, write_durably
from hypergpu.farm.bundle_results import read_json_results, read_vector_results
from hypergpu.farm.map_request import ResultEncoding
from hypergpu.user.client.bundles import DroppedItemView, ResultView
from hypergpu.user.farm.item_rules import ItemRules
from hypergpu.user.farm.output_folder import OutputFolder, PieceName
from hypergpu.user.farm.picture_files import write_pictures

_GROUP_ROWS = 16_384
"""Rows of a parquet file that are written at once."""
_PARQUET = ".parquet"
Columns = dict[str, list[Any]]


class RowContext(NamedTuple):
    """What rows say beside their values."""

    ids: Sequence[str | int]
    """Ids in order; empty: they are the positions."""
    reasons: Mapping[int, str]
    """Why rows could not become items, by position."""
    seed: int

    def id_of(self, position: int) -> str | int:
        """The id of an item."""
        return self.ids[position] if self.ids else position

    @property
    def has_text_ids(self) -> bool:
        """Whether ids are texts in the output: one of them is."""
        return any(isinstance(each, str) for each in self.ids)


def write_piece(
    folder: OutputFolder,
    rules: ItemRules,
    context: RowContext,
    result: ResultView,
    content: bytes,
) -> None:
    """Write the rows of an accepted result as a piece, durably.

    Raises:
        HyperGPUError: REQUEST_INVALID, the result is malformed.
    """
    values, errors = _values(rules, result, content)
    for column, kind in rules.columns.items():
        if kind == "png":
            values = write_pictures(folder, column, result.start, values)
    columns = _columns(rules, context, result.start, values, errors)
    columns["node"] = [result.node] * result.items
    columns["tries"] = [result.tries] * result.items
    path = folder.piece_path(PieceName(result.start, result.items))
    _write_rows(path, rules, context, columns)


def _values(
    rules: ItemRules, result: ResultView, content: bytes
) -> tuple[Sequence[Any], dict[int, str]]:
    """Values of a result's items, and reasons by place."""
    if rules.encoding is ResultEncoding.SAFETENSORS:
        arrays = read_vector_results(content, result.items)
        return list(arrays.values), dict(arrays.errors)
    items = read_json_results(content, result.items)
    errors = {place: item.error for place, item in enumerate(items) if item.error}
    return [item.value for item in items], errors


def _columns(
    rules: ItemRules,
    context: RowContext,
    start: int,
    values: Sequence[Any],
    errors: dict[int, str],
) -> Columns:
    positions = range(start, start + len(values))
    reasons = [
        context.reasons.get(position, errors.get(place, ""))
        for place, position in enumerate(positions)
    ]
    identifiers = [context.id_of(position) for position in positions]
    columns: Columns = {"id": identifiers}
    for name in rules.columns:
        columns[name] = [
            None if reason else _cell(rules, value, name)
            for value, reason in zip(values, reasons, strict=True)
        ]
    columns["seed"] = [context.seed] * len(values)
    columns["error"] = [reason or None for reason in reasons]
    return columns


def _cell(rules: ItemRules, value: Any, name: str) -> Any:
    if rules.encoding is ResultEncoding.SAFETENSORS:
        return np.asarray(value).tolist()
    return value.get(name) if isinstance(value, dict) else value


def _write_rows(path: Path, rules: ItemRules, context: RowContext, columns: Columns) -> None:
    if path.suffix == _PARQUET:
        table = _table(rules, context, columns)

        def fill(target: Path) -> None:
            from pyarrow import parquet

            parquet.write_table(table, target)

        fill_durably(path, fill, mode=SHARED)
        return
    names = _ordered_names(rules)
    rows = zip(*(columns[name] for name in names), strict=True)
    write_durably(path, b"".join(_json_row(names, row) for row in rows), mode=SHARED)


def _json_row(names: Sequence[str], row: Sequence[Any]) -> bytes:
    fields = dict(zip(names, row, strict=True))
    if fields["error"] is None:
        del fields["error"]
    return msgspec.json.encode(fields) + b"\n"


def _ordered_names(rules: ItemRules) -> list[str]:
    return ["id", *rules.columns, "node", "tries", "seed", "error"]


def _table(rules: ItemRules, context: RowContext, columns: Columns) -> Any:
    import pyarrow as pa

    kinds: dict[str, Any] = {
        "vector": _vector_type(columns[next(iter(rules.columns))]),
        "text": pa.string(),
        "float": pa.float64(),
        "integer": pa.int64(),
        "shares": pa.map_(pa.string(), pa.float64()),
        "curve": pa.list_(pa.struct([("step", pa.int64()), ("value", pa.float64())])),
        "json": pa.string(),
        "png": pa.string(),
    }
    types = {name: kinds[kind] for name, kind in rules.columns.items()}
    types |= {"id": pa.string() if context.has_text_ids else pa.int64()}
    types |= {"node": pa.string(), "tries": pa.int64(), "seed": pa.int64(), "error": pa.string()}
    if context.has_text_ids:
        columns = {**columns, "id": [str(each) for each in columns["id"]]}
    arrays = {
        name: pa.array(_cells(columns[name], rules.columns.get(name, "")), types[name])
        for name in _ordered_names(rules)
    }
    return pa.table(arrays)


def _cells(values: list[Any], kind: str) -> list[Any]:
    """Values of a column as parquet takes them."""
    if kind == "shares":
        return [list(value.items()) if isinstance(value, dict) else None for value in values]
    if kind == "json":
        return [None if value is None else msgspec.json.encode(value).decode() for value in values]
    return values


def _vector_type(values: Sequence[Any]) -> Any:
    """Type of nested lists of float32, by the first value that is there."""
    import pyarrow as pa

    first: Any = next((value for value in values if value is not None), [])
    kind = pa.float32()
    for _ in range(np.ndim(first)):
        kind = pa.list_(kind)
    return kind


def write_table(
    folder: OutputFolder, rules: ItemRules, context: RowContext, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Write rows that are there already as the only piece, durably.

    Args:
        folder: Without other pieces.
        rules: Of the rows' kind.
        context: What rows say beside their values.
        rows: All rows in order; a field that one lacks is empty.
    """
    columns = {name: [row.get(name) for row in rows] for name in _ordered_names(rules)}
    _write_rows(folder.piece_path(PieceName(0, len(rows))), rules, context, columns)


def write_dropped(
    folder: OutputFolder,
    rules: ItemRules,
    context: RowContext,
    dropped_items: Iterable[DroppedItemView],
) -> None:
    """Write a piece for each item that was given up, durably."""
    for item in dropped_items:
        path = folder.piece_path(PieceName(item.item, 1))
        if path.exists():
            continue
        columns = _columns(rules, context, item.item, [None], {0: item.reason or "given up"})
        columns |= {"node": [None], "tries": [None]}
        _write_rows(path, rules, context, columns)


def write_output(folder: OutputFolder) -> int:
    """Join all pieces to the output, and write the file of errors; gives the number of errors.

    Both appear whole or not at all.
    """
    paths = [folder.piece_path(name) for name in folder.piece_names()]
    if folder.out.suffix == _PARQUET:
        errors = _join_tables(folder.out, paths)
    else:
        errors = _join_lines(folder.out, paths)
    if errors:
        lines = b"".join(msgspec.json.encode(each) + b"\n" for each in errors)
        write_durably(folder.errors, lines, mode=SHARED)
    else:
        folder.errors.unlink(missing_ok=True)
    return len(errors)


ErrorRow = dict[str, Any]
"""Id and reason of an item without a value."""


def _join_lines(out: Path, paths: Sequence[Path]) -> list[ErrorRow]:
    errors: list[ErrorRow] = []

    def fill(target: Path) -> None:
        with target.open("wb") as file:
            for path in paths:
                for line in path.read_bytes().splitlines(keepends=True):
                    file.write(line)
                    if b'"error":' in line and (row := msgspec.json.decode(line)).get("error"):
                        errors.append({"id": row["id"], "error": row["error"]})

    fill_durably(out, fill, mode=SHARED)
    return errors


def _join_tables(out: Path, paths: Sequence[Path]) -> list[ErrorRow]:
    from pyarrow import parquet

    errors: list[ErrorRow] = []
    schema = _widest_schema(paths)

    def fill(target: Path) -> None:
        with parquet.ParquetWriter(target, schema) as writer:
            for table in _grouped_tables(paths, schema):
                writer.write_table(table)
                for identifier, reason in zip(
                    table.column("id").to_pylist(), table.column("error").to_pylist(), strict=True
                ):
                    if reason:
                        errors.append({"id": identifier, "error": reason})

    fill_durably(out, fill, mode=SHARED)
    return errors


def _widest_schema(paths: Sequence[Path]) -> Any:
    """The schema of a piece that has values: one without any does not know how deep lists are."""
    from pyarrow import parquet

    schemas = [parquet.read_schema(path) for path in paths]
    return max(schemas, key=lambda schema: sum(len(str(field.type)) for field in schema))


def _grouped_tables(paths: Sequence[Path], schema: Any) -> Iterator[Any]:
    """Pieces in order, several small ones as one table."""
    import pyarrow as pa
    from pyarrow import parquet

    tables: list[Any] = []
    for path in paths:
        tables.append(_as_schema(parquet.read_table(path), schema))
        if sum(table.num_rows for table in tables) >= _GROUP_ROWS:
            yield pa.concat_tables(tables).combine_chunks()
            tables = []
    if tables:
        yield pa.concat_tables(tables).combine_chunks()


def _as_schema(table: Any, schema: Any) -> Any:
    """The table with another schema: columns without a value take any type."""
    import pyarrow as pa

    columns = [
        table.column(field.name)
        if table.column(field.name).type == field.type
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
