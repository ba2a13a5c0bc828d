"""Public image datasets, fetched with torchvision's own code and kept beside each other."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive

from hypergpu.workloads.datasets import ArraySamples, Dataset, DatasetError
from hypergpu.workloads.networks.image_files import cifar_files, mnist_files


def datasets_folder() -> Path:
    """``HYPERGPU_DATASETS``, or a folder in the user's cache."""
    path_text = os.environ.get("HYPERGPU_DATASETS")
    return Path(path_text) if path_text else Path.home() / ".cache" / "hypergpu" / "datasets"


def stored_dataset(root: Path, name: str, download: Callable[[Path], None]) -> Path:
    """The folder ``root/name``, downloaded when it is not there.

    The download goes to a folder of its own and is renamed into place when it is complete, so that
    a broken one leaves nothing behind and of two at once the first wins.

    Raises:
        DatasetError: The download failed.
    """
    final = root / name
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        download(partial)
        if not final.is_dir():
            _rename_unless_there(partial, final)
    except (URLError, RuntimeError, OSError) as error:
        raise DatasetError(
            f"the {name} dataset could not be downloaded: {error}."
            f" Fix: connect to the internet, or copy it from another machine to {final}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _rename_unless_there(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise


_CIFAR_FOLDER = "cifar-10-batches-bin"
_CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_TEST = ("test_batch.bin",)
_CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_IMAGE_BYTES = 3 * 32 * 32


class CifarSource(NamedTuple):
    """Where the archive comes from, with its MD5 sum."""

    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5: str = "c32a1d4ab5d03f1284b67883e8d87530"


OFFICIAL_CIFAR10 = CifarSource()


def read_cifar10(
    data_dir: str, *, source: CifarSource = OFFICIAL_CIFAR10, root: Path | None = None
) -> Dataset:
    """Images as ``uint8[n, 3, 32, 32]``: the user's, or downloaded on first use.

    Raises:
        DatasetError: They cannot be had.
    """
    if data_dir:
        return cifar_files(data_dir, _CIFAR_CLASSES)

    def download(folder: Path) -> None:
        download_and_extract_archive(
            source.url, download_root=str(folder), md5=source.md5, remove_finished=True
        )

    folder = stored_dataset(root or datasets_folder(), "cifar10", download) / _CIFAR_FOLDER
    train, test = (_cifar_samples(folder, names) for names in (_CIFAR_TRAIN, _CIFAR_TEST))
    return Dataset(train, test, _CIFAR_CLASSES)


def _cifar_samples(folder: Path, names: tuple[str, ...]) -> ArraySamples:
    try:
        content = b"".join((folder / name).read_bytes() for name in names)
    except OSError as error:
        raise DatasetError(
            f"{error}. Fix: remove {folder.parent}, it will be downloaded again"
        ) from error
    if not content or len(content) % (1 + _IMAGE_BYTES):
        raise DatasetError(f"{folder} holds no whole records. Fix: remove {folder.parent}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
    labels = records[:, 0].astype(np.int64)
    return ArraySamples(records[:, 1:].reshape(-1, 3, 32, 32), labels, labels)


class MnistSource(NamedTuple):
    """Where the four gzipped IDX files come from, with their MD5 sums."""

    mirrors: tuple[str, ...] = tuple(datasets.MNIST.mirrors)
    files: tuple[tuple[str, str], ...] = tuple(datasets.MNIST.resources)


OFFICIAL_MNIST = MnistSource()


def read_mnist(
    data_dir: str, *, source: MnistSource = OFFICIAL_MNIST, root: Path | None = None
) -> Dataset:
    """Images as ``uint8[n, 1, 28, 28]``: the user's, or downloaded on first use.

    Raises:
        DatasetError: They cannot be had.
    """
    if data_dir:
        return mnist_files(data_dir)

    class Mnist(datasets.MNIST):  # type: ignore[misc]  # torchvision has no types
        mirrors = source.mirrors
        resources = source.files

        def _check_legacy_exist(self) -> bool:
            return False  # the format before 0.9 is read with an object serializer

    def download(folder: Path) -> None:
        Mnist(folder, download=True)

    folder = stored_dataset(root or datasets_folder(), "mnist", download)
    train, test = (_mnist_samples(Mnist(folder, train=is_train)) for is_train in (True, False))
    return Dataset(train, test)


def _mnist_samples(read: datasets.MNIST) -> ArraySamples:
    labels = read.targets.numpy().astype(np.int64)
    return ArraySamples(read.data.numpy()[:, None], labels, labels)
