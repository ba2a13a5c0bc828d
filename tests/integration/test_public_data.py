"""Public datasets, downloaded by the daemon's side: its worker has no network."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.workloads.public_data import PublicDatasets

MAKES = "import os, sys; os.mkdir(os.path.join(os.environ['HYPERGPU_DATASETS'], sys.argv[1]))"


def datasets_by(program: str, folder: Path) -> PublicDatasets:
    environment = {**os.environ, "HYPERGPU_DATASETS": str(folder)}
    return PublicDatasets((sys.executable, "-c", program), environment)


async def test_a_missing_dataset_is_downloaded_once_however_often_it_is_asked_for(
    tmp_path: Path,
) -> None:
    datasets = datasets_by(MAKES, tmp_path)
    assert datasets.missing("mnist-cnn") == "mnist"
    assert datasets.missing("digits-cnn") == datasets.missing("another") == ""
    await asyncio.gather(datasets.fetch("mnist-cnn"), datasets.fetch("mnist-cnn"))
    assert datasets.missing("mnist-cnn") == ""
    assert (tmp_path / "mnist").is_dir()


async def test_a_dataset_that_cannot_be_downloaded_says_why(tmp_path: Path) -> None:
    datasets = datasets_by("import sys; sys.exit('no route to host')", tmp_path)
    with pytest.raises(HyperGPUError, match="no route to host"):
        await datasets.fetch("cifar10-vgg11")
    assert not (tmp_path / "cifar10").exists()
