"""A workload of another package that trains on a user's `.npz`: what tests of uploads submit."""

import io
import zipfile
from pathlib import Path

import numpy as np

from hypergpu.workloads.datasets import ArraySamples, Dataset
from hypergpu.workloads.digits import DigitsSoftmax, digits
from hypergpu.workloads.entry import Options, WorkloadEntry

NAME = "own-digits"
FILE = "digits.npz"
PARTS = ("train", "test")
ENTRY = WorkloadEntry(
    name=NAME,
    kind="numpy",
    dataset="npz",
    meaning="Softmax regression on uploaded digits",
    builder=f"{__name__}:build",
    takes_data="required",
)


class UploadedDigits(DigitsSoftmax):
    """Digits of the user's file."""

    def load(self, data_dir: str) -> Dataset:
        """Arrays by part, as `digits_file` writes them."""
        with zipfile.ZipFile(Path(data_dir) / FILE) as archive:
            arrays = {
                name: np.lib.format.read_array(io.BytesIO(archive.read(f"{name}.npy")))
                for part in PARTS
                for name in (f"{part}_inputs", f"{part}_labels")
            }
        train, test = (
            ArraySamples(arrays[f"{part}_inputs"], labels, labels)
            for part in PARTS
            for labels in (arrays[f"{part}_labels"],)
        )
        return Dataset(train, test)


def build(_options: Options) -> UploadedDigits:
    """Builder of the entry."""
    return UploadedDigits()


def digits_file() -> bytes:
    """The built-in digits as an `.npz`."""
    out, dataset = io.BytesIO(), digits()
    with zipfile.ZipFile(out, "w") as archive:
        for part, samples in zip(PARTS, (dataset.train, dataset.test), strict=True):
            inputs, labels = samples.batch(np.arange(len(samples.labels)))
            for name, array in (("inputs", inputs), ("labels", labels)):
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
                archive.writestr(f"{part}_{name}.npy", buffer.getvalue())
    return out.getvalue()


def install(folder: Path) -> str:
    """Put the package's metadata into a folder; gives the path that Python then finds it on."""
    about = folder / "npz_workload-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: npz-workload\nVersion: 1.0\n", "utf-8")
    points = f"[hypergpu.workloads]\n{NAME} = {__name__}:ENTRY\n"
    (about / "entry_points.txt").write_text(points, "utf-8")
    return f"{folder}:{Path(__file__).parent.parent}"
