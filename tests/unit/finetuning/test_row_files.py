"""Which files of a folder are trained on and held out, and rows of every kind of file."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.labels import check_numbers, class_number
from hypergpu.workloads.finetuning.row_files import choose_files
from hypergpu.workloads.finetuning.rows import DataRow, all_rows, read_rows


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(pa.table({"text": [name] * 12}), path)
        else:
            path.write_text("\n".join([json.dumps({"text": name})] * 12), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (
            ["README.md", "LICENSE.txt", "data/train-00000-of-00001.parquet",
             "data/test-00000-of-00001.parquet"],
            ["data/train-00000-of-00001.parquet"],
            ["data/test-00000-of-00001.parquet"],
        ),
        (["train.jsonl", "valid.jsonl", "test.jsonl"], ["train.jsonl"], ["valid.jsonl"]),
        (["TRAIN.JSONL", "Dev.jsonl"], ["TRAIN.JSONL"], ["Dev.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "val/a.jsonl"],
         ["train/a.jsonl", "train/b.jsonl"], ["val/a.jsonl"]),
        (["train_sft-00000-of-00002.parquet", "test_sft-00000-of-00001.parquet"],
         ["train_sft-00000-of-00002.parquet"], ["test_sft-00000-of-00001.parquet"]),
        (["chats.jsonl", "held_out/a.txt"], ["chats.jsonl"], ["held_out/a.txt"]),
        (["chats.jsonl", "README.md", "test_notes.md"], ["chats.jsonl"], []),
        (["dataset_info.json", "chats.jsonl", ".hidden.jsonl"], ["chats.jsonl"], []),
        (["train.txt", "valid.txt", "README.md"], ["train.txt"], ["valid.txt"]),
        (["guide.md", "README.md"], ["README.md", "guide.md"], []),
        (["dev.jsonl"], ["dev.jsonl"], []),
    ],
)  # fmt: skip
def test_files_are_divided_by_the_usual_names(
    tmp_path: Path, names: list[str], train: list[str], held_out: list[str]
) -> None:
    row_files = choose_files(write(tmp_path, *names, "base/config.json"))
    taken_names = (
        [path.relative_to(tmp_path).as_posix() for path in each] for each in row_files[1:3]
    )
    assert list(taken_names) == [train, held_out]


def test_what_was_taken_and_left_is_told(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "test.jsonl", "README.md", "notes.xlsx")
    summary = "trained on train.jsonl; held out test.jsonl; left out README.md, notes.xlsx"
    assert read_rows(tmp_path).files.summary == summary


def test_a_folder_without_rows_names_the_files_that_it_has(tmp_path: Path) -> None:
    write(tmp_path, "train.xlsx")
    with pytest.raises(DatasetError, match=r"needs one; left out train\.xlsx\. Fix: add files"):
        read_rows(tmp_path)


CUBES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TURNED = np.ascontiguousarray(CUBES.transpose(0, 2, 1)).transpose(0, 2, 1)
WITHOUT_FIRST = pa.array(
    [None, CUBES[1].ravel()], pa.fixed_shape_tensor(pa.float32(), (3, 4)).storage_type
)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.FixedShapeTensorArray.from_numpy_ndarray(CUBES), CUBES.tolist()),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(TURNED), CUBES.tolist()),
        (pa.array(CUBES.tolist()), CUBES.tolist()),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.float32(), (3, 4)), WITHOUT_FIRST
            ),
            [None, CUBES[1].tolist()],
        ),
    ],
)
def test_tensors_of_a_parquet_row_keep_their_shape_and_order(
    tmp_path: Path, column: object, wanted: list[object]
) -> None:
    parquet.write_table(pa.table({"text": ["a", "b"], "x": column}), tmp_path / "rows.parquet")
    rows = all_rows(tmp_path).rows
    assert [row.values for row in rows] == [
        {"text": text, "x": cube} for text, cube in zip("ab", wanted, strict=True)
    ]


@pytest.mark.parametrize("classes", [2, 10, 20, 200])
def test_classes_in_turn_are_trained_and_held_out(tmp_path: Path, classes: int) -> None:
    lines = [json.dumps({"text": "a", "label": f"c{n % classes}"}) for n in range(20 * classes)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    row_parts = read_rows(tmp_path)
    for part, count in ((row_parts.train, 18), (row_parts.held_out, 2)):
        counts = Counter(row.values["label"] for row in part)
        assert len(counts) == classes
        assert set(counts.values()) == {count}


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n', ["one", "two"]),
        ("a.json", b'\xef\xbb\xbf[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
        ("a.json", b'{"text": "one"}\n{"text": "two"}', ["one", "two"]),
        ("a.csv", b'\xef\xbb\xbftext,label\r\n"one, two",1\r\nthree,2\r\n', ["one, two", "three"]),
        ("a.CSV", b"text\none\ntwo\n", ["one", "two"]),
    ],
)
def test_files_of_other_editors_are_read(
    tmp_path: Path, name: str, content: bytes, values: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    row_parts = read_rows(tmp_path)
    assert [row.values["text"] for row in (*row_parts.train, *row_parts.held_out)] == values


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"text,label\none\n", r"a\.csv, row 1 has not as many values .* Fix: put"),
        ("a.csv", b'text\n"one" two\n', r"a\.csv, line 2 is no CSV: .* Fix: put values"),
        ("a.json", b'[{"text": 1},', r"a\.json is no JSON: .* Fix: write a list of objects"),
        ("a.jsonl", b'{"text": "a"}\n{', r"a\.jsonl, row 2 is no JSON: .* Fix: write one object"),
    ],
)
def test_files_that_break_off_are_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=said):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("label", "names", "number"),
    [
        (1, "1,2,3,4,5", 0),
        ("5", "1,2,3,4,5", 4),
        (1.0, "1,2,3", 0),
        (1, "negative,positive", 1),
        (1.0, "negative,positive", 1),
        ("0", "negative,positive", 0),
        (True, "negative,positive", 1),
        (True, "true,false", 0),
        ("Positive", "negative,positive", 1),
        (" positive ", "negative,positive", 1),
    ],
)
def test_a_label_is_a_name_before_it_is_a_number(label: object, names: str, number: int) -> None:
    assert class_number("a.jsonl, row 1", label, names.split(",")) == number


@pytest.mark.parametrize(
    ("label", "names", "said"),
    [
        (0, "1,2,3", "has the label '0', and the classes are 1, 2, 3. Fix: set options.labels"),
        (2, "no,yes", "has the label '2', and the classes are no, yes, or their numbers 0 to 1"),
        (None, "no,yes", "has no label, and the classes"),
        (1.5, "no,yes", "has the label '1.5'"),
    ],
)
def test_a_label_of_no_class_is_named(label: object, names: str, said: str) -> None:
    with pytest.raises(DatasetError, match=rf"a\.jsonl, row 1 {said}"):
        class_number("a.jsonl, row 1", label, names.split(","))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2, 3, 4], r"labels are 1, 2, 3, 4 without 0, .* not clear whether .* Fix: give all"),
        ([0, 1, "good"], r"row 0 has the label 0, and other rows have names of classes"),
    ],
)
def test_numbers_that_can_be_read_both_ways_are_refused(labels: list[object], said: str) -> None:
    rows = [DataRow({"label": each}, 0, f"row {place}") for place, each in enumerate(labels)]
    with pytest.raises(DatasetError, match=said):
        check_numbers(rows, ["bad", "poor", "fair", "good", "best"])
    check_numbers(rows[:1], ["no", "yes"])
