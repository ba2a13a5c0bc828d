"""How much an update counts in the fold, and is paid: weights learned from held-out data.

Theory of operation. The evaluator differentiates the held-out loss at the model that a round starts
from, while its nodes train. When the round closes each update is held against that gradient: its
*influence* is their cosine, taken between secret sketches of all coordinates. Three things follow.

- A *clip*: no update moves the model by more than the median one does for as many steps.
- A *weight* of each node, kept across rounds: it rises by influence and falls by the lack of it.
  A step is as large as the round's influences tell anything: where the loss hardly falls any more
  they are noise. Half of the median influence is the bar: honest nodes of different data differ
  that much. Influences depend on what the model lacks: a node whose data are rare is pushed down
  while the others serve the model well and back up as soon as it lacks those data.
- A *gate*: an update far beyond the spread of the others counts nothing in this round.

Updates that are copies of each other have less than one vote together; one that is far longer than
the others has none. A low weight is never for good: it drifts back slowly, and grows by work that
helps. Only useless updates in a row end in a ban, which an operator can lift. Measured against the
attacks of the literature in `benchmarks/trust.py`; other rules: docs/decisions/0023.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.own_evidence import OwnEvidence
from hypergpu.ids import NodeId

WHOLE = 65_536
"""A factor of 1, and the weight of a node of which nothing is known at the job's beginning."""
WEIGHT_MOST = WHOLE * 3 // 2
"""Credit that a node can gather: it keeps full votes through a few unlucky rounds."""
FULL_FROM = 0.7
"""The part of a whole weight that already gives a full vote."""
NEWCOMER = WHOLE // 4
"""The weight of a node that comes later than `FIRST_ROUNDS`."""
FIRST_ROUNDS = 3
"""Rounds in which steps are larger: influences are clearest there, and attackers unknown."""
FIRST_TIMES = 3.0
STEP = 0.3
BAR = 0.5
RETURN = 0.1
"""The part of its way back to a whole weight that each weight goes in a round that tells all it
can; less in others, so that who was found out does not come back by waiting.
"""
FADE = 0.97
"""What a round leaves of the strongest signal, against which the next ones are held."""
SIGNAL_LEAST = 0.1
"""The strongest signal never fades below this part of the strongest of all rounds."""
INFLUENCE_MOST = 2.0
LENGTH_MOST = 4.0
"""An update so many times as long as the median one has no vote at all."""
NODES_LEAST = 3
"""With fewer nodes there is no majority to hold an update against."""
GATE_SPREADS = 3.0
GATE_BAR = 0.25
GATE_SIGNAL = 0.3
_MAD = 1.48
"""The median distance to the median, times this, is the standard deviation of a normal spread."""
BAN_AFTER = 5
"""A node gets no more work after so many useless updates in a row."""
EXPLODED = 2.0
"""A held-out loss beyond so many times the last good one, and 1 more, is no training."""
ROLLBACKS_MOST = 3


class UpdateEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Measures of one update, over all of its coordinates."""

    node: NodeId
    inner_steps: int
    norm: float
    """Euclidean norm of the pseudo-gradient."""
    statistics_norm: float
    """Distance of its statistics from those of the base."""
    influence: float | None = None
    """Cosine with the gradient of the held-out loss; None where that is not known."""
    gain: float = 0.0
    """Inner product with that gradient: what the loss falls by, to first order."""
    nearest: float = 1.0
    """Cosine with the most alike update of another node."""
    group: int = 0
    """Updates of one number are copies of each other; 0: of none."""
    is_repeat: bool = False
    """Whether it is an update that some node sent in an earlier round."""
    is_sound: bool = True
    """Whether it can be part of a sum."""
    is_sparse: bool = False
    """Whether its codec is a sparse one: it then has a part of its coordinates only."""
    common_norms: dict[NodeId, float] = {}
    """Its length over the coordinates that each update of the other kind of codec sends."""
    own: OwnEvidence | None = None
    """Against samples of its own shard; None: that was not measured."""

    def norm_beside(self, other: "UpdateEvidence") -> float:
        """Its length over the coordinates that both updates send."""
        return self.common_norms.get(other.node, self.norm)


def codec_peers(own: UpdateEvidence, round_: Sequence[UpdateEvidence]) -> list[UpdateEvidence]:
    """Updates that one is held against: those of its kind of codec, dense or sparse, where there
    are enough, else all.
    """
    peers = [each for each in round_ if each.is_sparse == own.is_sparse]
    return peers if len(peers) >= NODES_LEAST else list(round_)


def whole_weighing(memory: TrustMemory) -> Weighing:
    """Count every update in full: the plain mean, which one liar can ruin."""
    return Weighing(clips={}, votes={}, reasons={}, memory=memory)


def weigh_updates(memory: TrustMemory, round_: Sequence[UpdateEvidence]) -> Weighing:
    """Weigh the updates of a closed round.

    Args:
        memory: What earlier rounds taught.
        round_: Evidence of each update, in slot order.

    Returns:
        Votes and clips in 1/65,536, with the reason of each vote that is not full.
    """
    clips = clip_factors(round_)
    memory = _learn(memory, round_, clips)
    votes = {each.node: _vote(memory.weights[each.node]) for each in round_}
    reasons = {
        node: f"its updates helped less than others': weight {memory.weights[node] / WHOLE:.2f}"
        for node, vote in votes.items()
        if vote < WHOLE
    }
    useless = dict((*far_below(memory, round_), *unusable(round_, clips)))
    for node, why in useless.items():
        votes[node], reasons[node] = 0, why
    counts = Counter(each.group for each in round_ if each.group)
    for each in round_:
        if counts[each.group] > 1:
            votes[each.node] //= counts[each.group] ** 2
            reasons[each.node] = f"{counts[each.group]} nodes sent copies of one update"
    return Weighing(
        clips={node: clip for node, clip in clips.items() if clip < WHOLE},
        votes={node: vote for node, vote in votes.items() if vote < WHOLE},
        reasons=reasons,
        memory=memory,
        useless=tuple(sorted(useless)),
    )


def without_trust(memory: TrustMemory, node: NodeId) -> TrustMemory:
    """The memory with a node as one that has just come."""
    noise = {each: each_noise for each, each_noise in memory.noise.items() if each != node}
    weights = {**memory.weights, node: NEWCOMER}
    honesty = {each: part for each, part in memory.honesty.items() if each != node}
    averages = {each: part for each, part in memory.averages.items() if each != node}
    pay = memory.pay
    if pay is not None:
        pay = msgspec.structs.replace(
            pay,
            averages={each: parts for each, parts in pay.averages.items() if each != node},
            debts={each: debt for each, debt in pay.debts.items() if each != node},
        )
    return msgspec.structs.replace(
        memory, weights=weights, noise=noise, honesty=honesty, averages=averages, pay=pay
    )


def ban_reason(useless: int, why: str) -> str:
    """Why a node is banned after so many useless updates in a row; empty: it is not.

    A low weight alone bans nobody: an honest node of rare data may have one for a while.
    """
    if useless < BAN_AFTER:
        return ""
    return f"banned: none of its last {useless} updates was of use; the last one: {why}"


def known_votes(memory: TrustMemory, nodes: Sequence[NodeId]) -> dict[NodeId, int]:
    """Shares of full pay by what is known of the nodes already, for updates that nothing was found
    of.
    """
    first = WHOLE if memory.rounds < FIRST_ROUNDS else NEWCOMER
    parts = memory.honesty if memory.by_own_samples else memory.weights
    return {node: _vote(parts.get(node, first)) for node in nodes}


def clip_factors(round_: Sequence[UpdateEvidence]) -> dict[NodeId, int]:
    """Shrink each update to the median length for its number of steps; 0 for one without length.

    Lengths are compared among updates of one kind of codec, or over what both send.
    """
    sound = [each for each in round_ if each.is_sound]
    lengths = usual_lengths(round_)
    return {
        each.node: min(
            _shrink(each.norm, lengths[each.node]),
            _shrink(each.statistics_norm, _bound([(it.statistics_norm, 1.0) for it in sound])),
        )
        if each.is_sound
        else 0
        for each in round_
    }


def usual_lengths(round_: Sequence[UpdateEvidence]) -> dict[NodeId, float]:
    """The median length for as many steps as each sound update has; 0: none has a length."""
    sound = [each for each in round_ if each.is_sound]
    return {each.node: _bound(_lengths(each, codec_peers(each, sound))) for each in sound}


def _lengths(own: UpdateEvidence, peers: Sequence[UpdateEvidence]) -> list[tuple[float, float]]:
    """Lengths of peers, as if they had sent what the update sends, with their reaches."""
    lengths = []
    for each in peers:
        common = own.norm_beside(each)
        whole = own.norm / common if common > 0 else 0.0
        lengths.append((each.norm_beside(own) * whole, _reach(own, each)))
    return lengths


def _reach(own: UpdateEvidence, other: UpdateEvidence) -> float:
    """How much longer than another's an update may be: steps that agree add up, others half so."""
    ratio = max(1, own.inner_steps) / max(1, other.inner_steps)
    return ratio if ratio > 1 else math.sqrt(ratio)


def _bound(lengths: Sequence[tuple[float, float]]) -> float:
    known_lengths = [length * reach for length, reach in lengths if length > 0]
    return median(known_lengths) if known_lengths else 0.0


def _shrink(length: float, bound: float) -> int:
    return WHOLE if length <= bound else int(WHOLE * bound / length)


def _learn(
    memory: TrustMemory, round_: Sequence[UpdateEvidence], clips: Mapping[NodeId, int]
) -> TrustMemory:
    """Move each node's weight by its influence."""
    first = WHOLE if memory.rounds < FIRST_ROUNDS else NEWCOMER
    weights = {each.node: memory.weights.get(each.node, first) for each in round_}
    after = msgspec.structs.replace(
        memory, weights={**memory.weights, **weights}, rounds=memory.rounds + 1, strength=0.0
    )
    known_updates = [each for each in round_ if each.influence is not None and each.norm > 0]
    if len(known_updates) < NODES_LEAST:
        return after
    size = median(abs(each.gain) * clips[each.node] / WHOLE for each in known_updates)
    usual = {
        each.node: median(abs(it.influence or 0.0) for it in codec_peers(each, known_updates))
        for each in known_updates
    }
    if not (size > 0 and min(usual.values()) > 0 and math.isfinite(size)):
        return after
    most = max(memory.signal_most, size)
    signal = max(size, memory.signal * FADE, SIGNAL_LEAST * most)
    strength = size / signal
    step = STEP * strength * (FIRST_TIMES if memory.rounds < FIRST_ROUNDS else 1.0)
    parts = {
        each.node: max(
            -INFLUENCE_MOST, min(INFLUENCE_MOST, (each.influence or 0.0) / usual[each.node])
        )
        for each in known_updates
    }
    bar = BAR * max(0.0, median(parts.values()))
    for node, part in parts.items():
        moved_weight = weights[node] / WHOLE + step * (part - bar)
        moved_weight += RETURN * strength * (1 - weights[node] / WHOLE)
        weights[node] = min(WEIGHT_MOST, max(0, round(WHOLE * moved_weight)))
    return msgspec.structs.replace(
        after,
        weights={**memory.weights, **weights},
        signal=signal,
        signal_most=most,
        strength=strength,
    )


def _vote(weight: int) -> int:
    return min(WHOLE, round(weight / FULL_FROM))


def far_below(memory: TrustMemory, round_: Sequence[UpdateEvidence]) -> list[tuple[NodeId, str]]:
    """Updates whose influence is far below the spread of the others', where that is clear."""
    known_updates = [each for each in round_ if each.influence is not None]
    if len(known_updates) < NODES_LEAST or memory.strength < GATE_SIGNAL:
        return []
    useless = []
    why = "its influence on the held-out loss is {:.2f}, where the round's median is {:.2f}"
    for each in known_updates:
        influences = [it.influence or 0.0 for it in codec_peers(each, known_updates)]
        usual, own = median(influences), each.influence or 0.0
        spread = _MAD * median(abs(influence - usual) for influence in influences)
        limit = min(usual - GATE_SPREADS * spread, GATE_BAR * usual)
        if usual > 0 and own < limit:
            useless.append((each.node, why.format(own, usual)))
    return useless


def unusable(
    round_: Sequence[UpdateEvidence], clips: Mapping[NodeId, int]
) -> list[tuple[NodeId, str]]:
    """Updates that no honest work makes, whatever they are worth, with the reason."""
    return [*_too_long(clips), *_useless(round_)]


def _too_long(clips: Mapping[NodeId, int]) -> list[tuple[NodeId, str]]:
    """Updates that no honest work makes so long; `_useless` says why others are clipped to 0."""
    least = WHOLE / LENGTH_MOST
    why = "it is {:.0f} times as long as updates of as many steps are"
    return [
        (node, why.format(WHOLE / max(1, clip))) for node, clip in clips.items() if clip < least
    ]


def _useless(round_: Sequence[UpdateEvidence]) -> list[tuple[NodeId, str]]:
    """Updates that cannot be folded, empty ones where others are not, and those sent before."""
    is_work = any(each.norm > 0 for each in round_)
    overflow = [(each.node, "its values are too large") for each in round_ if not each.is_sound]
    empty = [(each.node, "it is empty") for each in round_ if is_work and each.norm == 0]
    repeats = [(each.node, "it repeats an earlier update") for each in round_ if each.is_repeat]
    return [*overflow, *empty, *repeats]


def is_exploded(memory: TrustMemory, loss: float | None) -> bool:
    """Whether a model's held-out loss says that it is no use to train on.

    Args:
        memory: With the loss of the newest model that was.
        loss: None: it is not finite.
    """
    if memory.loss is None:
        return False
    return loss is None or loss > EXPLODED * abs(memory.loss) + 1.0


def is_hopeless(memory: TrustMemory) -> bool:
    """Whether going back has not helped so often that a user should look."""
    return memory.rollbacks >= ROLLBACKS_MOST


def blame(
    memory: TrustMemory, contributors: Sequence[UpdateEvidence]
) -> tuple[TrustMemory, tuple[NodeId, ...]]:
    """Take their votes from those whose updates raise the loss of a model that exploded.

    Args:
        memory: What earlier rounds taught.
        contributors: Evidence of the updates that made the model, against its own gradient.

    Returns:
        The memory after a rollback, and the suspects.
    """
    suspects = tuple(
        each.node for each in contributors if each.influence is not None and each.influence < 0
    )
    weights = {**memory.weights, **dict.fromkeys(suspects, 0)}
    return (
        msgspec.structs.replace(memory, weights=weights, rollbacks=memory.rollbacks + 1),
        suspects,
    )
