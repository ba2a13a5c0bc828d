"""The way of a reader through a function: every function that one call of it enters, each once, in
the order of calls, and how often that leads back to a module already left.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.architecture.tree import ROOT


class Walk(NamedTuple):
    """Stops are changes of module."""

    stops: tuple[str, ...]
    """Modules in the order of reading, as paths below the root; no two neighbours are equal."""
    functions: tuple[tuple[str, str], ...] = ()
    """Each function in the order of first calls, as its module and its qualified name."""

    @property
    def rooms(self) -> int:
        """Different modules."""
        return len(set(self.stops))

    @property
    def returns(self) -> int:
        """Stops at a module that was already left."""
        return len(self.stops) - self.rooms


def walk_of(call: Callable[[], Any], *below: str) -> Walk:
    """Walk through a call, in all threads that begin meanwhile.

    Args:
        call: Called once; it may not change what is traced itself.
        below: Folders whose functions are read, such as ``coordinator/core/training/plan``.
    """
    folders = tuple(f"{ROOT / folder}/" for folder in below)
    seen_places, functions = set[tuple[str, int]](), list[tuple[str, str]]()

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        place = code.co_filename, code.co_firstlineno
        is_function = code.co_flags & 0x2 and not code.co_name.startswith("<")
        if event != "call" or not is_function or place in seen_places:
            return
        if not code.co_filename.startswith(folders):
            return
        seen_places.add(place)
        functions.append((str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname))

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    stops = tuple(module for module, _ in groupby(module for module, _ in functions))
    return Walk(stops, tuple(functions))


def plan_walk() -> Walk:
    """The walk of a plan in which a node whose speed is known works under a lease over several
    rounds.
    """
    # They import the coordinator, which the rules do not need.
    from benchmarks.ours.adaptive.fleets import AddedNode, job_spec, run_fleet
    from coordinator.core.training.plan.planning import plan_round as plan
    from netsim.virtual import node_link

    calls = list[tuple[Any, ...]]()

    def plan_and_keep(*arguments: Any) -> Any:
        round_plan = plan(*arguments)
        if any(part.rounds > 1 and part.step_us for part in round_plan.nodes.values()):
            calls.append(arguments)
        return round_plan

    vars(node_link)["plan_round"] = plan_and_keep
    try:
        run_fleet(job_spec(inner_steps=20, nodes=4, rounds=10), seed=1, added=(AddedNode(16),))
    finally:
        vars(node_link)["plan_round"] = plan
    return walk_of(lambda: plan(*calls[-1]), "coordinator/core/training/plan")


def aggregate_walk(folder: Path) -> Walk:
    """The walk of the command `Aggregate` for a round with four updates, which are weighed, through
    the commands. The sweep below them takes files, buffers and arithmetic by turns for each span of
    coordinates, so that its walk says nothing of how it is read.

    Args:
        folder: Empty; blobs lie in it.
    """
    from tests.unit.shell.weighed_job import WeighedJob, honest_update

    job = WeighedJob(folder, *map(honest_update, range(4)), codec="int4")

    async def measure_gradient() -> None:
        job.with_gradient()

    with asyncio.Runner() as runner:
        runner.run(measure_gradient())
        command = job.services.training.aggregation.aggregate(job.runtime, job.command)
        return walk_of(lambda: runner.run(command), "coordinator/shell/kinds/training")


def update_walk(folder: Path) -> Walk:
    """The walk of one update, from its node's offer to the model that it is folded into.

    Args:
        folder: Empty; the coordinator's data lie in it.
    """
    from coordinator.core.training.job.commands import Aggregate
    from coordinator.core.training.outstanding import outstanding
    from coordinator.shell.nodes.known_nodes import KnownNodes
    from coordinator.shell.service.gates import NodeGate
    from coordinator.shell.service.sent_updates import SentUpdates
    from coordinator.shell.store.journal.records import NodeRecord
    from tests.unit.shell.offered_update import UpdateOffer
    from tests.unit.shell.whole_shell import driving, services_in

    services = services_in(folder)
    aggregation = services.training.aggregation
    known_nodes = KnownNodes(services.journal)
    updates = SentUpdates(NodeGate(known_nodes, is_plaintext=True), services.intake)

    async def offer_and_fold(offer: UpdateOffer) -> None:
        known_nodes.admit(NodeRecord(offer.node, b"", b"{}", "", 0, 0))
        offer.bring(await updates.let_in(offer.sender, offer.raw))
        await updates.accept(offer.sender, offer.raw)
        runtime = services.jobs[offer.job_id]
        (command,) = (c for c in outstanding(runtime.job) if isinstance(c, Aggregate))
        await aggregation.aggregate(runtime, command)

    with asyncio.Runner() as runner:
        block = driving(services)
        runner.run(block.__aenter__())
        offer = runner.run(UpdateOffer.begin(services))
        walk = walk_of(lambda: runner.run(offer_and_fold(offer)), "coordinator")
        runner.run(block.__aexit__(None, None, None))
    return walk


def receipt_walk(folder: Path) -> Walk:
    """The walk of one receipt, from its journal's rows to the signed call that records it on a
    chain of its own.

    Args:
        folder: Empty; the payments' data lie in it.
    """
    from benchmarks.ours.metering.host import JobPlan
    from payments.shell.anvil import AnvilOptions, running_anvil
    from tests.chain.world import OnChainPayments

    plan = JobPlan(nodes=2, rounds_per_epoch=2, rounds=6)

    async def fold_and_record(world: OnChainPayments) -> None:
        # Threads that are there already are not traced.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
        world.work(plan.rounds_per_epoch)
        await world.step()

    log_file = folder / "anvil.log"
    with running_anvil(AnvilOptions(block_time_s=0), log_file=log_file) as anvil:
        world = OnChainPayments(folder, anvil, plan)
        with asyncio.Runner() as runner:
            runner.run(world.begin())
            walk = walk_of(lambda: runner.run(fold_and_record(world)), "payments")
            runner.run(world.close())
    return walk
