"""Groups of a model's layers, each of which an update is held against its own samples by.

One cosine over all coordinates is decided by the layer with the largest gradient: the sign of any
other may be turned unseen.
"""

from typing import NamedTuple

from hypergpu.tensors.layout import Layout, TensorKind

MATRIX_GROUPS_MOST = 12
"""Groups of matrices: deeper models have several in one."""


class LayerRun(NamedTuple):
    """Consecutive coordinates of one group."""

    group: int
    values_count: int


class LayerGroups(NamedTuple):
    """Which group each coordinate of the parameters is in."""

    groups_count: int
    runs: tuple[LayerRun, ...]
    """In layout order."""


def layer_groups(layout: Layout) -> LayerGroups:
    """Group the parameters: matrices and kernels one by one, in layout order, or several of them
    together; all vectors (biases, scales) in the last group.
    """
    parameters = [each for each in layout.tensors if each.kind is TensorKind.PARAMETER]
    matrices = [each.name for each in parameters if len(each.shape) > 1]
    matrix_groups = min(len(matrices), MATRIX_GROUPS_MOST)
    numbers = {name: at * matrix_groups // len(matrices) for at, name in enumerate(matrices)}
    runs: list[LayerRun] = []
    for tensor in parameters:
        group = numbers.get(tensor.name, matrix_groups)
        if runs and runs[-1].group == group:
            runs[-1] = LayerRun(group, runs[-1].values_count + tensor.count)
        else:
            runs.append(LayerRun(group, tensor.count))
    return LayerGroups(matrix_groups + (len(matrices) < len(parameters)), tuple(runs))


def one_group(layout: Layout) -> LayerGroups:
    """All parameters in one group."""
    return LayerGroups(1, (LayerRun(0, layout.parameters_count),))
