"""Settings of a fine-tuning through a ring of stages, as its user states them."""

import msgspec

from hypergpu.optimizer import SCHEDULES, OptimizerRule, schedule_share
from hypergpu.tensors.hidden_states import STATE_CODECS

TRAINING_ROWS = "training-rows"
"""Name of the file of token rows among those of a request; no node gets it."""
HELD_OUT_ROWS = "held-out-rows"
"""The same for rows that are held out, whose loss is measured after each round."""
MODES = ("b", "full")
RINGS_MOST = 8
"""Rings of a training at most."""
_STEPS_MOST = 10_000_000
_ROWS_MOST = 65_536


class RingTraining(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that a ring trains before it answers."""

    rounds: int
    """Rounds in all: a checkpoint is stored at the end of each."""
    inner_steps: int
    """Optimizer steps of a round."""
    batch_rows: int
    """Rows of a step."""
    micro_rows: int = 1
    """Rows that go around the ring together."""
    seed: int = 0
    """Seed of the order of rows."""
    mode: str = "b"
    """``b``: A is drawn from the seed and B is trained; ``full``: both are."""
    rank: int = 8
    alpha: int = 16
    targets: str = "all-linear"
    adapter_seed: int = 0
    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float = 0.0
    """Longest gradient of a step, of all stages together; 0: any."""
    gradient_codec: str = "int8o"
    """Form in which gradients of hidden states travel, one of `STATE_CODECS`."""
    any_line: bool = False
    """Whether it begins where the lines of its nodes are forecast to be too slow."""
    rings: int = 1
    """Rings on nodes of their own, each of which trains rows of its own; what they trained is
    folded after each round.
    """
    outer_learning_rate: float | None = None
    """Rate of the outer step of several rings, as of every training; None: see `outer_momentum`."""
    outer_momentum: float | None = None
    """Its momentum. Where neither is stated, both are chosen for each round."""

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.rounds * self.inner_steps

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return -(-self.batch_rows // self.micro_rows)

    @property
    def rule(self) -> OptimizerRule:
        """The optimizer; its gradients are clipped by whoever knows those of all stages."""
        return OptimizerRule(
            name="adamw",
            weight_decay=self.weight_decay,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
        )

    def rate_of(self, step: int) -> float:
        """Learning rate of a step, from 0 on."""
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.learning_rate * warmup * schedule_share(self.schedule, step / self.steps)

    def faults(self) -> tuple[tuple[bool, str, str], ...]:
        """Fields with whether each is right, and the rule."""
        return (
            (
                min(self.rounds, self.inner_steps) > 0 and self.steps <= _STEPS_MOST,
                "training.rounds and training.inner_steps",
                f"1 at least, and {_STEPS_MOST:,} steps in all at most",
            ),
            (
                0 < self.micro_rows <= self.batch_rows <= _ROWS_MOST,
                "training.batch_size and inner.micro_batch",
                f"1 to {_ROWS_MOST} rows a step, and no more of them at a time",
            ),
            (0 < self.rings <= RINGS_MOST, "stages.rings", f"1 to {RINGS_MOST}"),
            (
                (self.outer_learning_rate is None or 0 < self.outer_learning_rate <= 10)
                and (self.outer_momentum is None or 0 <= self.outer_momentum < 1),
                "outer",
                "learning_rate above 0, at most 10, and momentum from 0 to below 1",
            ),
            (self.mode in MODES, "options.mode", f"one of {', '.join(MODES)}"),
            (0 < self.rank <= 1024 and self.alpha > 0, "options.rank", "1 to 1024, alpha above 0"),
            (0 < len(self.targets) <= 1_000, "options.targets", "1 to 1000 letters"),
            (0 < self.learning_rate <= 10, "inner.learning_rate", "above 0, at most 10"),
            (self.schedule in SCHEDULES, "inner.schedule", f"one of {', '.join(SCHEDULES)}"),
            (
                0 <= self.warmup_steps <= self.steps,
                "inner.warmup_steps",
                "0 to the number of steps",
            ),
            (
                0 <= self.weight_decay <= 1
                and 0 <= self.beta1 < 1
                and 0 <= self.beta2 < 1
                and 0 < self.epsilon <= 1,
                "inner",
                "weight_decay and epsilon up to 1, beta1 and beta2 below 1",
            ),
            (0 <= self.clip_norm < 1e9, "inner.clip_norm", "0 to below 1,000,000,000"),
            (
                self.gradient_codec in STATE_CODECS,
                "stages.gradient_codec",
                f"one of {', '.join(STATE_CODECS)}",
            ),
        )
