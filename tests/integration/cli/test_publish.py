"""`hypergpu job publish` against a stand-in of the hub's HTTP API."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.hub_server import TOKEN, HubServer, hub_server


def publish(server: HubServer, folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "hypergpu.user.cli",
        "job",
        "publish",
        str(folder),
        "you/model",
    ]
    return subprocess.run(
        [*command, "--private", "--license", "apache-2.0", "--base-model", "them/base"],
        check=False,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "HF_ENDPOINT": server.address,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": token,
        },
    )


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A merged model with its card, and a file that is none of its."""
    save_file({"weight": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "notes.pdf").write_text("mine", encoding="utf-8")
    card = "---\nlibrary_name: transformers\n---\n\n# Chats\n"
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    return tmp_path


def test_an_export_is_one_commit_with_a_card_that_the_hub_reads(export: Path) -> None:
    with hub_server() as server:
        process = publish(server, export, TOKEN)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == f"{server.address}/you/model"
    assert server.repositories[0]["visibility"] == "private"
    assert set(server.files) == {"README.md", "config.json", "model.safetensors"}
    assert server.files["model.safetensors"] == (export / "model.safetensors").read_bytes()
    card = server.files["README.md"].decode()
    for line in ("library_name: transformers", "license: apache-2.0", "base_model: them/base"):
        assert line in card.split("---")[1]
    assert "# Chats" in card


def test_a_hub_that_refuses_is_told_in_one_sentence(export: Path) -> None:
    with hub_server() as server:
        process = publish(server, export, "hf_wrong")
    assert process.returncode != 0
    assert "the hub did not take you/model" in process.stderr
    assert "hf auth login" in process.stderr
    assert "Traceback" not in process.stderr
    assert "hf_wrong" not in process.stderr
    assert server.files == {}
