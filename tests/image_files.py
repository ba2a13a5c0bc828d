"""Small data sets in the files that MNIST, CIFAR-10 and folders of images are kept in.

The pixels of each image are its label, so that a network has something to learn.
"""

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

_CIFAR_BYTES = 3 * 32 * 32


def _labels(count: int) -> list[int]:
    return [number % 10 for number in range(count)]


def write_mnist_files(folder: Path, parts: Mapping[str, int]) -> None:
    """IDX files of so many images: images gzipped, labels not."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in parts.items():
        labels = np.array(_labels(count), np.uint8)
        images = np.repeat(labels * 20, 28 * 28).reshape(count, 28, 28)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            extents = b"".join(extent.to_bytes(4, "big") for extent in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + extents + array.tobytes()
            is_packed = array.ndim > 1
            path = folder / f"{part}-{name}-ubyte{'.gz' if is_packed else ''}"
            path.write_bytes(gzip.compress(content) if is_packed else content)


def write_cifar_files(folder: Path, parts: Mapping[str, int], suffix: str) -> None:
    """Batches of so many images, of the binary version (``.bin``) or the Python one."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in parts.items():
        labels = _labels(count)
        if suffix:
            records = [bytes([label]) * (1 + _CIFAR_BYTES) for label in labels]
            (folder / f"{part}{suffix}").write_bytes(b"".join(records))
        else:
            (folder / part).write_bytes(_python_batch(labels))


def _python_batch(labels: list[int]) -> bytes:
    """A dictionary of an array and a list, in the instructions that Python 2 wrote it in."""
    pixels = b"".join(bytes([label]) * _CIFAR_BYTES for label in labels)
    shape = b"K\x01M" + len(labels).to_bytes(2, "little") + b"M" + (3072).to_bytes(2, "little")
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"(" + shape + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelU\x15training batch 1 of 5"
        b"U\x06labels](" + numbers + b"e"
        b"U\x04data" + array + b"U\tfilenames](U\x05a.pngeu."
    )


def write_image_folder(folder: Path, counts: Mapping[str, int], suffix: str) -> None:
    """So many images of each class, in a sub-folder of its name."""
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image = Image.new("RGB", (20 + index, 24), (number * 120, 255 - number * 120, 0))
            image.save(folder / name / f"{index}{suffix}")
