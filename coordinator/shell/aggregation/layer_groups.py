"""Groups of a model's layers, each of which an update is held against its own samples by.

One cosine over all coordinates is decided by the layer with the largest gradient: the sign of any
other may be turned unseen.
"""

from collections.abc import Collection
from typing import NamedTuple

from hypergpu.tensors.layout import Layout, TensorKind
from hypergpu.tensors.partial import expert_of

MATRIX_GROUPS_MOST = 12
"""Groups of matrices: deeper models have several in one."""


class LayerRun(NamedTuple):
    """Consecutive coordinates of one group."""

    group: int
    values_count: int


class HeldGroups(NamedTuple):
    """Groups that an update of some experts covers."""

    shared_count: int
    """The first so many: those that every update covers."""
    experts: tuple[int, ...]
    """Those of its experts."""

    @property
    def all(self) -> list[int]:
        """All of them."""
        return [*range(self.shared_count), *self.experts]


class LayerGroups(NamedTuple):
    """Which group each coordinate of the parameters is in."""

    groups_count: int
    runs: tuple[LayerRun, ...]
    """In layout order."""
    experts: tuple[int, ...] = ()
    """Experts of a mixture, each of which has a group: the last ones, in this order."""

    @property
    def shared_count(self) -> int:
        """Groups of what no expert has alone; they come first."""
        return self.groups_count - len(self.experts)

    def held_by(self, experts: Collection[int]) -> HeldGroups | None:
        """Groups that an update of these experts covers; None for none, as it covers all."""
        if not experts:
            return None
        first = self.shared_count
        own = (first + at for at, each in enumerate(self.experts) if each in experts)
        return HeldGroups(self.shared_count, tuple(own))


def layer_groups(layout: Layout) -> LayerGroups:
    """Group the parameters: matrices and kernels one by one, in layout order, or several of them
    together; all vectors (biases, scales) in the last group. Of a mixture only what all experts
    share is grouped so, and each expert is a group behind them.
    """
    parameters = [each for each in layout.tensors if each.kind is TensorKind.PARAMETER]
    experts = tuple(sorted({it for each in parameters if (it := expert_of(each)) is not None}))
    shared_tensors = [each for each in parameters if expert_of(each) is None]
    matrices = [each.name for each in shared_tensors if len(each.shape) > 1]
    matrix_groups = min(len(matrices), MATRIX_GROUPS_MOST)
    numbers = {name: at * matrix_groups // len(matrices) for at, name in enumerate(matrices)}
    shared_groups = matrix_groups + (len(matrices) < len(shared_tensors))
    runs: list[LayerRun] = []
    for tensor in parameters:
        expert = expert_of(tensor)
        group = numbers.get(tensor.name, matrix_groups)
        group = group if expert is None else shared_groups + experts.index(expert)
        if runs and runs[-1].group == group:
            runs[-1] = LayerRun(group, runs[-1].values_count + tensor.count)
        else:
            runs.append(LayerRun(group, tensor.count))
    return LayerGroups(shared_groups + len(experts), tuple(runs), experts)


def one_group(layout: Layout) -> LayerGroups:
    """All parameters in one group."""
    return LayerGroups(1, (LayerRun(0, layout.parameters_count),))
