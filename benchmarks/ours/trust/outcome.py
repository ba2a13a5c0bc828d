"""One simulated job: its setting, and the figures that it comes to."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np

from benchmarks.ours.trust.training import NODES, TRIAL_SAMPLES, HeldOutParts
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.quality import quality_of
from coordinator.core.training.trust.weights import WHOLE
from hypergpu.ids import NodeId
from hypergpu.statements import WHOLE_BPS
from hypergpu.tensors.layout import Flat
from hypergpu.units import Milliseconds

ROUNDS = 30
CODEC = "int4"
MODELS = ("mlp", "cnn")
LAST = 5
"""Rounds at the end whose accuracies are averaged."""
ROBUST, HELD_OUT, MEAN = "robust", "held-out", "mean"
"""The product's rule, its rule of before, and none."""
OWN_RULES = (ROBUST, HELD_OUT, MEAN)


class Setting(msgspec.Struct, frozen=True):
    """One job."""

    rule: str
    attack: str
    percent: int
    """Attackers among the nodes."""
    alpha: str
    """Concentration of the label skew; ``inf``: none."""
    seed: int
    model: str = "mlp"
    codec: str = CODEC
    """The updates' codec. Sparse ones go with the plain outer step, as in the product."""
    held_out: int = TRIAL_SAMPLES
    """Held-out samples that the rule sees."""
    nodes: int = NODES
    defence: str = ""
    """Against backdoors, on top of the rule; empty: none."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one job."""

    accuracy: float
    """In percent: the mean of the last `LAST` rounds."""
    honest_weight: float
    """Mean over rounds and honest nodes of their part of an equal share, 1 at most."""
    attackers_pay: float
    """Their share of all pay of the rounds from their first lie on."""
    honest_pay: float = 0.0
    """Mean over rounds and honest nodes of the part of full pay that they get."""
    rounds_to_ban: tuple[int, ...] = ()
    """Rounds until an attacker's vote is 0, for each of them; all rounds and 1 more: never."""
    honest_banned: int = 0
    rollbacks: int = 0
    refused: int = 0
    triggered: float = 0.0
    """Percent of held-out samples whose trigger works, where there is a backdoor."""


class JobTally:
    """Votes and pay of each slot, added up over rounds."""

    def __init__(self, attackers: Sequence[int], *, nodes: int = NODES, first_lie: int = 0) -> None:
        """Count nothing yet.

        Args:
            attackers: Their slots.
            nodes: How many there are.
            first_lie: Round before which attackers do honest work, for which they are rightly paid.
        """
        self._attackers = list(attackers)
        self._honest = [slot for slot in range(nodes) if slot not in attackers]
        self._nodes, self._first_lie = nodes, first_lie
        self._pay, self._pay_of_lies = np.zeros(nodes), np.zeros(nodes)
        self._rounds = np.zeros(nodes)
        self._shares: list[float] = []
        self._bans = dict.fromkeys(attackers, ROUNDS + 1)
        self.refused = self._rollbacks = 0

    def add(self, number: int, sent: Mapping[int, NodeId], weighing: Weighing) -> None:
        """Count one round of updates of some slots."""
        votes = np.zeros(self._nodes)
        for slot, node in sent.items():
            votes[slot] = weighing.votes.get(node, WHOLE)
            part = weighing.pay_shares.get(node, WHOLE)
            if not weighing.rollback:
                quality = quality_of(part, "", Milliseconds(0), Milliseconds(0))
                self._pay[slot] += quality.bps
                if number >= self._first_lie:
                    self._pay_of_lies[slot] += quality.bps
                self._rounds[slot] += 1
        for slot in self._attackers:
            if not votes[slot]:
                self._bans[slot] = min(self._bans[slot], number + 1)
        total = votes.sum()
        self._rollbacks += bool(weighing.rollback)
        if total and not weighing.rollback:
            shares = np.minimum(1, votes[self._honest] / total * len(self._honest))
            self._shares.append(float(shares.mean()))

    def outcome(self, accuracies: Sequence[float]) -> Outcome:
        """Figures of votes and pay."""
        total, honest = self._pay_of_lies.sum(), self._honest
        return Outcome(
            accuracy=100 * fmean(accuracies[-LAST:]),
            honest_weight=fmean(self._shares) if self._shares else 0.0,
            attackers_pay=float(self._pay_of_lies[self._attackers].sum() / total) if total else 0.0,
            honest_pay=float(
                self._pay[honest].sum() / WHOLE_BPS / max(1, self._rounds[honest].sum())
            ),
            rounds_to_ban=tuple(self._bans.values()),
            rollbacks=self._rollbacks,
            refused=self.refused,
        )


class ModelScores:
    """What the last models of a job score."""

    def __init__(self, parts: HeldOutParts, *, has_backdoor: bool) -> None:
        self._parts = parts
        self._has_backdoor = has_backdoor
        self.accuracies: list[float] = []
        self._triggered: list[float] = []

    def add(self, model: Flat) -> None:
        """Score one model."""
        with np.errstate(all="ignore"):
            self.accuracies.append(self._parts.scored.evaluate(model).metric("accuracy"))
            if self._has_backdoor:
                score = self._parts.triggered.evaluate(model)
                self._triggered.append(100 * score.metric("accuracy"))

    @property
    def triggered_percent(self) -> float:
        """How often the trigger works, over all models; 0 where that was not asked."""
        return fmean(self._triggered) if self._triggered else 0.0
