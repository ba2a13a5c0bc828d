from pathlib import Path

import numpy as np
import pytest

from hypergpu.workloads.text import text_blocks
from hypergpu.workloads.workload import DatasetError


def write_text(folder: Path, files: int = 4, file_bytes: int = 200_000) -> None:
    for number in range(files):
        (folder / f"part-{number}").mkdir(parents=True)
        line = f"line of part {number}\n".encode()
        (folder / f"part-{number}" / "a.txt").write_bytes(line * (file_bytes // len(line)))
        (folder / f"part-{number}" / "a.bin").write_bytes(bytes(1000))


def test_targets_are_the_inputs_moved_on_by_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    inputs, targets = text_blocks(str(tmp_path), 32, 0).train.batch(np.array([0, 5]))
    assert inputs.shape == targets.shape == (2, 32)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0]).startswith(b"line of part 0\n")


def test_about_a_twentieth_is_held_out(tmp_path: Path) -> None:
    write_text(tmp_path)
    dataset = text_blocks(str(tmp_path), 32, 0)
    share = len(dataset.test.labels) / (len(dataset.test.labels) + len(dataset.train.labels))
    assert 0.03 < share < 0.07


def test_no_training_block_reaches_into_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(i // (16 << 10) % 256 for i in range(600 << 10)))
    dataset = text_blocks(str(tmp_path), 100, 0)
    inputs, targets = dataset.train.batch(np.arange(len(dataset.train.labels)))
    held_out = {run for run in range(38) if run % 20 == 19}
    assert not held_out & set(np.unique(inputs)) | held_out & set(np.unique(targets))


def test_the_corpus_is_cut_where_the_option_says(tmp_path: Path) -> None:
    write_text(tmp_path)
    dataset = text_blocks(str(tmp_path), 32, 400_000)
    blocks = len(dataset.train.labels) + len(dataset.test.labels)
    assert 380_000 < blocks * 32 <= 400_000


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DatasetError, match="holds 5 bytes of text; at least 327680 are needed"):
        text_blocks(str(tmp_path), 64, 0)
