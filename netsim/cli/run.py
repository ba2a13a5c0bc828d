"""Trains a world's job over the world's links, or in virtual time."""

import msgspec

from hypergpu.command_line import program
from hypergpu.digests import digest_of
from hypergpu.units import several
from hypergpu.user.cluster.folder import require_own
from hypergpu.user.terminal.output import note, say, say_json
from hypergpu.workloads.registry import find
from netsim.cli.links import backend_for
from netsim.link import NetsimError
from netsim.network.backends import BACKENDS, Links, world_links
from netsim.network.options import Backend, Fallback
from netsim.network.programs import run_program, run_to_end
from netsim.network.timeline import require_real_faults
from netsim.network.world import WorldDescription
from netsim.run.choices import RunOrder, chosen_world, data_listing, require_worker, required_job
from netsim.run.job import netsim_folder, run_virtually
from netsim.run.report import PlannedRun, say_report


def run_over_links(order: RunOrder, backend: Backend, fallback: Fallback) -> int:
    """Open a world's links, run its job over them in a program of its own, return its status."""
    links = world_links(_runnable_world(order))
    require_own(netsim_folder(order.folder))
    command = program("netsim.run", msgspec.json.encode(order).decode())
    return run_to_end(_run(links, backend_for(backend, links, fallback), command))


def describe_run(order: RunOrder, backend: Backend, fallback: Fallback) -> int:
    """Check that a run is possible, and print what it would be."""
    world = _runnable_world(order)
    backend = backend_for(backend, world_links(world), fallback)
    BACKENDS[backend].limits()
    run = planned_run(world, order, backend)
    if order.is_json:
        say_json(run)
        return 0
    goal = f", to {run.metric_name} {run.target:g}" if run.target else ""
    say(f"{run.world}, seed {run.seed}, over {run.backend}: {several(run.nodes, 'node')}")
    say(f"{run.workload} by {run.strategy}, {several(run.rounds, 'round')} at most{goal}")
    return 0


def run_in_virtual_time(order: RunOrder, fallback: Fallback) -> int:
    """Simulate a world's job, print the report and return the exit status."""
    world = chosen_world(order.choices)
    if fallback is not Fallback.REFUSE:
        raise NetsimError("virtual time has no fallback", "leave out --fallback")
    note(f"simulating {world.name} with {several(len(world.nodes), 'node')}")
    return say_report(run_virtually(world), is_json=order.is_json)


def planned_run(world: WorldDescription, order: RunOrder, backend: Backend) -> PlannedRun:
    """Describe a run of a world without starting it.

    Raises:
        NetsimError: The world has no job that can be run.
    """
    spec = required_job(world)
    inputs = (world, backend.value, order.worker, data_listing(spec, order.choices.beside))
    return PlannedRun(
        world=world.name,
        seed=world.seed,
        backend=backend,
        nodes=len(world.nodes),
        workload=spec.workload,
        strategy=spec.strategy,
        rounds=spec.training.rounds,
        target=spec.evaluation.target,
        metric_name=find(spec.workload).metric,
        inputs=digest_of(msgspec.json.encode(inputs, order="sorted")),
    )


def _runnable_world(order: RunOrder) -> WorldDescription:
    """Read the world, and reject it where real programs cannot run it."""
    world = chosen_world(order.choices)
    require_real_faults(world)
    require_worker(required_job(world), order.worker)
    return world


async def _run(links: Links, backend: Backend, command: list[str]) -> int:
    async with BACKENDS[backend].open(links) as open_links:
        return (await run_program(open_links, command)).status
