"""A folder of images, one sub-folder a class, decoded when a batch asks for them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision import datasets

from hypergpu.dataset.sampling import permutation
from hypergpu.workloads.workload import Array, Dataset, DatasetError

_SPLIT_SEED = 20_261_120
_TEST_SHARE = 10  # one in ten


class Pictures:
    """Image files with their classes. Implements `Samples`."""

    def __init__(self, paths: list[str], labels: NDArray[np.int64], image_size: int) -> None:
        self._paths = paths
        self._labels = labels
        self._image_size = image_size

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class numbers, in the alphabetical order of the sub-folders."""
        return self._labels

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """``uint8[b, 3, size, size]``: the largest middle square of each image, resized."""
        images = np.stack([self._decode(self._paths[index]) for index in indices])
        return images, self._labels[indices]

    def _decode(self, path: str) -> NDArray[np.uint8]:
        try:
            with Image.open(path) as image:
                square = min(image.size)
                left, top = (image.width - square) // 2, (image.height - square) // 2
                part = image.convert("RGB").crop((left, top, left + square, top + square))
        except (OSError, Image.DecompressionBombError) as error:
            raise DatasetError(
                f"{path} is not an image: {error}. Fix: remove or replace it"
            ) from error
        side = self._image_size
        return np.asarray(part.resize((side, side), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


def read_folder(data_dir: str, *, classes: int, image_size: int) -> Dataset:
    """Images below ``data_dir``.

    ``train`` and ``val`` (or ``test``) sub-folders are taken as they are; otherwise a tenth of each
    class is held out, the same on every machine.

    Raises:
        DatasetError: There are no images, or not the stated number of classes.
    """
    if not data_dir:
        raise DatasetError(
            "this workload trains on your images. Fix: set data.path to their folder"
        )
    root = Path(data_dir)
    held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if (root / "train").is_dir() and held_out is not None:
        train, test = _find_images(root / "train", classes), _find_images(held_out, classes)
    else:
        train, test = _split(*_find_images(root, classes))
    return Dataset(Pictures(*train, image_size), Pictures(*test, image_size))


_Found = tuple[list[str], NDArray[np.int64]]


def _find_images(folder: Path, classes: int) -> _Found:
    try:
        listing = datasets.ImageFolder(str(folder))
    except (FileNotFoundError, OSError) as error:
        raise DatasetError(f"{error}. Fix: one sub-folder of images a class in {folder}") from error
    if len(listing.classes) != classes:
        raise DatasetError(
            f"{folder} holds {len(listing.classes)} classes and options.classes is {classes}."
            f" Fix: set options.classes to {len(listing.classes)}"
        )
    paths = [path for path, _ in listing.samples]
    return paths, np.array([label for _, label in listing.samples], dtype=np.int64)


def _split(paths: list[str], labels: NDArray[np.int64]) -> tuple[_Found, _Found]:
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = permutation(_SPLIT_SEED, int(label), 0, len(members))
        is_test[members[order[: max(len(members) // _TEST_SHARE, 1)]]] = True
    if is_test.all():
        raise DatasetError("a class needs at least two images. Fix: add images")
    parts = (np.flatnonzero(~is_test), np.flatnonzero(is_test))
    train, test = ([paths[index] for index in part] for part in parts)
    return (train, labels[parts[0]]), (test, labels[parts[1]])
