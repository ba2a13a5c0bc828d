"""MNIST through torchvision's reader and downloader."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision import datasets

from hypergpu.workloads.images.store import datasets_folder, stored_dataset
from hypergpu.workloads.workload import ArraySamples, Dataset


class MnistSource(NamedTuple):
    """Where the four gzipped IDX files come from, with their MD5 sums."""

    mirrors: tuple[str, ...] = tuple(datasets.MNIST.mirrors)
    files: tuple[tuple[str, str], ...] = tuple(datasets.MNIST.resources)


OFFICIAL = MnistSource()


def read_mnist(
    _data_dir: str, *, source: MnistSource = OFFICIAL, root: Path | None = None
) -> Dataset:
    """Images as ``uint8[n, 1, 28, 28]``, downloaded on first use. Raises `DatasetError`."""

    class Mnist(datasets.MNIST):  # type: ignore[misc]  # torchvision has no types
        mirrors = source.mirrors
        resources = source.files

        def _check_legacy_exist(self) -> bool:
            return False  # the format before 0.9 is read with an object serializer

    def download(folder: Path) -> None:
        Mnist(folder, download=True)

    folder = stored_dataset(root or datasets_folder(), "mnist", download)
    return Dataset(*(_samples(Mnist(folder, train=is_train)) for is_train in (True, False)))


def _samples(read: datasets.MNIST) -> ArraySamples:
    labels = read.targets.numpy().astype(np.int64)
    return ArraySamples(read.data.numpy()[:, None], labels, labels)
