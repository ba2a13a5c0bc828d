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


class ReasonValues(msgspec.Struct, frozen=True):
    """What the reason of a node's part tells that stands in no other field of it."""

    up_bits_per_s: float
    """Goodput of the node's uplink; 0: not known."""
    deadline_ms: Milliseconds
    """Deadline of the round; 0: none."""
    why: str
    """The rest, in parentheses at its end; empty: none."""


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
    """Time that the finished update waits, so that uploads do not all begin at once."""
    connections: int = 1
    """Connections that move the model and the update."""
    batch_size: int = 0
    """Samples in each of the node's steps; 0: as the job states."""
    micro_batch: int = 0
    """Most samples in the device's memory at once; 0: as the job states."""
    checkpoints_activations: bool = False
    """Whether the node computes activations again, rather than keep them."""
    prefetch_steps: int = 0
    """Inner steps of the next round that the node may take while this round's updates move."""
    step_us: int = 0
    """Time of a step in the node's forecast; 0: not known."""
    full_forecast_ms: Milliseconds = Milliseconds(0)
    """Forecast of the node's whole work, where it does less to be compared with another node; 0: it
    does all of it.
    """
    rounds: int = 1
    """Rounds that the node's lease may last. No round waits for a lease over more than one."""
    learning_rate: float = 0.0
    """Peak rate of steps with another batch than the job's; 0: as the job states."""
    reason_values: ReasonValues | None = None
    """Values that ``reason`` is made of beside these; None: planned by a version that kept none."""

    def batch(self, stated_batch: int) -> int:
        """Samples in each of the node's steps, in a job that states a batch of so many."""
        return self.batch_size or stated_batch


class BatchGrowth(msgspec.Struct, frozen=True):
    """Knowledge of one node's batches that are larger than the job's, see `batches`."""

    size: int = 0
    """The batch that is kept; 0: the job's."""
    sample_us: float = 0.0
    """Time of a sample with that batch, the mean of its newest updates."""
    updates: int = 0
    """Updates with that batch that were measured."""
    samples: int = 0
    """Samples of the newest of these updates."""
    trial: int = 0
    """The larger batch that is tried; 0: none."""
    tries_us: tuple[float, ...] = ()
    """Time of a sample in each update of the trial."""
    next_round: int = 0
    """No batch is tried before that round."""
    failures: int = 0
    """Trials in a row that were no faster."""


class NodeMemory(msgspec.Struct, frozen=True):
    """Memory that a plan keeps of a node, so that nothing flaps."""

    codec: str
    """Codec of the node's last plan."""
    lighter_rounds: int = 0
    """Plans in a row in which a finer codec would have fitted its byte budget easily."""
    rests_until_round: int = 0
    """The node is excluded from all rounds before this one."""
    retries: int = 0
    """Exclusions in a row; each waits longer."""
    inner_steps: int = 0
    """Inner steps of the node's last plan, before the job's end cut them; 0: it had none yet."""
    connections: int = 0
    """Connections of the node's last plan; 0: it had none yet."""
    cut_rounds: int = 0
    """Rounds in a row that closed without the node's update: late, handed back or lost. An update
    that was damaged on the coordinator's disk does not count.
    """
    is_awaited: bool = False
    """Whether rounds wait for the node."""
    strayed_rounds: int = 0
    """Plans in a row in which the node did not quite fill the round."""
    away_rounds: int = 0
    """Plans in a row in which the node was no candidate."""
    batch_size: int = 0
    """Batch of the node's last plan; 0: as the job states."""
    proven_step_us: float = 0.0
    """Time of the node's newest update for each step of the job's own batch, by the coordinator's
    clock and with moving bytes; 0: no update has come.
    """
    growth: BatchGrowth = BatchGrowth()
    proven_steps: float = 0.0
    """Steps of that update; 0: not known."""


class PlanMemory(msgspec.Struct, frozen=True):
    """Memory that a plan keeps for the next one."""

    inner_steps: int
    """The median node's H, which single nodes' H spread around."""
    changed_at_round: int
    is_sparse: bool
    nodes: dict[NodeId, NodeMemory] = {}
    crowded_rounds: int = 0
    """Plans in a row in which updates agreed too little for so many inner steps."""
    drift: float = 1.0
    """Factor of the median node's H by the agreement of updates."""
    span_ms: Milliseconds = Milliseconds(0)
    """Span that a round is made for; 0: the plan was made before anything was known."""
    stretched_ms: Milliseconds = Milliseconds(0)
    """The same span, longer where a node that the round waits for needs more."""
    dense_ms: Milliseconds = Milliseconds(0)
    """Time for which the median node moved a dense update and delta when H was last changed."""
    dense_rounds: int = 0
    """Sparse plans in a row in which dense codecs would have fitted."""
    down: str = ""
    """Codec of the delta in this plan."""
    noise_share: float = 1.0
    """Largest batch over the job's that costs next to no progress a sample, see `agreement`."""


class RoundPlan(msgspec.Struct, frozen=True):
    """The plan of one round."""

    round: int
    nodes: dict[NodeId, NodePlan]
    resting: dict[NodeId, str]
    """Nodes that are there and have no part in the round, or are paused, with the reason."""
    deadline_ms: Milliseconds
    """Time after the round's opening; 0: no deadline is planned. A round of ``aware`` then gets one
    by the time that its quorum takes, any other waits for everybody.
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
    """Result of a participant in the round before."""

    plan: NodePlan
    took_ms: Milliseconds
    """Time from the round's opening until the update was in; 0: it never was."""
    is_lapsed: bool = False
    """Whether a lease over several rounds ended with that result."""
    compute_ms: Milliseconds = Milliseconds(0)
    """Time for which the node computed, by its own statement; 0: not known."""


class MemoryUse(msgspec.Struct, frozen=True):
    """Memory of a device that a job's steps take, by the workers' own measure."""

    before_bytes: Bytes
    """Bytes before the step: parameters and all else that stays."""
    sample_bytes: Bytes
    """Bytes at the step's peak for each sample that was in memory at once, gradients included."""


class MemoryFit(msgspec.Struct, frozen=True):
    """Settings that fit a member's steps into its device's memory, see `memory_fit`."""

    micro_batch: int = 0
    """Most samples in memory at once; 0: nothing says that a whole batch is too much."""
    checkpoints_activations: bool = False
    why: str = ""
    """Reason of the micro-batch, for people."""
    shortage: str = ""
    """Reason why the member gets no work in this job: not even one sample fits; empty: one does."""


class PlanRequest(msgspec.Struct, frozen=True):
    """Everything that a plan may depend on but the readings and the sizes of codecs."""

    round: int
    at_ms: Milliseconds
    spec: JobSpec
    candidates: dict[NodeId, Slot]
    """Nodes that are there and not leaving, in slot order."""
    samples_done: Samples
    samples_total: Samples
    """Samples that the job is to process in all."""
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
    """Payload rate of the coordinator's own line towards it; 0: not known."""


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
