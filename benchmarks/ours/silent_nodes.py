"""What nodes that heartbeat and never work cost a job, in virtual time."""

from msgspec.structs import replace

from coordinator.core.training.job.state import Phase
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, RoundRule, TrainingSettings, Trust
from hypergpu.units import Milliseconds
from netsim.link import COORDINATOR_LINK
from netsim.network.world import NodeDescription, SilentFault, WorldDescription
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import SimulatedWorld, TransferSizes, drawn_description

JOB = JobId("job-0")
_CODECS = {
    "fp32": 4_000_000,
    "bf16": 2_000_000,
    "int8": 1_000_000,
    "int4": 510_000,
    "topk256": 130_000,
    "topk64": 30_000,
    "topk16": 8_000,
}
"""Sizes for a million parameters."""


def silent_nodes_slowdown(seed: int, *, strategy: str = "diloco", nodes: int = 20) -> float:
    """How many times as long a sample takes with 30 % of a job's nodes silent as without them.

    The job has 50 rounds. Links and speeds are drawn; no deadline is stated.
    """
    silent = round(0.3 * nodes)
    spec = job_spec(strategy, nodes=nodes - silent, rounds=50)
    with_silent = run_world(spec, seed, honest=nodes - silent, silent=silent)
    without = run_world(spec, seed, honest=nodes - silent)
    sample_times_ms = [each.virtual_ms / each.samples[JOB] for each in (with_silent, without)]
    return sample_times_ms[0] / sample_times_ms[1]


def job_spec(strategy: str, *, nodes: int, rounds: int, deadline_ms: int = 0) -> JobSpec:
    """A job that states a deadline, or none."""
    spec = JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=50, batch_size=8, nodes=nodes),
        round=RoundRule(deadline_ms=deadline_ms),
        # Pairs train the same samples, and a larger fleet has more of them.
        trust=Trust(duplicates="none"),
        evaluation=Evaluation(every=10),
    )
    return with_strategy(spec, strategy) if strategy != "diloco" else spec


def run_world(
    spec: JobSpec, seed: int, *, honest: int, silent: int = 0, from_ms: int = 0
) -> WorldOutcome:
    """Run the job over so many honest nodes and silent ones beside them, to its end.

    Args:
        spec: The job.
        seed: Of the honest nodes' links and speeds, which silent ones do not change.
        honest: Number of nodes that work.
        silent: Number of nodes that are silent.
        from_ms: When they begin to be so; until then they work.

    Raises:
        AssertionError: The job did not finish, or an invariant broke.
    """
    world = SimulatedWorld(
        seed=seed,
        nodes=honest,
        jobs=(spec,),
        sizes=TransferSizes(_CODECS["int4"], _CODECS["int4"], _CODECS["fp32"], _CODECS),
        step_ms=(100, 300),
        checks_each_event=False,
        limit_ms=Milliseconds(86_400_000),
    )
    description = drawn_description(world)
    outcome = Simulation(
        replace(world, description=_with_silent(description, silent, from_ms))
    ).run()
    if outcome.violations or outcome.phases != {JOB: Phase.FINISHED}:
        raise AssertionError("; ".join(outcome.violations) or str(outcome.phases))
    return outcome


def _with_silent(world: WorldDescription, silent: int, from_ms: int) -> WorldDescription:
    names = [NodeId(f"silent-{number}") for number in range(silent)]
    shape = replace(world.nodes[0].shape, link=COORDINATOR_LINK)
    nodes = tuple(NodeDescription(name=name, group="silent", shape=shape) for name in names)
    faults = tuple(SilentFault(nodes=name, at_ms=Milliseconds(from_ms)) for name in names)
    return replace(world, nodes=(*world.nodes, *nodes), faults=faults)
