"""Items that are arrays, as Arrow files: a column for each field, whose values are the raw bytes of
one sample in little-endian C order. Shapes and types are the program's to state.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.item_chunks import CHUNK_BYTES_MOST
from hypergpu.programs.container import Field


def array_items(fields: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays ``[items, ...]`` by name as the content of a chunk.

    Needs pyarrow. Bytes are equal for equal arrays with one version of pyarrow.
    """
    import pyarrow as pa

    columns = {name: _column(array) for name, array in fields.items()}
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _column(array: NDArray[Any]) -> Any:
    import pyarrow as pa

    rows = np.ascontiguousarray(array)
    rows = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
    size_bytes = rows.dtype.itemsize * prod(rows.shape[1:])
    kind = pa.binary(size_bytes)
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(rows.tobytes())])


def read_array_items(content: bytes, fields: Sequence[Field], items: int) -> list[NDArray[Any]]:
    """Read a chunk of arrays, trusting nothing in it.

    Args:
        content: The chunk, whose digest was checked.
        fields: Names, shapes and types, in the order of the arrays that are given.
        items: How many items its manifest says that it has.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is too large, malformed, or lacks a field.
    """
    import pyarrow as pa

    if len(content) > CHUNK_BYTES_MOST:
        raise _chunk_error(f"it has {len(content)} bytes, and {CHUNK_BYTES_MOST} at most")
    try:
        with pa.ipc.open_file(pa.BufferReader(content)) as reader:
            table = reader.read_all().combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _chunk_error(str(error)) from error
    if table.num_rows != items:
        raise _chunk_error(f"it has {table.num_rows} rows, and {items} items by its manifest")
    return [_array(table, field) for field in fields]


def _array(table: Any, field: Field) -> NDArray[Any]:
    import pyarrow as pa

    dtype = np.dtype(field.dtype).newbyteorder("<")
    size_bytes = dtype.itemsize * prod(field.shape)
    if field.name not in table.column_names:
        raise _chunk_error(f"it has no field {field.name}")
    column = table.column(field.name)
    if column.type != pa.binary(size_bytes) or column.null_count:
        raise _chunk_error(f"its field {field.name} is {column.type}, not {size_bytes} bytes each")
    content = b"".join(value.as_buffer().to_pybytes() for value in column)
    return np.frombuffer(content, dtype).reshape(len(column), *field.shape)


def _chunk_error(why: str) -> HyperGPUError:
    return HyperGPUError(Reason.MANIFEST_INVALID, f"a chunk of arrays cannot be used: {why}")
