"""The request for a plan and the plan: who takes part in a round, with how much work, and why.

The journal holds plans (`RoundPlanned`), never the readings that they were made of.
"""

from collections.abc import Mapping

import msgspec

from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

FINEST = "int4"
"""Finest codec of updates and of deltas: nothing finer trains better, and int8 takes twice as much.
"""


class NodePlan(msgspec.Struct, frozen=True):
    """One participant's part of a round."""

    inner_steps: int
    codec: str
    reason: str
    """For people: ``H=80, int4, uplink 6 Mbit/s, forecast 31 s, deadline 42 s``."""
    forecast_ms: Milliseconds = Milliseconds(0)
    """Mean time from its assignment until its update is in; 0: nothing is known of the node."""
    spread_ms: Milliseconds = Milliseconds(0)
    """Mean deviation of that time."""
    upload_after_ms: Milliseconds = Milliseconds(0)
    """How long the finished update waits, so that uploads do not all begin at once."""
    connections: int = 1
    """To move the model and the update over."""
    batch_size: int = 0
    """Samples in each of its steps; 0: as the job states."""
    micro_batch: int = 0
    """Most of them in its device's memory at once; 0: as the job states."""
    checkpoints_activations: bool = False
    """Whether it computes activations again, rather than keep them."""
    prefetch_steps: int = 0
    """Inner steps of the next round that it may take while this one's updates are on their way."""
    step_us: int = 0
    """What its forecast takes each of its steps for; 0: not known."""
    full_forecast_ms: Milliseconds = Milliseconds(0)
    """Forecast of all that it was planned to do, where it does less to be compared with another;
    0: it does all.
    """
    rounds: int = 1
    """Rounds that its lease may last; of more than one, no round waits for it."""
    learning_rate: float = 0.0
    """Peak of its steps, of another batch than the job's; 0: as the job states."""

    def batch(self, stated_batch: int) -> int:
        """Samples in each of the node's steps, in a job that states a batch of so many."""
        return self.batch_size or stated_batch


class BatchGrowth(msgspec.Struct, frozen=True):
    """Knowledge of one node's batches that are larger than the job's, see `batches`."""

    size: int = 0
    """The batch that is kept; 0: the job's."""
    sample_us: float = 0.0
    """What a sample took with it, the mean of its newest updates."""
    updates: int = 0
    """How many updates of it were measured."""
    samples: int = 0
    """Samples of the newest of them."""
    trial: int = 0
    """The larger batch that is tried; 0: none."""
    tries_us: tuple[float, ...] = ()
    """What a sample took in the updates of the trial."""
    next_round: int = 0
    """No batch is tried before that round."""
    failures: int = 0
    """Trials in a row that were no faster."""


class NodeMemory(msgspec.Struct, frozen=True):
    """What a plan remembers of a node, so that nothing flaps."""

    codec: str
    """The level it was given last."""
    lighter_rounds: int = 0
    """Plans in a row in which a finer codec would have fitted its byte budget easily."""
    rests_until_round: int = 0
    """Excluded before that round."""
    retries: int = 0
    """Exclusions in a row; each waits longer."""
    inner_steps: int = 0
    """What it was given last, before the job's end cut anything short; 0: nothing yet."""
    connections: int = 0
    """What it was given last; 0: nothing yet."""
    cut_rounds: int = 0
    """Its rounds in a row that closed without its update, whatever became of it: late, handed back
    or lost. What was damaged on the coordinator's disk does not count.
    """
    is_awaited: bool = False
    """Whether rounds wait for it."""
    strayed_rounds: int = 0
    """Plans in a row in which it did not quite fill the round."""
    away_rounds: int = 0
    """Plans in a row of which it was no candidate."""
    batch_size: int = 0
    """What it was given last; 0: as the job states."""
    proven_step_us: float = 0.0
    """What its newest update took for each step of the job's own batch, by the coordinator's clock
    and bytes included; 0: none has come.
    """
    growth: BatchGrowth = BatchGrowth()
    proven_steps: float = 0.0
    """How many of those steps it had; 0: that is not known."""


class PlanMemory(msgspec.Struct, frozen=True):
    """What the next plan needs of this one."""

    inner_steps: int
    """The median node's H, which single nodes' H spread around."""
    changed_at_round: int
    is_sparse: bool
    nodes: dict[NodeId, NodeMemory] = {}
    crowded_rounds: int = 0
    """Plans in a row in which updates agreed too little for so many inner steps."""
    drift: float = 1.0
    """What the agreement of updates has made of the median node's H: a factor."""
    span_ms: Milliseconds = Milliseconds(0)
    """What a round is made to take; 0: the plan was made before anything was known."""
    stretched_ms: Milliseconds = Milliseconds(0)
    """The same with what it was made longer by for those who need more."""
    dense_ms: Milliseconds = Milliseconds(0)
    """What a dense update and delta took the median node to move when H was last changed."""
    dense_rounds: int = 0
    """Sparse plans in a row in which dense codecs would have fitted."""
    down: str = ""
    """Codec of the delta, as planned last."""
    noise_share: float = 1.0
    """Largest batch over the job's that costs next to no progress a sample, see `agreement`."""


class RoundPlan(msgspec.Struct, frozen=True):
    """A round as it is to be."""

    round: int
    nodes: dict[NodeId, NodePlan]
    resting: dict[NodeId, str]
    """Nodes that have no part in it though they are there, or are paused; with the reason."""
    deadline_ms: Milliseconds
    """After the round's opening; 0: none is planned. A round of ``aware`` then gets one from what
    its quorum takes, any other waits for everybody.
    """
    down: str
    """Codec of the delta that the round ends with."""
    is_sparse: bool
    """Whether the outer step is plain SGD, as sparse codecs need it, or Nesterov."""
    memory: PlanMemory
    reason: str
    updates_needed: int = 0
    """Quorum of the round as it opens with all of these nodes: so many updates may close it at its
    deadline. 0: a plan from before it was journalled.
    """


class NodeResult(msgspec.Struct, frozen=True):
    """What became of a participant in the round before."""

    plan: NodePlan
    took_ms: Milliseconds
    """From the round's opening until its update was in; 0: it never was."""
    is_lapsed: bool = False
    """Whether that was the end of a lease over several rounds."""
    compute_ms: Milliseconds = Milliseconds(0)
    """For which it computed, as it says; 0: not known."""


class MemoryUse(msgspec.Struct, frozen=True):
    """What a job's steps take of a device's memory, by the workers' own measure."""

    before_bytes: Bytes
    """Before the step: parameters and all else that stays."""
    sample_bytes: Bytes
    """At the step's peak, for each sample that was in memory at once; gradients are in it."""


class MemoryFit(msgspec.Struct, frozen=True):
    """How a member's steps are made to fit into its device's memory, see `memory_fit`."""

    micro_batch: int = 0
    """Most samples in memory at once; 0: nothing says that a whole batch is too much."""
    checkpoints_activations: bool = False
    why: str = ""
    """Reason of the micro-batch, for people."""
    shortage: str = ""
    """Why it gets no work in this job: not even one sample fits; empty: it does."""


class PlanRequest(msgspec.Struct, frozen=True):
    """Everything that a plan may depend on but the readings and the sizes of codecs."""

    round: int
    at_ms: Milliseconds
    spec: JobSpec
    candidates: dict[NodeId, Slot]
    """Nodes that are there and not leaving, in slot order."""
    samples_done: Samples
    samples_total: Samples
    """What the job is to process in all."""
    previous: PlanMemory | None = None
    results: dict[NodeId, NodeResult] = {}
    """Results of the round before."""
    agreement: float | None = None
    """Agreement of its updates: ``n |mean|^2 / mean(|update|^2)``, 1 if orthogonal, n if equal."""
    prefetched: dict[NodeId, int] = {}
    """Inner steps of this round that nodes may have taken already."""
    on_trial: frozenset[NodeId] = frozenset()
    """Candidates that the round does not wait for, as their updates did not come: they get work as
    others do, and shape nobody else's.
    """
    paused: dict[NodeId, str] = {}
    """Nodes of the job that are paused, with the reason: they rest."""
    fits: dict[NodeId, MemoryFit] = {}
    """Candidates whose memory limits their steps."""
    under_way: frozenset[NodeId] = frozenset()
    """Nodes with a lease over several rounds: no candidates, and remembered until it is over."""
    line_bits_per_s: int = 0
    """What the coordinator's own line carries towards it, headers left out; 0: not known."""


def opening_quorum(request: PlanRequest, plans: Mapping[NodeId, NodePlan]) -> int:
    """Quorum of a round that opens with these plans: leases over several rounds and nodes on trial
    count for none.
    """
    nodes = [n for n, plan in plans.items() if plan.rounds == 1 and n not in request.on_trial]
    return request.spec.round.updates_needed(len(nodes))


class ModelSizes(msgspec.Struct, frozen=True):
    """Bytes that move for a model, by codec."""

    update_bytes: dict[str, Bytes]
    """An update or a delta, for each codec."""
    model_bytes: Bytes
