"""What an exported adapter names its base by: never a path of the machine that exported it."""

import json
from pathlib import Path

import pytest

from hypergpu.user.training.bases import hub_name, link_base
from hypergpu.workloads.finetuning.export import base_name


def base_at(folder: Path, settings: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_base_of_the_hubs_cache_keeps_its_name_through_the_jobs_folder(tmp_path: Path) -> None:
    cached_base = base_at(tmp_path / "hub" / "models--some--model-1b" / "snapshots" / "abc", {})
    assert hub_name(cached_base) == "some/model-1b"
    assert hub_name(tmp_path / "models--gpt2" / "snapshots" / "abc") == "gpt2"
    job = tmp_path / "job"
    job.mkdir()
    link_base(cached_base, job)
    assert base_name(job / "base") == "some/model-1b"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"_name_or_path": "some/model-1b"}, "some/model-1b"),
        ({"_name_or_path": "/home/me/models/mine"}, "base"),
        ({"_name_or_path": "../models/mine"}, "base"),
        ({"_name_or_path": ""}, "base"),
        ({}, "base"),
        ([], "base"),
    ],
)
def test_a_folders_settings_tell_a_name_on_the_hub_and_no_path(
    settings: object, name: str, tmp_path: Path
) -> None:
    folder = base_at(tmp_path / "mine", settings)
    job = tmp_path / "job"
    job.mkdir()
    link_base(folder, job)
    assert base_name(job / "base") == name
