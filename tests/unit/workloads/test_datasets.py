"""Data of the workloads: digits, images fetched from mirrors, text."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hypergpu.partitions import CLASSES_MAX, Sharding, partition_indices
from hypergpu.workloads.datasets import ArraySamples, DatasetError, all_finite
from hypergpu.workloads.digits import DigitsSoftmax, digits
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.image_data import (
    CifarSource,
    MnistSource,
    read_cifar10,
    read_mnist,
)
from hypergpu.workloads.networks.image_decoding import ImageForm
from hypergpu.workloads.networks.image_folder import read_folder
from hypergpu.workloads.networks.text_blocks import text_blocks
from tests.image_files import write_cifar_files, write_mnist_files


def as_sets() -> tuple[ArraySamples, ArraySamples]:
    dataset = digits()
    assert isinstance(dataset.train, ArraySamples)
    assert isinstance(dataset.test, ArraySamples)
    return dataset.train, dataset.test


def rows(samples: ArraySamples) -> set[bytes]:
    return {row.tobytes() for row in samples.inputs}


def test_they_are_the_digits_that_scikit_learn_ships() -> None:
    from sklearn.datasets import load_digits

    train, test = as_sets()
    pixels, labels = load_digits(return_X_y=True)
    ours = np.concatenate([train.inputs, test.inputs]) * 16
    joined_rows = np.column_stack([ours, np.concatenate([train.targets, test.targets])])
    theirs = np.column_stack([pixels, labels])
    np.testing.assert_array_equal(np.unique(joined_rows, axis=0), np.unique(theirs, axis=0))


def test_no_image_is_both_trained_on_and_held_out() -> None:
    train, test = as_sets()
    assert len(train.targets) + len(test.targets) == 1797
    assert not rows(train) & rows(test)


def test_every_digit_has_its_fifth_held_out() -> None:
    train, test = as_sets()
    shares = np.bincount(test.targets) / (np.bincount(test.targets) + np.bincount(train.targets))
    assert 0.19 < shares.min() <= shares.max() <= 0.2


def test_the_softmax_gradient_is_the_slope_of_its_loss() -> None:
    workload = DigitsSoftmax()
    inputs, targets = workload.load("").train.batch(np.arange(20))
    draw = np.random.Philox(key=1).random_raw(650) / 2.0**64 - 0.5
    parameters = {
        "bias": draw[:10].astype(np.float32),
        "weight": draw[10:].reshape(64, 10).astype(np.float32),
    }
    _, gradient = workload.gradient(parameters, inputs, targets)
    for name, place in (("bias", (3,)), ("weight", (20, 7))):
        losses = []
        for step in (-1e-2, 1e-2):
            moved_parameters = {key: array.copy() for key, array in parameters.items()}
            moved_parameters[name][place] += step
            losses.append(workload.gradient(moved_parameters, inputs, targets)[0])
        assert abs((losses[1] - losses[0]) / 2e-2 - gradient[name][place]) < 1e-3


class QuietHandler(SimpleHTTPRequestHandler):
    """A mirror that keeps no log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        return


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address where a real HTTP server offers it."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """An array in the gzipped IDX format of MNIST."""
    extents = b"".join(extent.to_bytes(4, "big") for extent in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + extents + array.tobytes())


def write_mnist(folder: Path, address: str) -> MnistSource:
    files = {
        "train-images-idx3-ubyte.gz": idx(
            (np.arange(6 * 784) % 256).astype(np.uint8).reshape(6, 28, 28)
        ),
        "train-labels-idx1-ubyte.gz": idx(np.arange(6, dtype=np.uint8)),
        "t10k-images-idx3-ubyte.gz": idx(np.zeros((2, 28, 28), np.uint8)),
        "t10k-labels-idx1-ubyte.gz": idx(np.array([8, 9], np.uint8)),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = tuple((name, hashlib.md5(content).hexdigest()) for name, content in files.items())  # noqa: S324
    return MnistSource((address,), sums)


def write_cifar(folder: Path, address: str) -> CifarSource:
    archive_bytes = io.BytesIO()
    with tarfile.open(fileobj=archive_bytes, mode="w:gz") as archive:
        for number, name in enumerate(
            [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
        ):
            record = bytes([number]) + bytes([number * 10]) * 3072
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = 2 * len(record)
            archive.addfile(entry, io.BytesIO(record * 2))
    (folder / "cifar.tar.gz").write_bytes(archive_bytes.getvalue())
    return CifarSource(f"{address}cifar.tar.gz", hashlib.md5(archive_bytes.getvalue()).hexdigest())  # noqa: S324


def write_images(folder: Path, classes: dict[str, int], side: int = 20) -> None:
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            image = Image.new("RGB", (side, side + 4), (number * 100, 0, 0))
            image.save(folder / name / f"{index}.png")


def test_mnist_of_a_folder_is_read_as_its_files_state(tmp_path: Path) -> None:
    write_mnist_files(tmp_path / "MNIST" / "raw", {"train": 5, "t10k": 3})
    dataset = read_mnist(str(tmp_path))
    images, labels = dataset.train.batch(np.arange(5))
    assert images.shape == (5, 1, 28, 28)
    assert images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert len(dataset.test.labels) == 3


@pytest.mark.parametrize("suffix", ["", ".bin"])
def test_cifar_of_a_folder_is_read_in_both_versions(tmp_path: Path, suffix: str) -> None:
    write_cifar_files(tmp_path / "batches", {"data_batch_1": 4, "test_batch": 3}, suffix)
    dataset = read_cifar10(str(tmp_path))
    images, labels = dataset.train.batch(np.arange(4))
    assert images.shape == (4, 3, 32, 32)
    assert images[:, 0, 0, 0].tolist() == labels.tolist() == [0, 1, 2, 3]
    assert len(dataset.test.labels) == 3
    assert dataset.class_names[3] == "cat"


HEAD, SIDES = bytes([0, 0, 8, 3]), bytes([0, 0, 0, 28] * 2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train-images-idx3-ubyte", b"", "it does not begin as one of 3 dimensions"),
        ("train-images-idx3-ubyte", HEAD + b"\xff" * 12, "images of 4294967295 x 4294967295, wh"),
        ("train-images-idx3-ubyte", HEAD + b"\0\6\0\0" + SIDES, "it states 308281344 bytes"),
        (
            "train-images-idx3-ubyte.gz",
            b"\x1f\x8b\x08" + b"\0" * 7 + b"\x07",
            "is no IDX file of b",
        ),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 9]) + b"1", "and has others"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 1]) + b"1", "5 images and 1 label"),
    ],
)
def test_a_file_that_is_no_idx_file_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    write_mnist_files(tmp_path, {"train": 5, "t10k": 3})
    (tmp_path / f"{name}.gz").unlink(missing_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=said):
        read_mnist(str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}.", b"no batch", b"\x80\x02cposix\nsystem\nU\x04exitR."]
)
def test_a_batch_of_another_kind_is_named_and_never_run(tmp_path: Path, content: bytes) -> None:
    write_cifar_files(tmp_path, {"data_batch_1": 4, "test_batch": 3}, "")
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DatasetError, match="data_batch_1 is no batch of CIFAR-10"):
        read_cifar10(str(tmp_path))


def test_a_folder_without_the_files_says_which(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"holds no train-images-idx3-ubyte .* Fix: put MNIST"):
        read_mnist(str(tmp_path))
    with pytest.raises(DatasetError, match=r"no file data_batch_.* Fix: unpack cifar-10"):
        read_cifar10(str(tmp_path))


def test_mnist_is_downloaded_read_and_kept(mirror: tuple[Path, str], tmp_path: Path) -> None:
    source = write_mnist(*mirror)
    dataset = read_mnist("", source=source, root=tmp_path / "root")
    images, targets = dataset.train.batch(np.arange(6))
    assert images.shape == (6, 1, 28, 28)
    assert list(targets) == [0, 1, 2, 3, 4, 5]
    assert images[1, 0, 0, :2].tolist() == [784 % 256, 785 % 256]
    assert list(dataset.test.labels) == [8, 9]
    for path in mirror[0].iterdir():
        path.unlink()
    assert len(read_mnist("", source=source, root=tmp_path / "root").train.labels) == 6


def test_a_damaged_download_is_refused_and_leaves_nothing(
    mirror: tuple[Path, str], tmp_path: Path
) -> None:
    source = write_mnist(*mirror)
    (mirror[0] / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(DatasetError, match="mnist dataset could not be downloaded"):
        read_mnist("", source=source, root=tmp_path / "root")
    assert not list((tmp_path / "root").iterdir())


def test_cifar10_is_downloaded_and_read_from_its_binary_version(
    mirror: tuple[Path, str], tmp_path: Path
) -> None:
    source = write_cifar(*mirror)
    dataset = read_cifar10("", source=source, root=tmp_path / "root")
    images, targets = dataset.train.batch(np.arange(10))
    assert images.shape == (10, 3, 32, 32)
    assert list(targets) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert images[9].min() == images[9].max() == 40
    assert list(dataset.test.labels) == [5, 5]


def test_a_folder_without_a_split_has_a_tenth_of_each_class_held_out(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 20, "dog": 10})
    dataset = read_folder(str(tmp_path), classes=2, form=ImageForm(16, 16))
    assert np.bincount(dataset.test.labels).tolist() == [2, 1]
    assert np.bincount(dataset.train.labels).tolist() == [18, 9]


def test_images_are_resized_to_one_shape(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 3})
    write_images(tmp_path / "val", {"cat": 1, "dog": 1})
    dataset = read_folder(str(tmp_path), classes=2, form=ImageForm(16, 16))
    images, targets = dataset.train.batch(np.array([5, 0]))
    assert images.shape == (2, 3, 16, 16)
    assert targets.tolist() == [1, 0]
    assert images[:, 0].max(axis=(1, 2)).tolist() == [100, 0]


@pytest.mark.parametrize(
    ("classes", "reason"),
    [(3, "holds 2 classes and options.classes is 3. Fix: set options.classes to 2")],
)
def test_the_wrong_number_of_classes_says_the_right_one(
    tmp_path: Path, classes: int, reason: str
) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    with pytest.raises(DatasetError, match=reason):
        read_folder(str(tmp_path), classes=classes, form=ImageForm(16, 16))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 2, "dog": 2})
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(b"no image")
    dataset = read_folder(str(tmp_path), classes=2, form=ImageForm(16, 16))
    with pytest.raises(
        DatasetError, match=r"\.png is no image that can be read: .* Fix: remove or replace it"
    ):
        dataset.train.batch(np.array([0]))


def write_text(folder: Path, files: int = 4, file_bytes: int = 200_000) -> None:
    for number in range(files):
        (folder / f"part-{number}").mkdir(parents=True)
        line = f"line of part {number}\n".encode()
        (folder / f"part-{number}" / "a.txt").write_bytes(line * (file_bytes // len(line)))
        (folder / f"part-{number}" / "a.bin").write_bytes(bytes(1000))


def test_targets_are_the_inputs_moved_on_by_one(tmp_path: Path) -> None:
    write_text(tmp_path)
    inputs, targets = text_blocks(str(tmp_path), 32, 0).train.batch(np.array([0, 5]))
    assert inputs.shape == targets.shape == (2, 32)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0]).startswith(b"line of part 0\n")


def test_about_a_tenth_of_the_text_is_held_out(tmp_path: Path) -> None:
    write_text(tmp_path)
    dataset = text_blocks(str(tmp_path), 32, 0)
    share = len(dataset.test.labels) / (len(dataset.test.labels) + len(dataset.train.labels))
    assert 0.08 < share < 0.13


@pytest.mark.parametrize("period", [10, 20])
def test_text_with_a_period_is_held_out_in_all_its_parts(tmp_path: Path, period: int) -> None:
    runs = b"".join(bytes([65 + number % period]) * (16 << 10) for number in range(20 * period))
    (tmp_path / "a.txt").write_bytes(runs)
    dataset = text_blocks(str(tmp_path), 1024, 0)
    inputs, _ = dataset.test.batch(np.arange(len(dataset.test.labels)))
    assert len(np.unique(inputs)) > period / 2


def test_two_runs_of_text_are_enough_and_one_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(33 << 10))
    dataset = text_blocks(str(tmp_path), 1024, 0)
    runs = [np.unique(each.labels).tolist() for each in (dataset.train, dataset.test)]
    assert runs == [[0], [1]]


def test_no_training_block_reaches_into_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(i // (16 << 10) % 256 for i in range(600 << 10)))
    dataset = text_blocks(str(tmp_path), 100, 0)
    inputs, targets = dataset.train.batch(np.arange(len(dataset.train.labels)))
    held_out = set(np.unique(dataset.test.batch(np.arange(len(dataset.test.labels)))))
    assert len(held_out) == 4
    assert not held_out & {*np.unique(inputs), *np.unique(targets)}


def test_the_corpus_is_cut_where_the_option_says(tmp_path: Path) -> None:
    write_text(tmp_path)
    dataset = text_blocks(str(tmp_path), 32, 400_000)
    blocks = len(dataset.train.labels) + len(dataset.test.labels)
    assert 380_000 < blocks * 32 <= 400_000


def test_too_little_text_says_how_much_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DatasetError, match="holds 5 bytes of text; at least 32768 are needed"):
        text_blocks(str(tmp_path), 64, 0)


def test_data_are_finite_unless_an_input_or_a_target_is_not() -> None:
    labels = np.arange(4)
    for value, is_finite in ((1.0, True), (np.nan, False), (-np.inf, False)):
        inputs = np.array([[0.0], [1.0], [value], [3.0]])
        samples = ArraySamples(inputs, labels, labels)
        assert all_finite(samples, [labels[:2]])
        assert all_finite(samples, [labels[:2], labels[2:]]) is is_finite
        assert all_finite(ArraySamples(labels, inputs, labels), [labels]) is is_finite


def test_more_classes_than_can_be_skewed_are_refused() -> None:
    labels = np.arange(CLASSES_MAX + 1, dtype=np.int64)
    with pytest.raises(ValueError, match="10001 classes cannot be skewed"):
        partition_indices(labels, Sharding(partitions=2, alpha=0.5, seed=1))


def test_a_perplexity_of_ones_own_is_told_in_place_of_the_losses() -> None:
    own = Sums(loss=4.0, score=0.0, samples=2, metrics={"perplexity": 10.0})
    assert own.metric("perplexity") == 5.0
    assert Sums(loss=0.0, score=0.0, samples=2).metric("perplexity") == 1.0
