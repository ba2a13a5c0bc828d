"""Image datasets, fetched with torchvision's own code or read from a folder, and torchvision's
networks fitted to them.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision import datasets
from torchvision.datasets.utils import download_and_extract_archive
from torchvision.models import resnet18, vgg11_bn

from hypergpu.dataset import permutation
from hypergpu.units import are, several
from hypergpu.workloads.datasets import (
    NO_SAMPLES,
    Array,
    ArraySamples,
    Dataset,
    DatasetError,
    NodeDataError,
)
from hypergpu.workloads.entry import Options
from hypergpu.workloads.networks.image_decoding import ImageForm, decode_image
from hypergpu.workloads.networks.image_files import cifar_files, mnist_files
from hypergpu.workloads.networks.task import Classification
from hypergpu.workloads.node_data import NodeDataReaders


def datasets_folder() -> Path:
    """``HYPERGPU_DATASETS``, or a folder in the user's cache."""
    named = os.environ.get("HYPERGPU_DATASETS")
    return Path(named) if named else Path.home() / ".cache" / "hypergpu" / "datasets"


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


_SPLIT_SEED = 20_261_120
_TEST_SHARE = 10  # one in ten


class Pictures:
    """Image files with their classes. Implements `Samples`."""

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
    found = _find_images(Path(data_dir), classes)
    return Dataset(NO_SAMPLES, Pictures(found.paths, found.labels, form), found.class_names)


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
    if unknown := len(set(there) - set(names)):
        raise NodeDataError(
            f"{several(unknown, 'sub-folder')} {are(unknown)} none of the job's classes, which"
            f" are {', '.join(names)}. Fix: rename or remove them"
        )
    found = datasets.folder.make_dataset(
        node_dir,
        {name: number for number, name in enumerate(names) if name in there},
        extensions=datasets.folder.IMG_EXTENSIONS,
        allow_empty=True,
    )
    labels = np.array([label for _, label in found], dtype=np.int64)
    return Pictures([path for path, _ in found], labels, form)


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
        f"{side} lacks {', '.join(lacking)}"
        for side, lacking in (
            (held_out.name, sorted(set(names) - set(there))),
            ("train", sorted(set(there) - set(names))),
        )
        if lacking
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
    found = datasets.folder.make_dataset(
        str(folder), numbers, extensions=datasets.folder.IMG_EXTENSIONS, allow_empty=True
    )
    labels = np.array([label for _, label in found], dtype=np.int64)
    if empty := [name for name in names if numbers[name] not in labels]:
        raise DatasetError(
            f"{folder}/{empty[0]} holds no image. Fix: put images ending in"
            f" {', '.join(datasets.folder.IMG_EXTENSIONS)} there"
        )
    return _Found([path for path, _ in found], labels, tuple(names))


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


_IMAGENET_SIDE = 96
"""From this size on, the networks keep the first layers they have for ImageNet."""


def _resnet18(classes: int, image_size: int) -> nn.Module:
    model: nn.Module = resnet18(num_classes=classes)
    if image_size < _IMAGENET_SIDE:
        # He et al. 2016 (section 4.2): small images lose too much in the 7 x 7 stride and the
        # pooling.
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def _vgg11(classes: int, image_size: int) -> nn.Module:
    model: nn.Module = vgg11_bn(num_classes=classes)
    if image_size < _IMAGENET_SIDE:
        # Five poolings leave one place, for which the 120M weights of the ImageNet head are
        # pointless.
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Linear(512, classes)
    return model


def _normalise(images: Tensor) -> Tensor:
    """``uint8`` grey values to about [-2, 2]."""
    return (images.float() - 127.5) / 64


def _shifted_and_mirrored(images: Tensor) -> Tensor:
    """Each image moved by up to an eighth and mirrored half of the time, drawn from torch's
    generator.
    """
    batch, _, side, _ = images.shape
    reach = max(side // 8, 1)
    padded = nn.functional.pad(images, (reach, reach, reach, reach))
    drawn = torch.randint(0, 2 * reach + 1, (batch, 2))
    is_mirrored = torch.rand(batch) < 0.5
    moved = [
        padded[i, :, y : y + side, x : x + side].flip(2)
        if is_mirrored[i]
        else padded[i, :, y : y + side, x : x + side]
        for i, (y, x) in enumerate(drawn.tolist())
    ]
    return torch.stack(moved)


def drawn_images(images: Array) -> Array:
    """``uint8[b, channels, height, width]`` as images for people."""
    return images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)


def _augmentation(options: Options) -> partial[Tensor] | None:
    return partial(_shifted_and_mirrored) if options["augment"] else None


def mnist_cnn(options: Options) -> Classification:
    """Builder of ``mnist-cnn``: three convolutions, group normalisation and a hidden layer."""
    channels = int(options["channels"])

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2, stride=2),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * channels),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, 10),
        )

    return Classification(make, read_mnist, prepare=_normalise, draw=drawn_images)


def cifar10_resnet18(options: Options) -> Classification:
    """Builder of ``cifar10-resnet18``."""
    make = partial(_resnet18, 10, 32)
    return Classification(
        make, read_cifar10, prepare=_normalise, augment=_augmentation(options), draw=drawn_images
    )


def cifar10_vgg11(options: Options) -> Classification:
    """Builder of ``cifar10-vgg11``."""
    make = partial(_vgg11, 10, 32)
    return Classification(
        make, read_cifar10, prepare=_normalise, augment=_augmentation(options), draw=drawn_images
    )


def _folder(options: Options, network: str) -> Classification:
    classes, image_size = int(options["classes"]), int(options["image_size"])
    make = partial(_resnet18 if network == "resnet18" else _vgg11, classes, image_size)
    form = ImageForm(image_size, image_size)
    node_data = NodeDataReaders(
        partial(held_out_folder, classes=classes, form=form),
        partial(node_pictures, form=form),
    )
    return Classification(
        make,
        partial(read_folder, classes=classes, form=form),
        prepare=_normalise,
        augment=_augmentation(options),
        draw=drawn_images,
        node_data=node_data,
    )


def folder_resnet18(options: Options) -> Classification:
    """Builder of ``imagefolder-resnet18``."""
    return _folder(options, "resnet18")


def folder_vgg11(options: Options) -> Classification:
    """Builder of ``imagefolder-vgg11``."""
    return _folder(options, "vgg11")
