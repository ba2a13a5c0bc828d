"""The range of every number of a job file, and the choices of every text."""

from collections.abc import Mapping

import msgspec

from hypergpu.jobfile.spec import CODECS, SPARSE_CODECS, STRATEGIES
from hypergpu.optimizer import DECAY_SCOPES, OPTIMIZERS, SCHEDULES
from hypergpu.workloads.metrics import TARGET_MODES


class NumberRange(msgspec.Struct, frozen=True):
    """A range of numbers; ``least`` and ``most`` are in it unless said otherwise."""

    least: float
    most: float
    excludes_least: bool = False
    excludes_most: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` is in the range. Not a number and infinities never are."""
        is_above = value > self.least if self.excludes_least else value >= self.least
        is_below = value < self.most if self.excludes_most else value <= self.most
        return is_above and is_below

    def __str__(self) -> str:
        left_bracket = "(" if self.excludes_least else "["
        right_bracket = ")" if self.excludes_most else "]"
        return f"{left_bracket}{self.least:.15g}, {self.most:.15g}{right_bracket}"


SEED_MOST = 2**63 - 1  # what TOML's integers hold

LIMITS: Mapping[str, NumberRange] = {
    "training.rounds": NumberRange(1, 1_000_000),
    "training.inner_steps": NumberRange(1, 100_000),
    "training.batch_size": NumberRange(1, 65_536),
    "training.seed": NumberRange(0, SEED_MOST),
    "training.nodes": NumberRange(1, 10_000),
    "nodes.max": NumberRange(0, 10_000),
    "nodes.priority": NumberRange(-100, 100),
    "nodes.weight": NumberRange(1, 100),
    "inner.learning_rate": NumberRange(0, 100, excludes_least=True),
    "inner.weight_decay": NumberRange(0, 10),
    "inner.warmup_steps": NumberRange(0, 1_000_000_000),
    "inner.beta1": NumberRange(0, 1, excludes_most=True),
    "inner.beta2": NumberRange(0, 1, excludes_most=True),
    "inner.epsilon": NumberRange(0, 1, excludes_least=True),
    "inner.momentum": NumberRange(0, 1, excludes_most=True),
    "inner.muon_ratio": NumberRange(0, 100, excludes_least=True),
    "inner.clip_norm": NumberRange(0, 1e6),
    "inner.micro_batch": NumberRange(0, 65_536),
    "outer.learning_rate": NumberRange(0, 10, excludes_least=True),
    "outer.momentum": NumberRange(0, 1, excludes_most=True),
    "round.deadline_ms": NumberRange(0, 7 * 24 * 3_600_000),
    "round.quorum": NumberRange(0, 1, excludes_least=True),
    "round.connections": NumberRange(1, 16),
    "data.alpha": NumberRange(0, 1e6, excludes_least=True),
    "data.partitions": NumberRange(0, 100_000),
    "evaluation.every": NumberRange(1, 1_000_000),
    "evaluation.target": NumberRange(0, 1e9),
    "evaluation.samples": NumberRange(0, 1_000_000_000),
    "aware.utilisation": NumberRange(0.3, 0.99),
    "aware.inner_steps_max": NumberRange(1, 100_000),
    "aware.rounds_min": NumberRange(1, 1_000_000),
    "pay.unit_price": NumberRange(0, 1e24),
    "pay.escrow": NumberRange(0, 1e28),
    "pay.rounds_per_epoch": NumberRange(1, 1_000_000),
    "trust.token_share": NumberRange(0.5, 1),
}

CHOICES: Mapping[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "inner.schedule": SCHEDULES,
    "inner.optimizer": OPTIMIZERS,
    "inner.decay_scope": DECAY_SCOPES,
    "codec.up": CODECS,
    "codec.down": CODECS,
    "round.overlap": ("none", "eager"),
    "data.sharding": ("iid", "dirichlet"),
    "data.source": ("shared", "node"),
    "evaluation.target_mode": TARGET_MODES,
    "aware.sparsest": ("int4", *SPARSE_CODECS),
    "aware.batch_rate": ("scaled", "stated"),
    "trust.rule": ("robust", "mean"),
    "trust.duplicates": ("secret", "none"),
}

NAME_LENGTH_MOST = 64
