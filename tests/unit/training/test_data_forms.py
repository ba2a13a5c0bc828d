"""Data in the forms that people have them: taken as they are meant, or refused by a sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import SamplesError
from hypergpu.user.training.datasets import DataSource
from hypergpu.user.training.train import JobSamples
from hypergpu.workloads.networks.checked_program import check_loss
from hypergpu.workloads.networks.tracing import BatchShape

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.arange(12) % 3
CUBES = np.arange(50 * 12, dtype=np.float32).reshape(50, 3, 4)


def whole(source: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All samples by field."""
    batches = [*DataSource(source, "data").batches()]
    return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}


def nullable(*, missing: bool) -> pd.DataFrame:
    """A frame whose labels pandas calls nullable."""
    frame = pd.DataFrame({"a": X[:, 0], "y": pd.array(Y, dtype="Int64")})
    if missing:
        frame.loc[3, "y"] = pd.NA
    return frame


def loader() -> DataLoader[Any]:
    """Batches of a torch data set."""
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=4)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (loader(), r"a DataLoader gives batches.*Fix: give its samples: data=loader\.dataset$"),
        ([X, Y], r"these 2 arrays have unequal shapes. Fix: give a tuple of them"),
        (nullable(missing=True), r"field y: sample 3 has no value. Fix: drop or fill it"),
        ({"x": [[1.0], [1.0, 2.0]]}, r"field x: sample 1 has shape \[2\], sample 0 \[1\]"),
        ({"x": [[[1.0], [2.0, 3.0]]] * 3}, "sample 0 has rows of unequal lengths"),
        ([{"x": 1.0}, {"x": None}], "field x: sample 1 has no value"),
    ],
)
def test_data_that_are_not_samples_are_refused_by_their_own_sentence(
    source: Any, said: str
) -> None:
    with pytest.raises(SamplesError, match=said) as failure:
        whole(source)
    assert str(failure.value).count("Fix: ") == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.array(["a", "b"]), "text cannot be trained on. Fix: give whole numbers"),
        (np.ones(2, np.complex64), r"complex64 .* Fix: give real and imaginary parts"),
        (np.ones(2, np.uint32), "uint32 cannot be trained on. Fix: convert it to one of float32"),
    ],
)
def test_values_that_are_no_numbers_of_a_program_are_refused(
    values: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SamplesError, match=said):
        JobSamples({"x": values}, {"x": values}).write(tmp_path)


def test_lists_nullable_columns_and_rows_are_taken_as_they_are_meant() -> None:
    assert np.array_equal(whole([*X])["field_0"], X)
    assert np.array_equal(whole(X.tolist())["field_0"], X)
    assert np.array_equal(whole({"x": X.tolist()})["x"], X)
    assert whole(nullable(missing=False))["y"].dtype == np.int64
    low = torch.from_numpy(X).bfloat16()
    assert np.array_equal(whole({"x": low})["x"], X)


def permuted_tensors() -> Any:
    """Tensors whose storage has another order."""
    turned_cubes = np.ascontiguousarray(CUBES.transpose(0, 2, 1)).transpose(0, 2, 1)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(turned_cubes)


@pytest.mark.parametrize(
    "column",
    [
        pa.FixedShapeTensorArray.from_numpy_ndarray(CUBES),
        permuted_tensors(),
        pa.array(CUBES.tolist(), type=pa.list_(pa.list_(pa.float32()))),
        pa.array(CUBES.tolist(), type=pa.list_(pa.list_(pa.float32(), 4), 3)),
    ],
)
def test_tensors_of_parquet_keep_shape_and_order(column: Any, tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": column}), tmp_path / "cubes.parquet")
    assert np.array_equal(whole(tmp_path / "cubes.parquet")["x"], CUBES)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([1, 2, None]), "column x: row 2 has no value. Fix: drop or fill it"),
        (pa.array([[1.0], [1.0, 2.0]]), "the list of row 1 has 2 values, that of row 0 1"),
        (pa.array([[1.0], [None]]), "a value is missing in the list of row 1"),
    ],
)
def test_what_a_parquet_file_lacks_is_told_with_its_row(
    column: Any, said: str, tmp_path: Path
) -> None:
    parquet.write_table(pa.table({"x": column}), tmp_path / "some.parquet")
    with pytest.raises(SamplesError, match=said):
        whole(tmp_path / "some.parquet")


def test_a_loss_of_outputs_and_targets_is_refused_with_the_one_to_write() -> None:
    named_shape, ordered_shape = (
        BatchShape(("x", "y"), is_tuple=False),
        BatchShape(("a", "b"), is_tuple=True),
    )
    with pytest.raises(ProgramError, match=r"nn\.CrossEntropyLoss\(\)\(model\(batch\['x'\]\)"):
        check_loss(nn.CrossEntropyLoss(), named_shape)
    with pytest.raises(ProgramError, match=r"F\.mse_loss\(model\(batch\[0\]\), batch\[1\]\)$"):
        check_loss(nn.functional.mse_loss, ordered_shape)
