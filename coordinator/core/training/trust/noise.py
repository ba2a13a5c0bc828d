"""Updates that are noise: for rounds they agree with no other update and not with the gradient.

Two independent vectors have a cosine near 0. Honest updates agree with that of some other node, if
only because they start from one model, and with the held-out gradient wherever it lacks their data;
noise does neither. Both cosines are averaged over rounds, since a sketch tells a small one only
roughly. An honest node of rare data has at least one of the two.
"""

import math
from collections.abc import Sequence
from statistics import median

from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import NoiseEvidence, Weighing
from coordinator.core.training.trust.weights import NODES_LEAST, UpdateEvidence

ROUNDS_LEAST = 3
_KEEP = 0.8
"""Share of the average that each round leaves."""
_MARGIN = 1.1
_CLEAR = 1.5
"""Nothing is noise unless the median node agrees with another so many times as well as noise may:
honest updates of sparse codecs have few coordinates in common.
"""


def judge_noise(weighing: Weighing, round_: Sequence[UpdateEvidence], error: float) -> Weighing:
    """Take the votes of nodes that have sent noise for some rounds.

    Args:
        weighing: Of the round, otherwise.
        round_: Evidence of its updates.
        error: Standard error of a cosine between two sketches.
    """
    known_updates = [each for each in round_ if each.influence is not None and each.norm > 0]
    if len(known_updates) < NODES_LEAST:
        return weighing
    evidence = dict(weighing.memory.noise)
    for each in known_updates:
        evidence[each.node] = _after_round(evidence.get(each.node), each)
    limit = _MARGIN * error * math.sqrt(2 * math.log(len(known_updates)))
    if median(evidence[each.node].nearest for each in known_updates) < _CLEAR * limit:
        return replace(weighing, memory=replace(weighing.memory, noise=evidence))
    noise = [
        each.node
        for each in known_updates
        if (noise_evidence := evidence[each.node]).rounds >= ROUNDS_LEAST
        and noise_evidence.nearest < limit
        and noise_evidence.influence < error
    ]
    why = "its updates are noise: they agree with no other one and not with the held-out gradient"
    return replace(
        weighing,
        votes={**weighing.votes, **dict.fromkeys(noise, 0)},
        reasons={**weighing.reasons, **dict.fromkeys(noise, why)},
        pay=None if weighing.pay is None else {**weighing.pay, **dict.fromkeys(noise, 0)},
        pay_reasons={**weighing.pay_reasons, **dict.fromkeys(noise, why)},
        memory=replace(weighing.memory, noise=evidence),
    )


def _after_round(before: NoiseEvidence | None, update: UpdateEvidence) -> NoiseEvidence:
    influence = update.influence or 0.0
    if before is None:
        return NoiseEvidence(update.nearest, influence, 1)
    return NoiseEvidence(
        _KEEP * before.nearest + (1 - _KEEP) * update.nearest,
        _KEEP * before.influence + (1 - _KEEP) * influence,
        before.rounds + 1,
    )
