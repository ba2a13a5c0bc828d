"""Reads outputs back: as vectors, as a DataFrame, or row by row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError, Reason


def read_vectors(path: Path, name: str) -> NDArray[np.float32]:
    """A column of vectors, ``float32[items, ...]``, with NaN where there is none."""
    rows = list(_cells(path, name))
    shape = next((np.shape(row) for row in rows if row is not None), (0,))
    empty = np.full(shape, np.nan, np.float32)
    values = [empty if row is None else np.asarray(row, np.float32) for row in rows]
    return np.stack(values)


def _cells(path: Path, name: str) -> Iterator[Any]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024, columns=[name]):
                yield from batch.column(0).to_pylist()
        return
    with path.open("rb") as lines:
        for line in lines:
            yield msgspec.json.decode(line).get(name)


def read_frame(path: Path) -> Any:
    """An output as a DataFrame of pandas.

    Raises:
        HyperGPUError: MACHINE_UNFIT, pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        detail = f"a DataFrame needs pandas; the rows are in {path}"
        raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix="pip install pandas") from error
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_json(path, lines=True, dtype=False)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a sweep's output in order, in the form of JSON lines whatever the file's is."""
    if path.suffix != ".parquet":
        with path.open("rb") as lines:
            for line in lines:
                yield {"error": None, **msgspec.json.decode(line)}
        return
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1024):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                point = row["point"]
                yield {**row, "point": None if point is None else msgspec.json.decode(point)}
