"""Rounds to an accuracy on the digits, for the codecs and outer rules that belong together, and
the loss of few nodes after few rounds under the outer step that is chosen for them.

The task takes int4 ten rounds. One that takes it five is over before the smaller coordinates were
ever said, and costs sparse updates more than twice the rounds.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from coordinator.core.training.outer_step import outer_step
from coordinator.core.work.outer_step import PLAIN_STEP
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from hypergpu.digests import digest_of
from hypergpu.jobfile.spec import JobSpec, Outer
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s, TensorSpec, layout_of

FEATURES, CLASSES = 512, 10
NODES, INNER_STEPS, BATCH = 10, 10, 32
LEARNING_RATE = np.float32(0.005)
TARGET = 0.95
ROUNDS_MAX = 60
LAYOUT = layout_of([TensorSpec("weight", (FEATURES, CLASSES))])
NOTHING = (np.empty(0, np.float32), np.empty(0, np.int64))


class Digits(NamedTuple):
    """Fixed random features of the digits, 1,437 to train on and 360 held out."""

    features: Float32s
    labels: npt.NDArray[np.int64]

    @classmethod
    def load(cls) -> "Digits":
        """Read scikit-learn's own copy."""
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        generator = np.random.default_rng(0)
        directions = generator.standard_normal((pixels.shape[1], FEATURES)) / 8
        features = np.maximum((pixels - 5) / 6 @ directions, 0) / np.sqrt(FEATURES / 32)
        order = generator.permutation(labels.size)
        return cls(features.astype(np.float32)[order], labels.astype(np.int64)[order])

    def accuracy(self, weight: Float32s) -> float:
        """Accuracy on the held-out samples."""
        guesses = (self.features[1437:] @ weight).argmax(axis=1)
        return float((guesses == self.labels[1437:]).mean())

    def loss(self, weight: Float32s) -> float:
        """Mean cross-entropy of the held-out samples."""
        logits = np.einsum("bf,fc->bc", self.features[1437:], weight)
        logits -= logits.max(axis=1, keepdims=True)
        right = logits[np.arange(logits.shape[0]), self.labels[1437:]]
        return float((np.log(np.exp(logits).sum(axis=1)) - right).mean())

    def gradient(self, weight: Float32s, batch: npt.NDArray[np.int64]) -> Float32s:
        """Gradient of softmax's cross-entropy."""
        # Not `@`, whose order of additions and threads are the machine's.
        logits = np.einsum("bf,fc->bc", self.features[batch], weight)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        shares[np.arange(batch.size), self.labels[batch]] -= 1
        gradient: Float32s = np.einsum("bf,bc->fc", self.features[batch], shares)
        return gradient / np.float32(batch.size)


class AdamNode:
    """State of a node between rounds: Adam's moments and the residual."""

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._moments = np.zeros((2, FEATURES, CLASSES), np.float32)
        self._steps = 0
        self.residual: Float32s | None = None

    def pseudo_gradient(self, start: Float32s, generator: np.random.Generator) -> Float32s:
        """Take the inner steps of one round with Adam."""
        weight, (first, second) = start.copy(), self._moments
        for _ in range(INNER_STEPS):
            self._steps += 1
            gradient = self._digits.gradient(weight, generator.integers(0, 1437, BATCH))
            first += np.float32(0.1) * (gradient - first)
            second += np.float32(0.001) * (gradient**2 - second)
            spread = np.sqrt(second / np.float32(1 - 0.999**self._steps)) + np.float32(1e-8)
            weight -= LEARNING_RATE / np.float32(1 - 0.9**self._steps) * first / spread
        return start - weight


Chosen = Callable[[int], Outer]
"""The outer step of a round by how many came before it."""


class Compressor(NamedTuple):
    """Codecs of both ways, and the outer rule that goes with them."""

    up: str
    down: str
    outer: Chosen


def models(folder: Path, codec: Compressor, seed: int, nodes_count: int) -> Iterator[Float32s]:
    """The model after each round of the product's codec and fold."""
    digits = Digits.load()
    path = folder / "model"
    path.write_bytes(np.zeros(LAYOUT.parameters_count, np.float32).tobytes())
    base = StoredBlob(path, digest_of(path.read_bytes()))
    state: StoredBlob | None = None
    nodes = [AdamNode(digits) for _ in range(nodes_count)]
    for round in range(1, ROUNDS_MAX + 1):
        start = np.fromfile(base.path, np.float32).reshape(FEATURES, CLASSES)
        updates: list[StoredUpdate] = []
        for slot, node in enumerate(nodes):
            change = node.pseudo_gradient(start, batches_of(seed, round, slot)).reshape(-1)
            encoded_update = encode_update(LAYOUT, codec.up, Flat(change, *NOTHING), node.residual)
            node.residual = encoded_update.residual
            update = folder / f"update-{slot}"
            update.write_bytes(encoded_update.payload.tobytes())
            digest = digest_of(encoded_update.payload.tobytes())
            updates.append(StoredUpdate(update, digest, INNER_STEPS * BATCH, codec.up))
        request = FoldRequest(
            layout=LAYOUT,
            down=codec.down,
            outer=codec.outer(round - 1),
            base_model=base,
            outer_state=state,
            updates=tuple(updates),
            output_dir=folder,
        )
        result = fold(request)
        base = StoredBlob(result.model.path, result.model.digest)
        outer_file = result.outer_state
        state = None if outer_file is None else StoredBlob(outer_file.path, outer_file.digest)
        yield np.fromfile(base.path, np.float32).reshape(FEATURES, CLASSES)


def batches_of(seed: int, round: int, slot: int) -> np.random.Generator:
    """What a node's batches of a round are drawn from."""
    return np.random.default_rng((seed, round, slot))


def rounds_to_target(folder: Path, codec: Compressor, seed: int) -> int:
    """Rounds until the held-out accuracy is reached."""
    digits = Digits.load()
    for round, weight in enumerate(models(folder, codec, seed, NODES), 1):
        if digits.accuracy(weight) >= TARGET:
            return round
    return ROUNDS_MAX + 1


DENSE = Compressor("int4", "int4", lambda _: Outer())
SPARSE = Compressor("topk64", "topk64", lambda _: PLAIN_STEP)


def test_sparse_updates_need_at_most_half_again_the_rounds_of_int4(tmp_path: Path) -> None:
    dense = sum(rounds_to_target(tmp_path, DENSE, seed) for seed in range(3))
    sparse = sum(rounds_to_target(tmp_path, SPARSE, seed) for seed in range(3))
    assert dense < 3 * ROUNDS_MAX / 2
    assert sparse <= 1.5 * dense


def chosen_for(participants: int) -> Chosen:
    """The outer steps of a job that states none."""

    def choose(number: int) -> Outer:
        choice = outer_step(
            JobSpec("digits-cnn"),
            round_number=number,
            participants=participants,
            is_sparse=False,
        )
        return choice.step

    return choose


def losses(folder: Path, outer: Chosen, *, nodes: int, rounds: int) -> float:
    """Sum of held-out losses over three seeds."""
    digits, codec = Digits.load(), Compressor("int4", "int4", outer)
    ends = (next(islice(models(folder, codec, seed, nodes), rounds - 1, None)) for seed in SEEDS)
    return sum(digits.loss(end) for end in ends)


def plain_losses(rounds: int) -> float:
    """The same of Adam alone, without rounds, on one node's samples."""
    digits, total = Digits.load(), 0.0
    for seed in SEEDS:
        node, weight = AdamNode(digits), np.zeros((FEATURES, CLASSES), np.float32)
        for round in range(1, rounds + 1):
            weight = weight - node.pseudo_gradient(weight, batches_of(seed, round, 0))
        total += digits.loss(weight)
    return total


SEEDS = range(3)


@pytest.mark.parametrize("rounds", [3, 10])
def test_one_node_ends_as_well_as_its_inner_optimizer_alone(tmp_path: Path, rounds: int) -> None:
    chosen_loss = losses(tmp_path, chosen_for(1), nodes=1, rounds=rounds)
    assert chosen_loss <= 1.02 * plain_losses(rounds)


def test_few_nodes_gain_by_the_chosen_steps_in_ten_rounds(tmp_path: Path) -> None:
    chosen_loss = losses(tmp_path, chosen_for(2), nodes=2, rounds=10)
    assert chosen_loss <= losses(tmp_path, lambda _: PLAIN_STEP, nodes=2, rounds=10)
