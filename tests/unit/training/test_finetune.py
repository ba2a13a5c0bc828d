"""What `hypergpu.finetune` makes of a base and rows before anything is sent."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from benchmarks.ours.workloads.base_kinds import ALL
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.training.bases import find_base, link_base
from hypergpu.user.training.finetune import check_job, write_parts, write_rows
from hypergpu.workloads.finetuning.rows import read_rows


def test_rows_in_memory_and_in_files_become_parts_of_the_job(tmp_path: Path) -> None:
    kept_file = tmp_path / "kept.txt"
    kept_file.write_text("held out", encoding="utf-8")
    job = tmp_path / "job"
    job.mkdir()
    write_rows(job, "train", [{"text": "one"}, {"text": "two"}])
    write_rows(job, "held_out", kept_file)
    row_parts = read_rows(job)
    assert [row.values["text"] for row in row_parts.train] == ["one", "two"]
    assert [row.values["text"] for row in row_parts.held_out] == ["held out"]


def test_a_base_is_linked_without_code(tmp_path: Path) -> None:
    base = tmp_path / "model"
    base.mkdir()
    for name in ("config.json", "model.safetensors", "own.py", "pytorch_model.bin"):
        (base / name).write_text("{}", encoding="utf-8")
    link_base(find_base(base, allow_hub=False), tmp_path)
    names = sorted(path.name for path in (tmp_path / "base").iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_a_base_of_the_hub_is_not_downloaded_unasked() -> None:
    with pytest.raises(HyperGPUError) as failure:
        find_base("nobody/nothing-of-this-name", allow_hub=False)
    assert failure.value.fix == "give a folder, or allow_hub=True to download it"


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


def job_of(base: str, job: Path, **options: Any) -> JobSpec:
    """Save a small base as a job's folder has it; gives the job's settings."""
    kind = {each.name: each for each in ALL}[base]
    kind.save(job / "base")
    return JobSpec(workload=kind.workload, options={"sequence_length": 64, **options})


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"question": "w1"}] * 2, {}, "has the fields question. Fix: give text, or prompt"),
        ([{"text": "w1 w2"}] * 2, {"sequence_length": 4096}, "the base takes 128 tokens. Fix: set"),
        (
            [{"messages": [{"role": "user", "content": "w1"}]}] * 2,
            {},
            "the chat template refuses it",
        ),
    ],
)
def test_base_rows_and_template_are_checked_before_anything_is_sent(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], said: str
) -> None:
    spec = job_of("Llama", tmp_path, **options)
    write_parts(tmp_path, spec.workload, rows, None)
    with pytest.raises(HyperGPUError, match=said):
        check_job(tmp_path, spec)
    (tmp_path / "train.jsonl").write_text('{"text": "w1 w2"}\n' * 3, encoding="utf-8")
    check_job(tmp_path, replace(spec, options={"sequence_length": 64}))


def test_a_folder_with_splits_becomes_both_parts(tmp_path: Path) -> None:
    source, job = tmp_path / "source", tmp_path / "job"
    source.mkdir()
    job.mkdir()
    for name in ("train.jsonl", "test.jsonl", "README.md"):
        (source / name).write_text(json.dumps({"text": name}), encoding="utf-8")
    write_parts(job, "hf-causal-lm", source, None)
    row_parts = read_rows(job)
    assert [row.values["text"] for row in row_parts.train] == ["train.jsonl"]
    assert [row.values["text"] for row in row_parts.held_out] == ["test.jsonl"]


def test_images_are_sent_and_checked_too(tmp_path: Path) -> None:
    pictures, job = tmp_path / "pictures", tmp_path / "job"
    for name, grey in (("dark", 20), ("light", 200)):
        (pictures / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (8, 8), (grey, grey, grey)).save(pictures / name / f"{number}.png")
    kind = {each.name: each for each in ALL}["ViT"]
    kind.save(job / "base")
    write_parts(job, kind.workload, pictures, None)
    spec = JobSpec(workload=kind.workload, options={"labels": "dark,light"})
    check_job(job, spec)
    with pytest.raises(HyperGPUError, match="sub-folders of images are dark, light and") as failure:
        check_job(job, replace(spec, options={"labels": "dark,grey"}))
    assert failure.value.fix == 'set options.labels = "dark,light"'
    (pictures / "dark" / "0.png").write_bytes(b"no image")
    (pictures / "dark" / "1.png").write_bytes(b"no image")
    (pictures / "dark" / "2.png").write_bytes(b"no image")
    with pytest.raises(HyperGPUError, match=r"\.png is no image that can be read"):
        check_job(job, spec)
    with pytest.raises(HyperGPUError, match="data of an image classifier are list"):
        write_parts(tmp_path / "other", kind.workload, [1], None)
