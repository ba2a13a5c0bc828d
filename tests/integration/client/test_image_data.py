"""Image workloads on uploaded folders, in the files that torchvision keeps; nothing is fetched."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from hypergpu.jobfile.spec import Data, Evaluation, JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator
from hypergpu.workloads.networks.exported import load_export
from tests.image_files import write_cifar_files, write_image_folder, write_mnist_files
from tests.processes import Cluster

MNIST = {"train": 40, "t10k": 20}
CIFAR = {"data_batch_1": 12, "data_batch_2": 12, "test_batch": 10}
FOLDER: dict[str, str | int | float | bool] = {"classes": 2, "image_size": 16}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with Cluster(tmp_path_factory.mktemp("images")) as cluster:
        cluster.add_nodes(1, "torch")
        with cluster.coordinator.client() as client:
            yield client


class ImageJob(NamedTuple):
    """A workload, with what writes its data."""

    workload: str
    write: Callable[[Path], None]
    options: dict[str, str | int | float | bool]


def write_split(folder: Path, suffix: str) -> None:
    write_image_folder(folder / "train", {"cat": 6, "dog": 6}, suffix)
    write_image_folder(folder / "val", {"cat": 2, "dog": 2}, suffix)


SHORT = (
    ImageJob("mnist-cnn", partial(write_mnist_files, parts=MNIST), {"channels": 4}),
    ImageJob("cifar10-resnet18", partial(write_cifar_files, parts=CIFAR, suffix=""), {}),
    ImageJob(
        "imagefolder-resnet18",
        partial(write_image_folder, counts={"cat": 8, "dog": 8}, suffix=".png"),
        FOLDER,
    ),
)
LONG = (
    ImageJob("cifar10-vgg11", partial(write_cifar_files, parts=CIFAR, suffix=".bin"), {}),
    ImageJob("imagefolder-vgg11", partial(write_split, suffix=".jpg"), FOLDER | {"image_size": 32}),
)


def trains_on_files(coordinator: Coordinator, job: ImageJob, folder: Path) -> None:
    """Train a job on files, export its model, and judge that on the same files."""
    job.write(folder / "data")
    spec = JobSpec(
        job.workload,
        training=TrainingSettings(rounds=1, inner_steps=2, batch_size=4, nodes=1),
        evaluation=Evaluation(every=1),
        data=Data(path="data"),
        options=job.options,
    )
    job_id = coordinator.submit(spec, beside=folder)
    for _ in coordinator.watch(job_id):
        pass
    end_view = coordinator.job(job_id).job
    assert (end_view.phase, end_view.updates_accepted) == ("finished", 1), end_view.reason
    coordinator.export(job_id, folder / "export")
    data_dir = str(folder / "data")
    sums = load_export(folder / "export", data_dir).evaluate(data_dir)
    assert sums.metric("accuracy") == pytest.approx(end_view.metric)
    assert sums.metric("loss") == pytest.approx(end_view.loss, rel=1e-3)


@pytest.mark.parametrize("job", SHORT, ids=lambda job: str(job.workload))
def test_a_workload_trains_on_files_of_a_folder(
    coordinator: Coordinator, job: ImageJob, tmp_path: Path
) -> None:
    trains_on_files(coordinator, job, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("job", LONG, ids=lambda job: str(job.workload))
def test_other_networks_and_files_train_too(
    coordinator: Coordinator, job: ImageJob, tmp_path: Path
) -> None:
    trains_on_files(coordinator, job, tmp_path)
