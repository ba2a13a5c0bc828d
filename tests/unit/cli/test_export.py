"""A model's way into a safetensors file."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hypergpu.errors import Reason
from hypergpu.tensors.layout import Flat, unpack
from tests.unit.cli import fake_service
from tests.unit.cli.conftest import Hypergpu
from tests.unit.cli.fake_service import JOB, LAYOUT, MODEL, FakeService


def test_safetensors_hold_the_models_tensors_bit_for_bit(
    hypergpu: Hypergpu, tmp_path: Path
) -> None:
    ended = hypergpu("job", "export", "--out", str(tmp_path / "model"))
    assert ended.exit_code == 0, ended.stderr
    loaded = load_file(tmp_path / "model" / "model.safetensors")
    expected = unpack(LAYOUT, Flat.view(LAYOUT, np.frombuffer(MODEL, np.uint8)))
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tobytes() == tensor.tobytes()


def test_broken_transfer_goes_on_where_it_was(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    service.breaks_left = 2
    ended = hypergpu("job", "export", "--out", str(tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert service.offsets == [0, fake_service.CHUNK, 2 * fake_service.CHUNK]


def test_part_of_an_earlier_command_is_used(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    digest = service.jobs[0].model.value.hex()
    (tmp_path / f".{JOB}-latest.part").write_bytes(MODEL[:300])
    (tmp_path / f".{JOB}-latest.digest").write_text(digest, "ascii")
    ended = hypergpu("job", "export", "--out", str(tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert service.offsets == [300]


def test_damaged_model_is_refused_and_not_written(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    digest = service.jobs[0].model.value.hex()
    (tmp_path / f".{JOB}-latest.part").write_bytes(b"x" * 300)
    (tmp_path / f".{JOB}-latest.digest").write_text(digest, "ascii")
    ended = hypergpu("job", "export", "--out", str(tmp_path))
    assert ended.exit_code == Reason.DIGEST_MISMATCH.exit_code
    assert not (tmp_path / "model.safetensors").exists()
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize(("flags", "which"), [([], "latest"), (["--best"], "best")])
def test_which_model_is_the_callers_choice(
    flags: list[str], which: str, service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    hypergpu("job", "export", "--out", str(tmp_path), *flags)
    assert f"ExportModel {which}" in service.called


def test_export_again_replaces_what_the_former_one_left(hypergpu: Hypergpu, tmp_path: Path) -> None:
    for _ in range(2):
        assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_files_of_others_are_not_written_over(
    name: str, service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("mine", "utf-8")
    ended = hypergpu("job", "export", "--out", str(tmp_path))
    assert ended.exit_code == Reason.FILE_PRESENT.exit_code
    assert ended.stderr.startswith(f"error 6009: {tmp_path / name} is there already")
    assert (tmp_path / name).read_text("utf-8") == "mine"
    assert service.offsets == []
    assert hypergpu("job", "export", "--out", str(tmp_path), "--overwrite").exit_code == 0


def test_model_of_another_job_is_not_written_over(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0
    service.jobs[0].job_id = "job-ffffffffffff"
    ended = hypergpu("job", "export", "--out", str(tmp_path))
    assert f"is there already and is {JOB}'s model" in ended.stderr


def test_card_that_was_edited_is_not_written_over(hypergpu: Hypergpu, tmp_path: Path) -> None:
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0
    (tmp_path / "README.md").write_text("# first, with my notes\n", "utf-8")
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 16
