"""What a job's rounds taught of its nodes' updates, and how much each update of a round counts."""

import msgspec

from hypergpu.ids import NodeId


class DuplicateMemory(msgspec.Struct, frozen=True):
    """What secret duplicates of shards taught, see `coordinator.core.training.trust.duplicates`."""

    matches: dict[NodeId, int] = {}
    """Pairs that matched."""
    doubts: dict[NodeId, int] = {}
    """Doubts of each node that has some; 24 take the whole vote."""
    likeness: tuple[float, ...] = ()  # of the newest pairs
    due: frozenset[NodeId] = frozenset()  # checked in their next round


class NoiseEvidence(msgspec.Struct, frozen=True):
    """What a node's updates had in common with others' and with the gradient, see
    `coordinator.core.training.trust.noise`: averages in which newer rounds count more.
    """

    nearest: float
    """Cosine with the most alike update of another node."""
    influence: float
    """Cosine with the gradient of the held-out loss."""
    rounds: int


class PayMemory(msgspec.Struct, frozen=True):
    """What rounds taught of the pay that nodes earn, see
    `coordinator.core.training.trust.pay_share`.
    """

    averages: dict[NodeId, tuple[int, ...]] = {}
    """Averages over rounds, in thousandths of the usual: of the gain in trials, of the cosine with
    own samples' gradient, and of the same in each group of layers.
    """
    debts: dict[NodeId, int] = {}
    """Faults that later rounds pay off, in thousandths of one, of those who owe any."""
    fall_most: float = 0.0
    """The most that the usual update of a round took off the loss of its own samples."""


class TrustMemory(msgspec.Struct, frozen=True):
    """What a job's rounds taught of its nodes, see `coordinator.core.training.trust.weights`."""

    weights: dict[NodeId, int] = {}
    """Learned weights in 1/65,536 of a whole one."""
    rounds: int = 0
    """Rounds that were weighed."""
    signal: float = 0.0
    """The strongest influence of late, which fades."""
    signal_most: float = 0.0
    strength: float = 0.0
    """The newest round's influences as a part of ``signal``, in [0, 1]."""
    loss: float | None = None
    """Held-out loss of the newest model that was of use; None: it is not known."""
    rollbacks: int = 0
    """Rollbacks in a row."""
    duplicates: DuplicateMemory = DuplicateMemory()
    fingerprints: dict[NodeId, tuple[str, ...]] = {}
    """Signs of each node's newest updates, in hexadecimal digits; the newest is the last."""
    noise: dict[NodeId, NoiseEvidence] = {}
    by_own_samples: bool = False
    """Whether updates are judged by samples of their own shards; False: by held-out ones alone, as
    in jobs that began before there was another rule.
    """
    honesty: dict[NodeId, int] = {}
    """What own samples taught of each node, in 1/65,536, see
    `coordinator.core.training.trust.honesty`.
    """
    averages: dict[NodeId, float] = {}
    """How much of the usual each node's updates did for own samples, averaged over rounds."""
    steepest: float = 0.0
    """The usual length of own samples' gradients when it was largest, which fades."""
    unseen: dict[NodeId, int] | None = None
    """Rounds in a row in which updates of a node were weighed by the memory alone, as the samples
    of others were drawn; None: a look counts for its own round alone, as in jobs that began before
    it counted for more.
    """
    use_least: int = 0
    """Part of a vote, in 1/65,536, that an honest update keeps however little use held-out samples
    see in it; 0 in jobs that began when that could take all of it.
    """
    step_length_most: float = 0.0
    """The longest usual update of any round, for one inner step; 0: none was weighed, or
    ``use_least`` is 0.
    """
    pay: PayMemory | None = None
    """None: pay is honesty times work, as in jobs that began before updates were tried."""


class Weighing(msgspec.Struct, frozen=True):
    """How much each update of a closed round counts, in 1/65,536."""

    clips: dict[NodeId, int]
    """Factors that shrink long updates, of those that are not whole; 0 leaves one out."""
    votes: dict[NodeId, int]
    """Shares of a vote, of those that are not full; 0 leaves one out."""
    reasons: dict[NodeId, str]
    """Why a vote is not a full one."""
    memory: TrustMemory
    """After the round."""
    useless: tuple[NodeId, ...] = ()
    """Those whose update of this round spoke clearly against them, whatever their weight."""
    rollback: str = ""
    """Why the job went back to the model before instead; empty: it did not."""
    no_evidence: str = ""
    """Why there was no held-out gradient: updates then count by the weights of before."""
    pay: dict[NodeId, int] | None = None
    """Shares of full pay, of those that are not full; None: the votes, as before jobs were judged
    by own samples.
    """
    pay_reasons: dict[NodeId, str] = {}
    """Why pay is not full, where ``pay`` is there."""

    @property
    def pay_shares(self) -> dict[NodeId, int]:
        """Shares of full pay, of those that are not full."""
        return self.votes if self.pay is None else self.pay
