"""CIFAR-10 from its binary version, fetched by torchvision's downloader.

torchvision's own reader takes the "Python version", which is pickled; no object serializer runs in
this project (docs/decisions), and the binary version holds the same images.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from torchvision.datasets.utils import download_and_extract_archive

from hypergpu.workloads.images.store import datasets_folder, stored_dataset
from hypergpu.workloads.workload import ArraySamples, Dataset, DatasetError

_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_IMAGE_BYTES = 3 * 32 * 32


class CifarSource(NamedTuple):
    """Where the archive comes from, with its MD5 sum."""

    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5: str = "c32a1d4ab5d03f1284b67883e8d87530"


OFFICIAL = CifarSource()


def read_cifar10(
    _data_dir: str, *, source: CifarSource = OFFICIAL, root: Path | None = None
) -> Dataset:
    """Images as ``uint8[n, 3, 32, 32]``, downloaded on first use. Raises `DatasetError`."""

    def download(folder: Path) -> None:
        download_and_extract_archive(
            source.url, download_root=str(folder), md5=source.md5, remove_finished=True
        )

    folder = stored_dataset(root or datasets_folder(), "cifar10", download) / _FOLDER
    return Dataset(_samples(folder, _TRAIN), _samples(folder, _TEST))


def _samples(folder: Path, names: tuple[str, ...]) -> ArraySamples:
    try:
        packed = b"".join((folder / name).read_bytes() for name in names)
    except OSError as error:
        raise DatasetError(
            f"{error}. Fix: remove {folder.parent}, it will be downloaded again"
        ) from error
    if not packed or len(packed) % (1 + _IMAGE_BYTES):
        raise DatasetError(f"{folder} holds no whole records. Fix: remove {folder.parent}")
    records = np.frombuffer(packed, dtype=np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
    labels = records[:, 0].astype(np.int64)
    return ArraySamples(records[:, 1:].reshape(-1, 3, 32, 32), labels, labels)
