"""MNIST and CIFAR-10 out of a user's folder, in the files that they are published and that
torchvision keeps them in. Nothing of a file is run, and no size that it states is trusted.
"""

import gzip
import math
import pickletools  # nosec B403
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.datasets import ArraySamples, Dataset, DatasetError

CLASSES = 10
_IDX_BYTE = 8
_IDX_MOST = 1 << 28
_MNIST_IMAGE = (28, 28)
_IMAGE_BYTES = 3 * 32 * 32
_MNIST_PARTS = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


def mnist_files(data_dir: str) -> Dataset:
    """IDX files anywhere below a folder, gzipped or not: images as ``uint8[n, 1, 28, 28]``.

    Raises:
        DatasetError: A file is missing, or is not what its name says.
    """
    root = Path(data_dir)
    train, test = (_mnist_part(root, *names) for names in _MNIST_PARTS)
    return Dataset(train, test)


def _mnist_part(root: Path, images_name: str, labels_name: str) -> ArraySamples:
    images = _read_idx(_find(root, images_name), _MNIST_IMAGE)
    labels = _read_idx(_find(root, labels_name), ())
    return _samples(root, images[:, None], labels)


def _find(root: Path, name: str) -> Path:
    paths = sorted(path for path in root.rglob(f"{name}*") if path.name in {name, f"{name}.gz"})
    if not paths:
        raise DatasetError(
            f"{root} holds no {name} and no {name}.gz. Fix: put MNIST's four files there"
        )
    return paths[0]


def _read_idx(path: Path, each: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array of a file, of so many bytes each way for one sample."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _idx_array(cast(BinaryIO, file), each)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DatasetError(f"{path} is no IDX file of bytes: {error}. Fix: copy it anew") from None


def _idx_array(file: BinaryIO, each: tuple[int, ...]) -> NDArray[np.uint8]:
    dimensions = 1 + len(each)
    head = file.read(4 + 4 * dimensions)
    if head[:4] != bytes([0, 0, _IDX_BYTE, dimensions]) or len(head) < 4 + 4 * dimensions:
        raise ValueError(f"it does not begin as one of {dimensions} dimensions")
    shape = [int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4)]
    if tuple(shape[1:]) != each:
        sides, right = (" x ".join(map(str, sides)) for sides in (shape[1:], each))
        raise ValueError(f"it has images of {sides}, which must be {right}")
    size = math.prod(shape)
    if size > _IDX_MOST:
        raise ValueError(f"it states {size} bytes")
    content = file.read(size + 1)
    if len(content) != size:
        raise ValueError(f"it states {size} bytes and has others")
    return np.frombuffer(content, np.uint8).reshape(shape)


def cifar_files(data_dir: str, class_names: tuple[str, ...]) -> Dataset:
    """CIFAR-10's batches anywhere below a folder, of its binary or its Python version.

    Images are ``uint8[n, 3, 32, 32]``.

    Raises:
        DatasetError: There are none, or one is not what its name says.
    """
    root = Path(data_dir)
    parts = []
    for pattern in (r"data_batch_\d+(\.bin)?", r"test_batch(\.bin)?"):
        paths = sorted(path for path in root.rglob("*") if re.fullmatch(pattern, path.name))
        if not paths:
            raise DatasetError(
                f"{root} holds no file {pattern.partition('(')[0]}."
                " Fix: unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz there"
            )
        images, labels = zip(*map(_cifar_batch, paths), strict=True)
        parts.append(_samples(root, np.concatenate(images), np.concatenate(labels)))
    train, test = parts
    return Dataset(train, test, class_names)


def _cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        content = path.read_bytes()
        if path.suffix == ".bin":
            if not content or len(content) % (1 + _IMAGE_BYTES):
                raise ValueError("it holds no whole records")
            records = np.frombuffer(content, np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
            return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
        pixels, labels = _python_batch(content)
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is no batch of CIFAR-10: {error}. Fix: copy it anew") from None
    return pixels.reshape(-1, 3, 32, 32), labels


def _python_batch(content: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pixels and labels of a batch of the Python version.

    Its file is a serialised dictionary. It is read as a list of instructions, of which none is
    carried out: the numbers behind the key ``labels``, and the one text as long as so many images.
    """
    labels: list[int] = []
    pixels = b""
    is_labels = False
    for name, argument in _instructions(content):
        if isinstance(argument, str | bytes):
            is_labels = argument in {"labels", b"labels"}
            if len(argument) >= _IMAGE_BYTES:
                pixels = argument.encode("latin-1") if isinstance(argument, str) else argument
        elif is_labels and isinstance(argument, int) and name.startswith("BININT"):
            labels.append(argument)
    if not labels or len(pixels) != len(labels) * _IMAGE_BYTES:
        raise ValueError(f"{len(labels)} labels and {len(pixels)} bytes of images")
    if not all(0 <= label < CLASSES for label in labels):
        raise ValueError("a label is none of ten classes")
    return np.frombuffer(pixels, np.uint8), np.array(labels, np.uint8)


def _instructions(content: bytes) -> Iterator[tuple[str, object]]:
    for instruction, argument, _ in pickletools.genops(content):
        yield instruction.name, argument


def _samples(
    root: Path, images: NDArray[np.uint8], found_labels: NDArray[np.uint8]
) -> ArraySamples:
    labels = found_labels.astype(np.int64)
    if not len(labels) or len(images) != len(labels) or labels.max() >= CLASSES:
        raise DatasetError(
            f"{root} has {len(images)} images and {len(labels)} labels, which must be as many, of"
            " ten classes. Fix: copy the files anew"
        )
    return ArraySamples(images, labels, labels)
