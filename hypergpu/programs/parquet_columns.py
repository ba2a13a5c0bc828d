"""Columns of parquet files as arrays: tensors and nested lists with their shapes. A missing value
is told with its row.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute

from hypergpu.programs.samples import SamplesError


def column_values(column: Any, where: str, first: int) -> NDArray[Any]:
    """Values of a column, one row a sample.

    Args:
        column: An array of pyarrow.
        where: For messages.
        first: Number of its first row in the file.

    Raises:
        SamplesError: A value is missing, or lists have unequal lengths.
    """
    if column.null_count:
        row = first + int(compute.index(column.is_null(), True).as_py())
        raise SamplesError(f"{where}: row {row} has no value. Fix: drop or fill it")
    if isinstance(column, pa.FixedShapeTensorArray):
        tensors: NDArray[Any] = column.to_numpy_ndarray()
        return tensors
    if isinstance(column, pa.ExtensionArray):
        return column_values(column.storage, where, first)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return column_values(column.dictionary_decode(), where, first)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list_values(column, where, first)
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


def _list_values(column: Any, where: str, first: int) -> NDArray[Any]:
    """Lists of one length as rows, to the bottom."""
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    others = np.flatnonzero(lengths != lengths[:1])
    if len(others):
        row = int(others[0])
        raise SamplesError(
            f"{where}: the list of row {first + row} has {lengths[row]} values, that of row {first}"
            f" {lengths[0]}. Fix: pad them to one length"
        )
    inner = column.flatten()
    if inner.null_count:
        missing_row = int(compute.index(inner.is_null(), True).as_py()) // max(int(lengths[0]), 1)
        raise SamplesError(
            f"{where}: a value is missing in the list of row {first + missing_row}."
            " Fix: drop or fill it"
        )
    values = column_values(inner, where, first)
    return values.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *values.shape[1:])
