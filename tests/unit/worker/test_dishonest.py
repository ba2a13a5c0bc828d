"""What the demo's lying workers make of an update."""

import numpy as np

from gpu_node.shell.worker.dishonest import FACTOR, turn_first_matrix, turn_round
from hypergpu.tensors.layout import Float32s, TensorSpec, layout_of

LAYOUT = layout_of(
    (TensorSpec("bias", (3,)), TensorSpec("first", (4, 5)), TensorSpec("second", (5, 2)))
)


def update() -> Float32s:
    return np.arange(1, LAYOUT.parameters_count + 1, dtype=np.float32)


def test_a_whole_update_is_turned_and_ten_times_as_long() -> None:
    lie = update()
    turn_round(LAYOUT, lie)
    assert (lie == FACTOR * update()).all()


def test_the_sign_of_one_matrix_alone_is_turned() -> None:
    lie = update()
    turn_first_matrix(LAYOUT, lie)
    turned_places = np.flatnonzero(lie == -update())
    names = [tensor.name for tensor in LAYOUT.tensors]
    start = LAYOUT.offsets[names.index("first")]
    assert turned_places.tolist() == list(range(start, start + 20))
    assert np.count_nonzero(lie == update()) == LAYOUT.parameters_count - 20
