"""Public datasets, downloaded by the daemon's side: its worker has no network."""

import asyncio
import sys
from pathlib import Path

import pytest

from gpu_node.shell.public_data import PublicDatasets
from hypergpu.errors import HyperGPUError

MAKES = "import os, sys; os.mkdir(os.path.join(os.environ['HYPERGPU_DATASETS'], sys.argv[1]))"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYPERGPU_DATASETS", str(tmp_path))
    return tmp_path


async def test_a_missing_dataset_is_downloaded_once_however_often_it_is_asked_for(
    folder: Path,
) -> None:
    datasets = PublicDatasets((sys.executable, "-c", MAKES))
    assert datasets.missing("mnist-cnn") == "mnist"
    assert datasets.missing("digits-cnn") == datasets.missing("another") == ""
    await asyncio.gather(datasets.fetch("mnist-cnn"), datasets.fetch("mnist-cnn"))
    assert datasets.missing("mnist-cnn") == ""
    assert (folder / "mnist").is_dir()


async def test_a_dataset_that_cannot_be_downloaded_says_why(folder: Path) -> None:
    datasets = PublicDatasets((sys.executable, "-c", "import sys; sys.exit('no route to host')"))
    with pytest.raises(HyperGPUError, match="no route to host"):
        await datasets.fetch("cifar10-vgg11")
    assert not (folder / "cifar10").exists()
