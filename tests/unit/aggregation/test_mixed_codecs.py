"""Dense and sparse updates of one round: each beside its own kind, or by what both send."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.weights import NODES_LEAST, WHOLE
from coordinator.shell.aggregation.common_coordinates import UpdateFile, common_norms
from coordinator.shell.aggregation.evidence import SketchedUpdate, evidence_of, weigh_sketched
from coordinator.shell.aggregation.likeness import compare_pairs
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import SketchKey, sketch_update, sketch_vector
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.layout import Flat, Float32s, TensorSpec, layout_of

LAYOUT = layout_of((TensorSpec("weight", (160, 1024)), TensorSpec("bias", (301,))))
COUNT = LAYOUT.parameters_count
KEY = SketchKey(b"a secret")
DENSE, SPARSE = "int4", "topk64"
_DICE = np.random.default_rng(0)
SCALES = np.exp(1.0 * _DICE.standard_normal(COUNT)).astype(np.float32)
"""Some coordinates move far more than others, as they do in training."""
GRADIENT: Float32s = SCALES * _DICE.standard_normal(COUNT, np.float32)


class SentUpdate(NamedTuple):
    """An update as its node sends it."""

    name: str
    codec: str
    times: float = 1.0
    """Its length over that of an honest one."""
    sign: int = 1


def _sketch(folder: Path, sent: Sequence[SentUpdate]) -> list[SketchedUpdate]:
    """Sketches of updates that have half of their direction in common, as a round finds them."""
    model = folder / "model"
    Flat.empty(LAYOUT).parameters.tofile(model)
    files, sketched_updates = [], []
    for seed, each in enumerate(sent, 1):
        own = SCALES * np.random.default_rng(seed).standard_normal(COUNT, np.float32)
        flat = Flat.empty(LAYOUT)
        flat.parameters[:] = each.times * (each.sign * GRADIENT + own)
        path = folder / each.name
        path.write_bytes(encode_update(LAYOUT, each.codec, flat, None).payload.tobytes())
        node = NodeId(each.name)
        files.append(UpdateFile(node, each.codec, path))
        sketch = sketch_update(KEY, LAYOUT, each.codec, path, model)
        sketched_updates.append(SketchedUpdate(node, 20, sketch, each.codec == SPARSE))
    sparse = sum(each.is_sparse for each in sketched_updates)
    if min(sparse, len(sketched_updates) - sparse) >= NODES_LEAST:
        return sketched_updates
    norms = common_norms(LAYOUT, files)
    return [each._replace(common_norms=norms.get(each.node, {})) for each in sketched_updates]


def _slope() -> HeldOutGradient:
    return HeldOutGradient(Digest("model"), 1.0, sketch_vector(KEY, LAYOUT, GRADIENT))


def _weigh(folder: Path, *sent: SentUpdate) -> Weighing:
    return weigh_sketched(TrustMemory(), "robust", _sketch(folder, sent), _slope())


def _clip(weighing: Weighing, name: str) -> float:
    return weighing.clips.get(NodeId(name), WHOLE) / WHOLE


def _honest(codec: str, count: int) -> list[SentUpdate]:
    return [SentUpdate(f"{codec}-{number}", codec) for number in range(count)]


def test_lengths_are_measured_over_what_both_send(tmp_path: Path) -> None:
    files = []
    for name, codec in (("one", DENSE), ("two", SPARSE), ("three", SPARSE)):
        flat = Flat.empty(LAYOUT)
        flat.parameters[:] = np.random.default_rng(len(name)).standard_normal(COUNT, np.float32)
        (tmp_path / name).write_bytes(encode_update(LAYOUT, codec, flat, None).payload.tobytes())
        files.append(UpdateFile(NodeId(name), codec, tmp_path / name))
    one, two, three = (decode_parameters(LAYOUT, f.codec, f.path.read_bytes()) for f in files)
    norms_by_node = common_norms(LAYOUT, files)
    assert norms_by_node.keys() == {NodeId("one")}
    for name, sparse in (("two", two), ("three", three)):
        expected_norm = float(np.linalg.norm(one[sparse != 0].astype(np.float64)))
        assert norms_by_node[NodeId("one")][NodeId(name)] == pytest.approx(expected_norm, rel=1e-6)


@pytest.mark.parametrize("dense", [1, 2])
def test_a_few_dense_updates_among_sparse_ones_are_not_shrunk_for_being_whole(
    tmp_path: Path, dense: int
) -> None:
    weighing = _weigh(tmp_path, *_honest(DENSE, dense), *_honest(SPARSE, 4))
    assert all(_clip(weighing, f"{DENSE}-{number}") > 0.85 for number in range(dense))
    assert not weighing.votes


def test_a_dense_update_that_is_too_long_among_sparse_ones_has_no_vote(tmp_path: Path) -> None:
    weighing = _weigh(tmp_path, SentUpdate("long", DENSE, times=6.0), *_honest(SPARSE, 4))
    assert weighing.votes[NodeId("long")] == 0
    assert "times as long" in weighing.reasons[NodeId("long")]


def test_a_sparse_update_that_is_too_long_among_sparse_ones_is_shrunk_though_dense_ones_are_longer(
    tmp_path: Path,
) -> None:
    sent_updates = [*_honest(DENSE, 4), *_honest(SPARSE, 3), SentUpdate("long", SPARSE, times=1.6)]
    sketched_updates = _sketch(tmp_path, sent_updates)
    norms = {each.node: each.measured.norm for each in sketched_updates}
    assert norms[NodeId("long")] < 1.6 * norms[NodeId(f"{DENSE}-0")]
    weighing = weigh_sketched(TrustMemory(), "robust", sketched_updates, _slope())
    assert _clip(weighing, "long") == pytest.approx(1 / 1.6, rel=0.1)
    assert all(_clip(weighing, each.name) > 0.85 for each in sent_updates[:-1])


@pytest.mark.parametrize(("dense", "sparse"), [(5, 1), (5, 2), (1, 4), (4, 4), (2, 2)])
def test_nobody_loses_its_vote_for_its_codec(tmp_path: Path, dense: int, sparse: int) -> None:
    memory = TrustMemory()
    sketched_updates = _sketch(tmp_path, [*_honest(DENSE, dense), *_honest(SPARSE, sparse)])
    for _ in range(4):
        weighing = weigh_sketched(memory, "robust", sketched_updates, _slope())
        memory = weighing.memory
        memory = TrustMemory(weights=memory.weights, rounds=memory.rounds, signal=memory.signal)
        assert not weighing.votes, weighing.reasons


@pytest.mark.parametrize("codec", [DENSE, SPARSE])
def test_a_flipped_update_is_found_out_whatever_its_codec(tmp_path: Path, codec: str) -> None:
    sent_updates = [*_honest(DENSE, 4), *_honest(SPARSE, 2), SentUpdate("flip", codec, sign=-1)]
    assert _weigh(tmp_path, *sent_updates).votes[NodeId("flip")] == 0


def test_influence_is_told_over_what_a_sparse_update_sends(tmp_path: Path) -> None:
    sketched_updates = _sketch(tmp_path, [*_honest(DENSE, 5), *_honest(SPARSE, 1)])
    *dense, sparse = (each.influence or 0.0 for each in evidence_of(sketched_updates, _slope()))
    assert sparse > 0.8 * float(np.median(dense))


def test_pairs_of_sparse_updates_are_held_against_sparse_ones(tmp_path: Path) -> None:
    sketched_updates = _sketch(tmp_path, [*_honest(DENSE, 3), *_honest(SPARSE, 4)])
    sketches = {each.node: each.measured.sketch for each in sketched_updates}
    pair = {NodeId(f"{SPARSE}-0"): NodeId(f"{SPARSE}-1")}
    sparse = {each.node for each in sketched_updates if each.is_sparse}
    alone = {node: sketch for node, sketch in sketches.items() if node in sparse}
    assert compare_pairs(sketches, pair, sparse=sparse) == compare_pairs(alone, pair)
