"""Parts of a mixture's layout, and updates of them in their places in the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.experts import EXPERTS_MAX, Mixture, MixtureError
from hypergpu.tensors.codec import encode_update, sections_of
from hypergpu.tensors.layout import (
    Flat,
    Layout,
    LayoutError,
    TensorKind,
    TensorSpec,
    layout_from_json,
    layout_of,
    unpack,
)
from hypergpu.tensors.partial import decode_range, part_layout, spread_update

CODECS = ("fp32", "bf16", "int8", "int4", "topk64")


def mixture_layout(experts: int = 3) -> Layout:
    """Shared tensors of every kind, and as many of each expert."""
    tensors = [
        TensorSpec("shared.large", (70, 100)),
        TensorSpec("shared.small", (9,)),
        TensorSpec("shared.mean", (5,), TensorKind.STATISTIC),
        TensorSpec("shared.steps", (), TensorKind.INTEGER),
    ]
    for number in range(experts):
        tensors += [
            TensorSpec(f"a.{number}.large", (50, 90 + number), expert=number),
            TensorSpec(f"a.{number}.small", (7,), expert=number),
            TensorSpec(f"z.{number}.mean", (3,), TensorKind.STATISTIC, expert=number),
            TensorSpec(f"z.{number}.tokens", (1,), TensorKind.INTEGER, expert=number),
        ]
    return layout_of(tensors)


def random_model(layout: Layout, seed: int) -> Flat:
    draw = np.random.default_rng(seed)
    return Flat(
        draw.standard_normal(layout.parameters_count).astype(np.float32),
        draw.standard_normal(layout.statistics_count).astype(np.float32),
        draw.integers(0, 99, layout.integers_count),
    )


def test_a_part_has_what_all_share_and_its_experts_in_the_order_of_the_whole() -> None:
    layout = mixture_layout()
    part = part_layout(layout, (0, 2))
    names = [each.name for each in layout.tensors if ".1." not in each.name]
    assert [each.name for each in part.tensors] == names
    assert layout_from_json(part.to_json()) == part


def test_a_layout_without_experts_has_the_text_that_it_had_before_there_were_any() -> None:
    assert layout_of([TensorSpec("w", (2,))]).to_json() == (
        b'{"tensors":[{"name":"w","shape":[2],"kind":"parameter"}]}'
    )


def test_a_layout_names_no_more_experts_than_there_may_be() -> None:
    with pytest.raises(LayoutError, match=r"'w': expert 256 is not one of 256"):
        layout_of([TensorSpec("w", (2,), expert=EXPERTS_MAX)])


def test_an_update_of_a_part_says_that_nothing_changed_of_the_rest() -> None:
    layout = mixture_layout()
    part, base = part_layout(layout, (1,)), random_model(layout, 1)
    update = random_model(part, 2)
    spread, own, old = (
        unpack(layout, spread_update(layout, part, update, base)),
        unpack(part, update),
        unpack(layout, base),
    )
    for tensor in layout.tensors:
        if tensor.name in own:
            np.testing.assert_array_equal(spread[tensor.name], own[tensor.name])
        elif tensor.kind is TensorKind.PARAMETER:
            assert not spread[tensor.name].any()
        else:
            np.testing.assert_array_equal(spread[tensor.name], old[tensor.name])


@given(st.sampled_from(CODECS), st.data())
def test_any_values_of_an_update_are_those_of_the_whole_decoded(
    codec: str, draw: st.DataObject
) -> None:
    layout = part_layout(mixture_layout(), (0, 1))
    update = encode_update(layout, codec, random_model(layout, 3)).payload
    section = sections_of(layout, codec).large
    whole = decode_range(section, update, 0, section.values_count)
    start = draw.draw(st.integers(0, section.values_count))
    stop = draw.draw(st.integers(start, section.values_count))
    np.testing.assert_array_equal(decode_range(section, update, start, stop), whole[start:stop])


@pytest.mark.parametrize(
    "mixture",
    [Mixture(0, 0, 1), Mixture(8, 1, 2), Mixture(8, 9, 2), Mixture(8, 3, 0), Mixture(2, 0, 3)],
)
def test_numbers_of_experts_that_cannot_be_are_refused(mixture: Mixture) -> None:
    with pytest.raises(MixtureError):
        mixture.check()
