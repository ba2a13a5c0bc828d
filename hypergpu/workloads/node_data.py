"""Workloads that train on data which stay on the nodes that have them."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hypergpu.workloads.datasets import Dataset, NodeDataError, SampleSource


@runtime_checkable
class NodeDataWorkload(Protocol):
    """Optional part of a workload: it trains on data that stay on the nodes that have them."""

    def held_out(self, data_dir: str) -> Dataset:
        """All samples of the job's folder, held out; there are none to train on. Raises
        `DatasetError`.
        """

    def node_samples(self, data_dir: str, node_dir: str) -> SampleSource:
        """All samples of a node's own folder.

        Args:
            data_dir: The job's folder, which every machine has.
            node_dir: The node's own. Links in it lead nowhere else.

        Raises:
            NodeDataError: They are not what the job asks for.
            DatasetError: They cannot be read; the text stays on the node.
        """


def held_out_dataset(workload: Any, data_dir: str) -> Dataset:
    """The held-out samples of a job whose other samples stay on nodes.

    Raises:
        DatasetError: The workload cannot train so, or the folder cannot be used.
    """
    return _node_data_workload(workload).held_out(data_dir)


def training_samples(workload: Any, data_dir: str, node_dir: str) -> SampleSource:
    """What a node trains on: of the job's folder, or all of its own folder, where it names one.

    Raises:
        DatasetError: See `NodeDataWorkload`.
    """
    if not node_dir:
        samples: SampleSource = workload.load(data_dir).train
        return samples
    own_samples = _node_data_workload(workload).node_samples(data_dir, node_dir)
    if not len(own_samples.labels):
        raise NodeDataError("there is not one sample")
    return own_samples


def _node_data_workload(workload: Any) -> NodeDataWorkload:
    # One that is made of functions may lack those for this.
    node_workload = getattr(workload, "node_data", workload)
    if not isinstance(node_workload, NodeDataWorkload):
        raise NodeDataError("the workload as installed cannot train on data that stay on nodes")
    return node_workload


class NodeDataReaders(NamedTuple):
    """The two methods of `NodeDataWorkload`, for workloads that are made of functions."""

    held_out: Callable[[str], Dataset]
    node_samples: Callable[[str, str], SampleSource]
