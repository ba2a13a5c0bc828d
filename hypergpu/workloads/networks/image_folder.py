"""Images in folders, one for each class, as samples of one size."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torchvision import datasets

from hypergpu.partitions import permutation
from hypergpu.units import are, several
from hypergpu.workloads.datasets import NO_SAMPLES, Array, Dataset, DatasetError, NodeDataError
from hypergpu.workloads.networks.image_decoding import ImageForm, decode_image

_SPLIT_SEED = 20_261_120
_TEST_SHARE = 10  # one in ten


class Pictures:
    """Image files with their classes. Implements `SampleSource`."""

    def __init__(self, paths: list[str], labels: NDArray[np.int64], form: ImageForm) -> None:
        self._paths = paths
        self._labels = labels
        self._form = form

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class numbers."""
        return self._labels

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """``uint8[b, channels, height, width]`` of the form, and class numbers."""
        images = np.stack([decode_image(self._paths[index], self._form) for index in indices])
        return images, self._labels[indices]


_HELD_OUT_FOLDERS = ("val", "validation", "valid", "dev", "test", "testing", "held_out")
"""Folders beside ``train``; the first that is there is held out."""


def read_folder(data_dir: str, *, classes: Sequence[str] | int, form: ImageForm) -> Dataset:
    """Images below ``data_dir``.

    ``train`` and ``val`` (or ``test``) sub-folders are taken as they are; otherwise a tenth of each
    class is held out, the same on every machine.

    Args:
        data_dir: The folder.
        classes: Their names, or how many there are.
        form: What images become.

    Raises:
        DatasetError: There are no images, or not the stated classes on both sides.
    """
    if not data_dir:
        raise DatasetError(
            "this workload trains on your images. Fix: set data.path to their folder"
        )
    root = Path(data_dir)
    held_out = next((root / name for name in _HELD_OUT_FOLDERS if (root / name).is_dir()), None)
    if (root / "train").is_dir() and held_out is not None:
        train = _find_images(root / "train", classes)
        _check_sides(held_out, train.class_names)
        test = _find_images(held_out, train.class_names)
    else:
        train, test = _split(_find_images(root, classes))
    return Dataset(
        Pictures(train.paths, train.labels, form),
        Pictures(test.paths, test.labels, form),
        train.class_names,
    )


def held_out_folder(data_dir: str, *, classes: Sequence[str] | int, form: ImageForm) -> Dataset:
    """All images below ``data_dir``, held out. Raises `DatasetError` as `read_folder`."""
    images = _find_images(Path(data_dir), classes)
    return Dataset(NO_SAMPLES, Pictures(images.paths, images.labels, form), images.class_names)


def node_pictures(
    data_dir: str, node_dir: str, *, form: ImageForm, classes: Sequence[str] = ()
) -> Pictures:
    """All images of a node's own folder, which may lack classes of the job's held-out images.

    Args:
        data_dir: The job's folder.
        node_dir: The node's own.
        form: What images become.
        classes: Names of the classes in the order of their numbers; empty: the job's sub-folders.

    Raises:
        NodeDataError: It has sub-folders that are none of these classes.
    """
    names, there = [*classes] or _sub_folders(data_dir), _sub_folders(node_dir)
    if unknown_count := len(set(there) - set(names)):
        raise NodeDataError(
            f"{several(unknown_count, 'sub-folder')} {are(unknown_count)} none of the job's"
            f" classes, which are {', '.join(names)}. Fix: rename or remove them"
        )
    samples = datasets.folder.make_dataset(
        node_dir,
        {name: number for number, name in enumerate(names) if name in there},
        extensions=datasets.folder.IMG_EXTENSIONS,
        allow_empty=True,
    )
    labels = np.array([label for _, label in samples], dtype=np.int64)
    return Pictures([path for path, _ in samples], labels, form)


def _sub_folders(folder: str | Path) -> list[str]:
    return sorted(
        each.name for each in os.scandir(folder) if each.is_dir() and not each.name.startswith(".")
    )


class _Found(NamedTuple):
    paths: list[str]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]


def _check_sides(held_out: Path, names: Sequence[str]) -> None:
    """Refuse held-out images of other classes than those that are trained on."""
    there = _sub_folders(held_out)
    sides = [
        f"{side} lacks {', '.join(absent_names)}"
        for side, absent_names in (
            (held_out.name, sorted(set(names) - set(there))),
            ("train", sorted(set(there) - set(names))),
        )
        if absent_names
    ]
    if sides:
        raise DatasetError(
            f"train and {held_out.name} in {held_out.parent.name} have other classes:"
            f" {' and '.join(sides)}. Fix: give both the same sub-folders"
        )


def _find_images(folder: Path, classes: Sequence[str] | int) -> _Found:
    try:
        names = _sub_folders(folder)
    except OSError as error:
        raise DatasetError(
            f"{folder} cannot be read: {error.strerror}."
            " Fix: put one sub-folder of images a class there"
        ) from error
    _check_classes(folder, names, classes)
    if not isinstance(classes, int):
        names = list(classes)
    numbers = {name: number for number, name in enumerate(names)}
    samples = datasets.folder.make_dataset(
        str(folder), numbers, extensions=datasets.folder.IMG_EXTENSIONS, allow_empty=True
    )
    labels = np.array([label for _, label in samples], dtype=np.int64)
    if empty := [name for name in names if numbers[name] not in labels]:
        raise DatasetError(
            f"{folder}/{empty[0]} holds no image. Fix: put images ending in"
            f" {', '.join(datasets.folder.IMG_EXTENSIONS)} there"
        )
    return _Found([path for path, _ in samples], labels, tuple(names))


def _check_classes(folder: Path, names: Sequence[str], classes: Sequence[str] | int) -> None:
    if not names:
        raise DatasetError(
            f"{folder} has no sub-folders. Fix: put one sub-folder of images a class there"
        )
    if isinstance(classes, int):
        if len(names) != classes:
            raise DatasetError(
                f"{folder} holds {len(names)} classes and options.classes is {classes}."
                f" Fix: set options.classes to {len(names)}"
            )
    elif sorted(classes) != list(names):
        raise DatasetError(
            f"the sub-folders of {folder.name} are {', '.join(names)} and options.labels"
            f' {", ".join(classes)}. Fix: set options.labels = "{",".join(names)}"'
        )


def _split(found: _Found) -> tuple[_Found, _Found]:
    labels = found.labels
    is_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = permutation(_SPLIT_SEED, int(label), 0, len(members))
        is_test[members[order[: max(len(members) // _TEST_SHARE, 1)]]] = True
        if len(members) == 1:
            raise DatasetError(
                f"the class {found.class_names[label]} has one image, and one is held out."
                " Fix: add a second"
            )
    parts = (np.flatnonzero(~is_test), np.flatnonzero(is_test))
    train, test = (
        found._replace(paths=[found.paths[index] for index in part], labels=labels[part])
        for part in parts
    )
    return train, test
