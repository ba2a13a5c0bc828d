"""Layout and first model of workloads that need no torch, alike on node and coordinator."""

import numpy as np

from hypergpu.optimizer import before_last
from hypergpu.tensors.layout import Flat, Layout, TensorSpec, layout_of, pack
from hypergpu.workloads.workload import NumpyWorkload


def numpy_layout(workload: NumpyWorkload) -> Layout:
    """The layout that node and coordinator derive alike."""
    tensors = workload.initial(0)
    return layout_of(TensorSpec(name, array.shape) for name, array in tensors.items())


def numpy_hidden_weights(workload: NumpyWorkload) -> frozenset[str]:
    """Weights that Muon steps: those of two axes and more before the last of them, in the order in
    which the workload names them.
    """
    tensors = workload.initial(0)
    return before_last(name for name, array in tensors.items() if array.ndim >= 2)


def numpy_initial(workload: NumpyWorkload, seed: int) -> Flat:
    """The first model of a job with this seed, as node and coordinator draw it alike."""
    layout, tensors = numpy_layout(workload), workload.initial(seed)
    if len(tensors) == 1:  # It is the model, which is not copied: it may be most of the memory.
        only = np.asarray(next(iter(tensors.values())), np.float32)
        return Flat.empty(layout_of(()))._replace(parameters=only.reshape(-1))
    flat = Flat.empty(layout)
    pack(layout, tensors, flat)
    return flat
