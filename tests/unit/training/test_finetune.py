"""What `hypergpu.finetune` makes of a base and rows before anything is sent."""

import json
from pathlib import Path
from typing import Any

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.training.finetune import find_base, link_base, write_rows
from hypergpu.workloads.finetuning.rows import read_rows


def test_rows_in_memory_and_in_files_become_parts_of_the_job(tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("held out", encoding="utf-8")
    job = tmp_path / "job"
    job.mkdir()
    write_rows(job, "train", [{"text": "one"}, {"text": "two"}])
    write_rows(job, "held_out", kept)
    found = read_rows(job)
    assert [row.values["text"] for row in found.train] == ["one", "two"]
    assert [row.values["text"] for row in found.held_out] == ["held out"]


def test_a_base_is_linked_without_code(tmp_path: Path) -> None:
    base = tmp_path / "model"
    base.mkdir()
    for name in ("config.json", "model.safetensors", "own.py", "pytorch_model.bin"):
        (base / name).write_text("{}", encoding="utf-8")
    link_base(find_base(base, allow_hub=False), tmp_path)
    found = sorted(path.name for path in (tmp_path / "base").iterdir())
    assert found == ["config.json", "model.safetensors"]


def test_a_base_of_the_hub_is_not_downloaded_unasked() -> None:
    with pytest.raises(HyperGPUError) as refused:
        find_base("nobody/nothing-of-this-name", allow_hub=False)
    assert refused.value.fix == "give a folder, or allow_hub=True to download it"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (7, "rows of type int"),
        ({"text": ["a"]}, "rows of type dict"),
        ([{"text": object()}], "a row is no JSON"),
        ("absent", "holds no rows"),
    ],
)
def test_rows_of_no_known_kind_are_told(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(HyperGPUError, match=said):
        write_rows(tmp_path, "train", rows)


def test_the_example_has_rows() -> None:
    path = Path(__file__).parents[3] / "examples/finetune/chats/train.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert all([each["role"] for each in row["messages"]] == ["user", "assistant"] for row in rows)
