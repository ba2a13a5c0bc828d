"""The fold of what several rings trained, against the formulas as they are written down."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.shell.kinds.serving.ring_fold import LayerPart, fold_layer
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import Outer

COUNT = 50
Values = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def layer(seed: int, steps: float = 3.0) -> tuple[bytes, Values]:
    values = np.random.default_rng(seed).normal(size=3 * COUNT).astype("<f4")
    return values.tobytes() + np.array([steps], "<f4").tobytes(), values[:COUNT]


@given(
    st.lists(st.integers(1, 10_000), min_size=1, max_size=5),
    st.floats(0.125, 1.0, width=32),
    st.sampled_from([0.0, 0.15, 0.9]),
    st.sampled_from([None, layer(99)[1]]),
)
def test_it_is_the_mean_pseudo_gradient_and_nesterovs_step(
    weights: list[int], rate: float, mu: float, momentum: Values | None
) -> None:
    before, x = layer(0)
    parts = [layer(1 + number) for number in range(len(weights))]
    old_momentum = np.zeros(COUNT, np.float32) if momentum is None else momentum
    result = fold_layer(
        before,
        [LayerPart(content, weight) for (content, _), weight in zip(parts, weights, strict=True)],
        b"" if momentum is None else momentum.tobytes(),
        Outer(rate, mu),
    )
    difference = x - sum(
        weight / sum(weights) * each.astype(np.float64)
        for (_, each), weight in zip(parts, weights, strict=True)
    )
    new_momentum = mu * old_momentum + difference
    new_values = x - rate * (difference + mu * new_momentum)
    for content, (own, _) in zip(result.contents, parts, strict=True):
        assert np.frombuffer(content, "<f4", COUNT) == pytest.approx(new_values, abs=1e-5)
        # Each ring keeps its own optimizer's state.
        assert content[4 * COUNT :] == own[4 * COUNT :]
    if mu:
        assert np.frombuffer(result.momentum, "<f4") == pytest.approx(new_momentum, abs=1e-5)
    else:
        assert result.momentum == b""


def test_one_ring_by_the_plain_step_is_what_it_trained() -> None:
    (before, _), (content, values) = layer(0), layer(1)
    result = fold_layer(before, [LayerPart(content, 7)], b"", Outer(1.0, 0.0))
    assert np.frombuffer(result.contents[0], "<f4", COUNT) == pytest.approx(values, abs=1e-6)


def test_a_layer_without_an_adapter_stays_as_it_is() -> None:
    steps = np.array([4.0], "<f4").tobytes()
    result = fold_layer(steps, [LayerPart(steps, 1)] * 2, b"", Outer(0.7, 0.9))
    assert result.contents == (steps, steps)
    assert result.momentum == b""


def test_parts_of_other_sizes_or_without_finite_values_are_refused() -> None:
    before = layer(0)[0]
    with pytest.raises(HyperGPUError, match="differ in size"):
        fold_layer(before, [LayerPart(before[4:], 1)], b"", Outer(1.0, 0.0))
    huge = np.full(3 * COUNT + 1, 3e38, "<f4").tobytes()
    with pytest.raises(HyperGPUError, match="not finite"):
        fold_layer(huge, [LayerPart(before, 1)], huge[: 4 * COUNT], Outer(10.0, 0.9))
