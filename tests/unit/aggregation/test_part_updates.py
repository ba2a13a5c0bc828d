"""Updates of some experts, averaged: against plain numpy, tensor by tensor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.training.trust.weights import WHOLE
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.model_parts import next_part, whole_part
from coordinator.shell.aggregation.part_updates import PartUpdate, merge_updates, token_shares
from coordinator.shell.aggregation.sketch import SketchKey, sketch_update
from hypergpu.digests import digest_of_file
from hypergpu.tensors.codec import apply_delta, decode_update, encode_update
from hypergpu.tensors.layout import Flat, Layout, TensorKind, unpack
from hypergpu.tensors.partial import expert_of, part_layout, spread_update
from tests.unit.tensors.test_partial import mixture_layout, random_model

LAYOUT = mixture_layout()
PER_TOKEN = 1


def tensors_of(layout: Layout, flat: Flat) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a model."""
    return cast("dict[str, npt.NDArray[Any]]", unpack(layout, flat))


class PartSender(NamedTuple):
    """A node of a round."""

    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    weight: int = 10
    clip: int = WHOLE


def sent_update(sender: PartSender, seed: int, codec: str, path: Path) -> PartUpdate:
    """A random update on disk, with the tokens that its sender counted."""
    part = part_layout(LAYOUT, sender.experts)
    update = random_model(part, seed)
    tensors = tensors_of(part, update)
    for expert, count in zip(sender.experts, sender.tokens, strict=True):
        tensors[f"z.{expert}.tokens"][0] = count
    path.write_bytes(encode_update(part, codec, update).payload.tobytes())
    return PartUpdate(path, part, codec, sender.weight, sender.clip)


def write_model(flat: Flat, path: Path) -> Path:
    path.write_bytes(b"".join(vector.tobytes() for vector in flat))
    return path


def mean_of(senders: Sequence[PartSender], folder: Path, codec: str = "fp32") -> tuple[Flat, Flat]:
    """The mean of a round's updates, and the base."""
    base = random_model(LAYOUT, 0)
    base_path = write_model(base, folder / "base")
    updates = [
        sent_update(each, seed, codec, folder / f"update-{seed}")
        for seed, each in enumerate(senders, 1)
    ]
    path = folder / "mean"
    digest = merge_updates(LAYOUT, base_path, updates, PER_TOKEN, path)
    assert digest == digest_of_file(path)
    return decode_update(LAYOUT, "fp32", path.read_bytes()), base


def plain_mean(
    senders: Sequence[PartSender], folder: Path, codec: str, base: Flat
) -> dict[str, npt.NDArray[Any]]:
    """The same in float64, one tensor after the other."""
    updates = []
    for seed, each in enumerate(senders, 1):
        part = part_layout(LAYOUT, each.experts)
        payload = (folder / f"update-{seed}").read_bytes()
        updates.append((each, tensors_of(part, decode_update(part, codec, payload))))
    means = {}
    for tensor in LAYOUT.tensors:
        before, expert = tensors_of(LAYOUT, base)[tensor.name], expert_of(tensor)
        old = np.zeros(tensor.shape) if tensor.kind is TensorKind.PARAMETER else before
        total, weights = np.zeros(tensor.shape), 0.0
        for sender, tensors in updates:
            if tensor.name not in tensors:
                continue
            share = 1.0
            if expert is not None:
                tokens = dict(zip(sender.experts, sender.tokens, strict=True))
                share = tokens[expert] / max(1, sum(tokens.values()))
            total += sender.weight * share * sender.clip / WHOLE * (tensors[tensor.name] - old)
            weights += sender.weight * share
        is_kept = tensor.kind is TensorKind.INTEGER or not weights
        means[tensor.name] = old if is_kept else old + total / weights
    return means


SENDERS = st.lists(
    st.sets(st.integers(0, 2), min_size=1).flatmap(
        lambda experts: st.builds(
            PartSender,
            st.just(tuple(sorted(experts))),
            st.tuples(*(st.integers(0, 500) for _ in experts)),
            st.integers(1, 1000),
            st.integers(1, WHOLE),
        )
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(SENDERS, st.sampled_from(["fp32", "int8", "int4"]))
def test_a_mean_is_that_of_each_tensors_holders_by_their_tokens(
    tmp_path_factory: pytest.TempPathFactory, senders: list[PartSender], codec: str
) -> None:
    folder = tmp_path_factory.mktemp("round")
    mean, base = mean_of(senders, folder, codec)
    tensors = tensors_of(LAYOUT, mean)
    for name, values in plain_mean(senders, folder, codec, base).items():
        np.testing.assert_allclose(tensors[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_expert_that_nobody_holds_or_trained_stays_as_it_is(tmp_path: Path) -> None:
    mean, base = mean_of([PartSender((0, 1), (0, 9)), PartSender((1,), (4,))], tmp_path)
    tensors, before = tensors_of(LAYOUT, mean), tensors_of(LAYOUT, base)
    assert tensors["a.1.large"].any()
    for expert in (0, 2):
        assert not tensors[f"a.{expert}.large"].any()
        np.testing.assert_array_equal(tensors[f"z.{expert}.mean"], before[f"z.{expert}.mean"])


def test_a_lone_holder_moves_its_expert_the_less_the_smaller_its_vote_is(tmp_path: Path) -> None:
    base_path = write_model(random_model(LAYOUT, 0), tmp_path / "base")
    update = sent_update(PartSender((0,), (5,)), 1, "fp32", tmp_path / "update")
    means = []
    for full_weight in (0, 15, 200):
        path = tmp_path / "mean"
        voted_update = update._replace(full_weight=full_weight)
        merge_updates(LAYOUT, base_path, [voted_update], PER_TOKEN, path)
        means.append(tensors_of(LAYOUT, decode_update(LAYOUT, "fp32", path.read_bytes())))
    full, enough, hardly = means
    for name, part in (("a.0.large", 0.1), ("shared.large", 1.0)):
        np.testing.assert_array_equal(enough[name], full[name])
        np.testing.assert_allclose(hardly[name], part * full[name], rtol=1e-5)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), st.integers(1, 3))
def test_no_count_of_tokens_makes_an_update_weigh_more_than_its_samples(
    counts: list[int], per_token: int
) -> None:
    part = part_layout(LAYOUT, (0, 1, 2))
    integers = np.array([7, *counts], np.int64)
    assert part.tensors[-4].name == "shared.steps"
    shares = token_shares(part, integers.view(np.uint8), per_token)
    assert all(0 <= share <= 1 / per_token for share in shares.values())
    assert sum(shares.values()) <= 1 + 1e-9


def test_a_sparse_coordinate_that_one_of_several_holders_sent_is_halved(tmp_path: Path) -> None:
    mean, _ = mean_of([PartSender((0,), (5,)), PartSender((0,), (5,))], tmp_path, "topk64")
    part = part_layout(LAYOUT, (0,))
    first, second = (
        tensors_of(part, decode_update(part, "topk64", (tmp_path / f"update-{seed}").read_bytes()))
        for seed in (1, 2)
    )
    name = "shared.large"
    one, other = first[name], second[name]
    alone = (one != 0) & (other == 0)
    assert alone.any()
    np.testing.assert_allclose(tensors_of(LAYOUT, mean)[name][alone], one[alone] / 2, rtol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "int4", "topk64"])
def test_the_sketch_of_a_part_is_that_of_the_same_update_spread_over_the_whole(
    codec: str, tmp_path: Path
) -> None:
    key, groups, base = SketchKey(b"k" * 32), layer_groups(LAYOUT), random_model(LAYOUT, 0)
    base_path = write_model(base, tmp_path / "base")
    update = sent_update(PartSender((0, 2), (3, 4)), 1, codec, tmp_path / "update")
    own = decode_update(update.part, codec, update.path.read_bytes())
    spread = spread_update(LAYOUT, update.part, own, base)
    whole_path = tmp_path / "whole"
    whole_path.write_bytes(encode_update(LAYOUT, "fp32", spread).payload.tobytes())
    part = sketch_update(key, LAYOUT, codec, update.path, base_path, groups, part=update.part)
    whole = sketch_update(key, LAYOUT, "fp32", whole_path, base_path, groups)
    np.testing.assert_allclose(part.layers, whole.layers, rtol=1e-6, atol=1e-4)
    assert part.norm == pytest.approx(whole.norm, rel=1e-6)
    assert part.statistics_norm == pytest.approx(whole.statistics_norm, rel=1e-6)


def test_groups_of_layers_have_one_for_each_expert_behind_what_all_share() -> None:
    groups = layer_groups(LAYOUT)
    some_groups = groups.held_by((0, 2))
    assert (groups.shared_count, groups.groups_count) == (2, 5)
    assert some_groups is not None
    assert some_groups.all == [0, 1, 2, 4]
    assert groups.held_by(()) is None


@pytest.mark.parametrize("codec", ["int8", "int4", "topk256"])
def test_holders_of_a_part_come_to_the_whole_by_its_changes(codec: str, tmp_path: Path) -> None:
    part = part_layout(LAYOUT, (0, 1))
    paths = (tmp_path / f"file-{number}" for number in range(200))
    model = write_model(random_model(LAYOUT, 1), tmp_path / "model")
    holder_file = whole_part(
        write_model(random_model(LAYOUT, 0), tmp_path / "old"), LAYOUT, part, next(paths)
    )
    for _ in range(30):
        files = next_part(model, holder_file.path, (LAYOUT, part), codec, lambda: next(paths))
        assert files.delta is not None
        changed_path = tmp_path / "applied"
        digest = apply_delta(
            holder_file.path, files.delta.path, changed_path, layout=part, codec=codec
        )
        assert digest == files.model.digest == digest_of_file(files.model.path)
        holder_file = files.model
    exact = whole_part(model, LAYOUT, part, next(paths))
    values, exact_values = (
        Flat.view(part, np.fromfile(each.path, np.uint8)) for each in (holder_file, exact)
    )
    np.testing.assert_allclose(values.parameters, exact_values.parameters, atol=0.03)
    np.testing.assert_array_equal(values.statistics, exact_values.statistics)
