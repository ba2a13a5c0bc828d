"""A user's data in all its forms."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from msgspec.structs import replace
from pyarrow import parquet
from torch import nn
from torch.utils.data import TensorDataset

from hypergpu.jobfile.spec import Data, JobSpec
from hypergpu.programs.samples import SamplesError, SampleWriter, read_samples
from hypergpu.user.training.datasets import DataSource, HeldOutSplit
from hypergpu.user.training.train import JobSamples, write_job
from hypergpu.workloads.registry import build_for_job, find

X = np.arange(50, dtype=np.float32).reshape(25, 2)
Y = np.arange(25)


class Rows:
    """A dataset as Hugging Face has them: rows by slice, columns by name."""

    column_names = ("x", "y")

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        return {"x": X[rows].tolist(), "y": Y[rows].tolist()}


class Frame:
    """A table as pandas has them."""

    columns = ("x", "y")

    def to_numpy(self) -> None:
        """It is one that has this method."""

    def __getitem__(self, name: str) -> "FrameColumn":
        return FrameColumn({"x": [*X], "y": [*Y]}[name])


class FrameColumn:
    """A column of a table."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """Values, rows as objects."""
        values = np.empty(len(self._values), object)
        values[:] = self._values
        return values if isinstance(self._values[0], np.ndarray) else np.array(self._values)


def write_archive(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write what numpy.savez writes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The same samples in files."""
    write_archive(tmp_path / "all.npz", {"x": X, "y": Y})
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, part in (("a", slice(10)), ("b", slice(10, 25))):
        parquet.write_table(
            pa.table({"x": X[part].tolist(), "y": Y[part]}), folder / f"{name}.parquet"
        )
    return tmp_path


def join_batches(batches: Iterable[Any]) -> list[np.ndarray[Any, Any]]:
    """All samples of each field."""
    batch_list = [*batches]
    return [np.concatenate([each[name] for each in batch_list]) for name in batch_list[0]]


def test_every_form_gives_the_same_samples(files: Path) -> None:
    tensors = (torch.from_numpy(X), torch.from_numpy(Y))
    forms: list[tuple[Any, bool]] = [
        ({"x": X, "y": Y}, False),
        ({"x": tensors[0], "y": Y.tolist()}, False),
        ((X, tensors[1]), True),
        (TensorDataset(*tensors), True),
        ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], False),
        (Rows(), False),
        (Frame(), False),
        (files / "all.npz", False),
        (str(files / "parts"), False),
    ]
    for form, is_tuple in forms:
        source = DataSource(form, "data")
        arrays = join_batches(source.batches())
        assert source.is_tuple == is_tuple
        assert [each.tolist() for each in arrays] == [X.tolist(), Y.tolist()]


def test_a_tenth_is_held_out_where_nothing_is_named(tmp_path: Path) -> None:
    JobSamples((X, Y), None).write(tmp_path)
    fields, train, held_out = read_samples(tmp_path)
    assert [(each.name, each.shape, each.dtype) for each in fields] == [
        ("field_0", (2,), "float32"),
        ("field_1", (), "int64"),
    ]
    held_out_labels = held_out.batch(np.arange(3))[1].tolist()
    assert train is not None
    assert train.count == 22
    both = train.batch(np.arange(22))[1].tolist() + held_out_labels
    assert sorted(both) == Y.tolist()


@pytest.mark.parametrize("period", [10, 20, 200])
def test_classes_in_turn_are_on_both_sides(period: int) -> None:
    labels = (np.arange(6000) % period).astype(np.int64)
    batches = list(DataSource({"x": np.arange(6000.0), "y": labels}, "data").batches())
    split = HeldOutSplit.draw(batches)
    for chosen_batches in (split.train(batches), split.held_out(batches)):
        assert len(np.unique(join_batches(chosen_batches)[1])) == period
    assert split.places.sum() == 600


def test_each_class_of_a_few_samples_is_trained_on() -> None:
    labels = np.repeat(np.arange(300), 3)
    split = HeldOutSplit.draw([{"y": labels}])
    assert set(labels[~split.places]) == set(range(300))
    assert 60 < split.places.sum() < 130


def test_numbers_that_all_differ_are_no_classes() -> None:
    split = HeldOutSplit.draw([{"id": np.arange(500)}])
    assert split.places.sum() == 50


def test_a_folder_that_names_its_parts_is_divided_by_them(tmp_path: Path) -> None:
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 4), ("test", 8)):
        table = pa.table({"x": np.arange(first, first + 4, dtype=np.float32)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    arguments: Any = {"data": tmp_path}
    fields = JobSamples.of(arguments, JobSpec(workload="program")).write(tmp_path / "job")
    assert [each.name for each in fields] == ["x"]
    _, train, held_out = read_samples(tmp_path / "job")
    assert train is not None
    assert train.batch(np.arange(8))[0].tolist() == list(range(8))
    assert held_out.batch(np.arange(4))[0].tolist() == [8, 9, 10, 11]


def write_samples(folder: Path, **fields: np.ndarray[Any, Any]) -> None:
    writer = SampleWriter(folder)
    for part in ("train", "held_out"):
        writer.write_part(part, [fields])
    writer.close()


def test_the_only_field_of_whole_numbers_is_the_class_unless_another_is_named(
    tmp_path: Path,
) -> None:
    write_samples(tmp_path / "one", x=X, y=Y.astype(np.uint8))
    (_, train, _), mask = read_samples(tmp_path / "one"), np.ones((len(Y), 2), np.int64)
    assert train is not None
    assert (train.has_labels, train.labels.tolist()) == (True, Y.tolist())
    write_samples(tmp_path / "two", x=X, y=Y, other=Y[::-1], mask=mask)
    (_, unclear, _), (_, named_samples, _) = (
        read_samples(tmp_path / "two", label) for label in ("", "other")
    )
    assert unclear is not None
    assert named_samples is not None
    assert (unclear.has_labels, set(unclear.labels.tolist())) == (False, {0})
    assert named_samples.labels.tolist() == Y[::-1].tolist()
    for wrong in ("mask", "x", "z"):
        with pytest.raises(SamplesError, match=f"'{wrong}' is no field .*such fields: y, other"):
            read_samples(tmp_path / "two", wrong)


def squares(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    outputs: torch.Tensor = model(batch["x"])
    return outputs.square().mean()


def test_classes_are_skewed_only_where_it_is_clear_which_they_are(tmp_path: Path) -> None:
    skewed_spec = JobSpec("program", data=Data(path=".", sharding="dirichlet"))
    samples = JobSamples({"x": X, "y": Y, "z": Y}, {"x": X, "y": Y, "z": Y})
    with pytest.raises(SamplesError, match=r'Fix: settings=\{"options.label": NAME\}'):
        write_job(tmp_path / "unclear", nn.Linear(2, 1), squares, samples, skewed_spec)
    named_spec = replace(skewed_spec, options={"label": "z"})
    write_job(tmp_path / "named", nn.Linear(2, 1), squares, samples, named_spec)
    workload = build_for_job(find("program"), {"label": "z"}, str(tmp_path / "named"))
    assert workload.load("").train.labels.tolist() == Y.tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "data of type int. Fix: give a dictionary"),
        (iter([{"x": X[0]}]), "can be read only once. Fix: give a list"),
        ({"x": X, "y": Y[:3]}, "arrays of unequal lengths"),
        ("nowhere.npz", "there is no file or folder nowhere.npz"),
        (
            [{"x": np.zeros(2)}, {"x": np.zeros(3)}],
            "field x: sample 1 has shape .3., sample 0 .2.. Fix: pad samples",
        ),
        ({"x": np.array(["a", "b"])}, "cannot be trained on"),
        ([], "there are no samples"),
    ],
)
def test_data_that_cannot_be_used_are_told_with_the_fix(
    given: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SamplesError, match=said):
        SampleWriter(tmp_path).write_part("train", DataSource(given, "data").batches())


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    write_archive(tmp_path / "bad.npz", {"x": np.array([{}], object)})
    with pytest.raises(SamplesError, match="allow_pickle"):
        join_batches(DataSource(tmp_path / "bad.npz", "data").batches())


def test_batches_that_differ_are_told_with_both_shapes(tmp_path: Path) -> None:
    batches = [{"x": X}, {"x": X[:, :1]}]
    with pytest.raises(SamplesError, match=r"x float32\[1\], those before x float32\[2\]"):
        SampleWriter(tmp_path).write_part("train", batches)
