import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.tensors.hidden_states import STATE_CODECS, StatesError, state_codec


def rows_of(seed: int, count: int, width: int) -> "np.typing.NDArray[np.float32]":
    draws = np.random.default_rng(seed)
    rows = draws.standard_normal((count, width)).astype(np.float32)
    rows[:, : min(2, width)] *= 300  # as few dimensions of a residual stream are
    return rows


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_int8o_keeps_each_value_to_half_a_scale_and_the_largest_to_bfloat16(
    seed: int, count: int, width: int
) -> None:
    rows = rows_of(seed, count, width)
    codec = state_codec("int8o")
    copy = codec.decode(codec.encode(rows), width)
    magnitudes = np.sort(np.abs(rows), axis=1)
    rest_most = magnitudes[:, -5] if width > 4 else np.zeros(count, np.float32)
    # A scale is rounded to eight bits, by which the largest code may be cut.
    limit = rest_most / 127 * 1.01 + np.abs(rows).max(axis=1) * 0.0
    outlier_error = np.abs(rows) * 2.0**-8
    is_near = np.abs(copy - rows) <= np.maximum(limit[:, None], outlier_error)
    assert is_near.all()


@pytest.mark.parametrize("name", STATE_CODECS)
def test_rows_are_independent_of_each_other(name: str) -> None:
    codec, rows = state_codec(name), rows_of(1, 7, 64)
    assert codec.encode(rows) == codec.encode(rows[:3]) + codec.encode(rows[3:])
    assert len(codec.encode(rows)) == 7 * codec.row_bytes(64)


def test_float32_loses_nothing() -> None:
    rows = rows_of(2, 5, 33)
    codec = state_codec("float32")
    assert (codec.decode(codec.encode(rows), 33) == rows).all()


@pytest.mark.parametrize("name", STATE_CODECS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_states_that_are_not_finite_are_never_sent(name: str, wrong: float) -> None:
    rows = rows_of(3, 4, 40)
    rows[2, 7] = wrong
    with pytest.raises(StatesError, match="not finite"):
        state_codec(name).encode(rows)


@given(st.binary(max_size=400), st.integers(1, 60), st.sampled_from(STATE_CODECS))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_as_finite_rows_or_refused(
    content: bytes, width: int, name: str
) -> None:
    try:
        rows = state_codec(name).decode(content, width)
    except StatesError:
        return
    assert rows.shape == (len(content) // state_codec(name).row_bytes(width), width)
    assert np.isfinite(rows).all()


@pytest.mark.parametrize("name", STATE_CODECS)
def test_a_part_of_a_row_is_refused_with_the_size_of_a_whole_one(name: str) -> None:
    codec = state_codec(name)
    content = codec.encode(rows_of(4, 2, 16))
    with pytest.raises(StatesError, match=f"{codec.row_bytes(16)}"):
        codec.decode(content[:-1], 16)
    with pytest.raises(StatesError):
        codec.decode(b"", 16)


def test_a_row_of_tiny_values_becomes_its_outliers_alone() -> None:
    codec = state_codec("int8o")
    rows = np.full((1, 20), 1e-42, np.float32)
    rows[0, 3] = 5.0
    copy = codec.decode(codec.encode(rows), 20)
    assert copy[0, 3] == 5.0
    assert np.abs(np.delete(copy[0], 3)).max() < 1e-41
