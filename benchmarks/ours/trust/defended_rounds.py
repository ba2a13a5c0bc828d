"""Rounds of a job whose updates go through a defence against backdoors before they are folded."""

from collections.abc import Sequence

import numpy as np

from benchmarks.ours.trust.backdoor_defences import (
    OTHERS_SAMPLES,
    ROUND_DEFENCES,
    RoundUpdates,
    Weights,
)
from benchmarks.ours.trust.outcome import Setting
from benchmarks.ours.trust.training import NodeShards, Rows, stacked_models
from coordinator.shell.aggregation.layer_groups import layer_groups
from hypergpu.tensors.layout import Float32s, Layout
from hypergpu.workloads.networks.task import Classification

_SAMPLES_OF_EACH = 2
"""Samples of every other node's shard that an update is tried on in a round."""


class DefendedRounds:
    """A defence, with what it remembers of nodes."""

    def __init__(
        self, setting: Setting, workload: Classification, layout: Layout, shards: NodeShards
    ) -> None:
        """Remember nothing yet."""
        self._defend = ROUND_DEFENCES[setting.defence]
        self._uses_gains = setting.defence == OTHERS_SAMPLES
        self._workload, self._layout, self._shards = workload, layout, shards
        self._groups = layer_groups(layout)
        self._draws = np.random.default_rng([7, setting.seed])
        self._sums, self._rounds = np.zeros(setting.nodes), np.zeros(setting.nodes)

    def aggregate(
        self, number: int, base: Float32s, slots: Sequence[int], rows: Rows, votes: Weights
    ) -> Float32s:
        """The vector that is folded.

        Args:
            number: Of the round.
            base: The model that the updates are of.
            slots: Of their nodes.
            rows: ``float32[updates, parameters]``, clipped by the product's rule.
            votes: ``float64[updates]``, of sum 1.
        """
        gains = np.zeros(len(rows))
        if self._uses_gains:
            gains = self._averages(self._gains(number, base, slots, rows), slots)
        return self._defend(RoundUpdates(rows, votes, self._groups, gains, self._draws))

    def _averages(self, gains: Weights, slots: Sequence[int]) -> Weights:
        at = list(slots)
        self._sums[at] += gains - gains.mean()
        self._rounds[at] += 1
        averages: Weights = self._sums[at] / self._rounds[at]
        return averages

    def _gains(self, number: int, base: Float32s, slots: Sequence[int], rows: Rows) -> Weights:
        """What each update takes off the loss of samples of the other nodes' shards."""
        shards = self._shards.of_round(number)
        places = np.stack(
            [
                np.concatenate(
                    [self._draws.choice(shards[it], _SAMPLES_OF_EACH) for it in slots if it != slot]
                )
                for slot in slots
            ]
        )
        before, after = (
            self._shards.own_losses(self._workload, stacked_models(self._layout, models), places)
            for models in (np.repeat(base[None], len(rows), axis=0), base - rows)
        )
        return (before - after).astype(np.float64)


def defended_rounds(
    setting: Setting, workload: Classification, layout: Layout, shards: NodeShards
) -> DefendedRounds | None:
    """The defence of rounds that a setting names; None: it names none."""
    if setting.defence not in ROUND_DEFENCES:
        return None
    return DefendedRounds(setting, workload, layout, shards)
