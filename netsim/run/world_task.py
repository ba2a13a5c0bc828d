"""A world that is simulated as a task of an engine: names of its files go in, its report out."""

from pathlib import Path

import msgspec
from msgspec.structs import replace

from hypergpu.digests import digest_of
from hypergpu.engine.engine import Engine, run_all
from hypergpu.engine.tasks import EngineTask
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest
from hypergpu.protocol import SOFTWARE
from netsim.link import NetsimError
from netsim.network.world import WorldDescription
from netsim.run.choices import Choices, chosen_world
from netsim.run.job import run_virtually
from netsim.run.report import RunReport

KIND = "world"
_LIMIT_S = 24 * 3600.0


class SimulateWorld(msgspec.Struct, frozen=True):
    """A world to simulate."""

    choices: Choices
    """With whole paths."""
    inputs: Digest
    """Digest of the world that they are to give: see `inputs_of`."""


class WorldSimulated(msgspec.Struct, frozen=True, tag=True):
    """The report of its job."""

    report: RunReport


class SimulationFailed(msgspec.Struct, frozen=True, tag=True):
    """It cannot be simulated where it was tried."""

    reason: str
    fix: str


_encoder = msgspec.msgpack.Encoder()
_tasks = msgspec.msgpack.Decoder(SimulateWorld)
_results: msgspec.msgpack.Decoder[WorldSimulated | SimulationFailed] = msgspec.msgpack.Decoder(
    WorldSimulated | SimulationFailed
)


def inputs_of(world: WorldDescription) -> Digest:
    """Digest of everything that decides a world's report."""
    return digest_of(msgspec.json.encode((world, SOFTWARE), order="sorted"))


def simulate(engine: Engine, choices: Choices, inputs: Digest) -> RunReport:
    """Have an engine simulate a world. Blocks.

    Raises:
        NetsimError: It cannot be simulated there.
    """
    paths = {"world": choices.world, "job": choices.job}
    whole = {name: str(Path(path).absolute()) for name, path in paths.items() if path}
    order = SimulateWorld(replace(choices, **whole), inputs)
    (answer,) = run_all(engine, [EngineTask(KIND, _encoder.encode(order), limit_s=_LIMIT_S)])
    result = _results.decode(answer)
    if isinstance(result, SimulationFailed):
        raise NetsimError(f"{choices.world}, seed {choices.seed}: {result.reason}", result.fix)
    return result.report


def compute(arguments: bytes) -> bytes:
    """Simulate: the function of this kind of task."""
    return _encoder.encode(_simulate(_tasks.decode(arguments)))


def _simulate(wanted: SimulateWorld) -> WorldSimulated | SimulationFailed:
    try:
        world = chosen_world(wanted.choices)
        if inputs_of(world) != wanted.inputs:
            reason = f"{wanted.choices.world} or HyperGPU is another here"
            return SimulationFailed(reason, "give every machine of the engine the same")
        return WorldSimulated(run_virtually(world))
    except HyperGPUError as error:
        return SimulationFailed(error.detail, error.fix)
