"""How far forecasts of jobs are off: worlds in virtual time with churn and changing lines."""

import random
from typing import NamedTuple

from msgspec.structs import replace

from benchmarks.ours.adaptive.fleets import CODECS, job_spec
from coordinator.core.training.job.state import Phase
from coordinator.core.training.job_forecast.basis import JobForecast
from coordinator.core.training.job_forecast.forecast import forecast_job
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, Trust
from hypergpu.units import Milliseconds
from netsim.link import COORDINATOR_LINK
from netsim.network.profiles import profile
from netsim.network.world import NodeDescription, WorldDescription, WorldFault
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld, TransferSizes

WORLDS = 30
_LINES = ("home-fibre", "home-cable", "home-dsl", "wifi-bad", "lte-moving", "starlink")
_DAY_MS = 86_400_000
_IDLE_MS = Milliseconds(60_000)


class ForecastTrial(NamedTuple):
    """A job as it was forecast and as it went."""

    name: str
    unseen: int
    """Nodes that had never trained before."""
    forecast: JobForecast
    took_ms: Milliseconds
    bytes_up: int
    bytes_down: int

    @property
    def error(self) -> float:
        """How far the middle of the time was off, over what it took."""
        return abs(self.forecast.left_ms.middle - self.took_ms) / self.took_ms

    @property
    def is_within(self) -> bool:
        """Whether it took no less and no more than eight of ten were said to."""
        return self.forecast.left_ms.low <= self.took_ms <= self.forecast.left_ms.high


class DrawnTrial(NamedTuple):
    """A drawn world with the job that is forecast in it, and how many of its nodes are new then."""

    simulation: Simulation
    spec: JobSpec
    nodes: int
    unseen: int


def drawn_simulation(seed: int, faults: tuple[WorldFault, ...] = ()) -> DrawnTrial:
    """A world of this seed, in which nodes train for an earlier job first. Every third world has
    nodes that come only after it.
    """
    dice = random.Random(f"forecasts/{seed}")
    nodes = dice.randint(3, 8)
    unseen_count = dice.randint(1, nodes // 2) if seed % 3 == 0 else 0
    world = _world(seed, dice, nodes, unseen_count, faults)
    spec = _spec(dice.randint(20, 60), dice.choice((10, 20, 50)), max(1, (nodes + 1) // 2))
    return DrawnTrial(Simulation(world), spec, nodes, unseen_count)


def trial_in(seed: int) -> ForecastTrial:
    """A job in a drawn world, forecast when it is submitted."""
    simulation, spec, nodes, unseen_count = drawn_simulation(seed)
    violations = simulation.run().violations
    simulation.start_late_nodes(_IDLE_MS)
    forecast = forecast_job(simulation.forecast_basis(spec))
    began_ms = simulation.now_ms
    job_id = simulation.submit(spec)
    violations += simulation.run().violations
    job = simulation.job_states[job_id]
    if violations or job.phase is not Phase.FINISHED or isinstance(forecast, str):
        raise AssertionError(f"world {seed}: {violations}, {job.phase.value}, {forecast}")
    return ForecastTrial(
        name=f"world {seed}: {nodes} nodes",
        unseen=unseen_count,
        forecast=forecast,
        took_ms=Milliseconds(simulation.now_ms - began_ms),
        bytes_up=job.tally.bytes_up,
        bytes_down=job.tally.bytes_down,
    )


def _world(
    seed: int, dice: random.Random, nodes: int, unseen: int, faults: tuple[WorldFault, ...]
) -> SimulatedWorld:
    step_ms = dice.choice((50, 100, 200, 400))
    descriptions = tuple(
        NodeDescription(
            name=NodeId(f"node-{number}"),
            group="drawn",
            shape=profile(dice.choice(_LINES)).shape,
            step_floor_ms=round(step_ms * 2 ** dice.uniform(-1, 2)),
        )
        for number in range(nodes)
    )
    times = dice.choice((1, 10))
    codecs = {codec: times * size for codec, size in CODECS.items()}
    return SimulatedWorld(
        seed=seed,
        nodes=nodes,
        jobs=(_spec(8, 20, nodes - unseen),),
        faults=DrawnFaults(
            link_cut_ms=dice.choice((120_000, 600_000)),
            node_crash_ms=dice.choice((300_000, 1_200_000)),
            away_ms=dice.choice((5_000, 40_000)),
        ),
        faults_until_ms=Milliseconds(30 * _DAY_MS),
        limit_ms=Milliseconds(30 * _DAY_MS),
        sizes=TransferSizes(codecs["int4"], codecs["int4"], codecs["fp32"], codecs),
        step_ms=(1, 1),
        checks_each_event=False,
        late_nodes=unseen,
        description=WorldDescription(
            name="forecasts",
            seed=seed,
            coordinator=COORDINATOR_LINK,
            nodes=descriptions,
            faults=faults,
        ),
    )


def _spec(rounds: int, inner_steps: int, nodes: int) -> JobSpec:
    """A job as users submit it, secret duplicates included."""
    spec = job_spec(inner_steps=inner_steps, nodes=nodes, rounds=rounds)
    return replace(spec, trust=Trust())
