"""What a voucher adds to the acknowledgement of an update, measured by the node that waits for it.

Two jobs of one coordinator differ in their pay alone. Each has a node: the daemon's own session and
calls, without the training. They take turns, so that a busy moment of the machine meets both.

A first acknowledgement waits for disks, whose tail is a hundred times what a voucher takes. So each
node also says its last update again and again, as after breaks: the coordinator sees that it has
it, and its answer is the same, with a voucher signed afresh. What is between the two jobs there is
its price, in time to wait and in the coordinator's own CPU time.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.estimates import IntervalEstimate, bootstrap_estimate, median_of
from gpu_node.core.assignment import Assignment, Update
from gpu_node.shell.link.access import NODE_KEY, Applicant, join
from gpu_node.shell.link.bulk import submitted
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.channels import open_channel
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.translate import (
    assignment_value,
    capabilities_message,
    contribution,
    update_header,
    version_message,
)
from gpu_node.shell.worker.messages import Ready
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.digest import digest_of
from hypergpu.jobfile.spec import CodecChoice, Evaluation, JobSpec, Pay, TrainingSettings
from hypergpu.ledger.terms import separator_of
from hypergpu.ledger.typed import sign
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.protocol import PROTOCOL_ENTRY
from hypergpu.wire.token import parse_token

WARM_UP = 5
AGAIN = 4
"""How often an update is said again in a turn."""
PARAMETERS = 4_096
_BEAT_S = 2.0
_TURN_S = (1 + AGAIN) / 20
"""At least: coordinators take 20 headers a second of each node."""
_TIMEOUT_MS = Milliseconds(30_000)
_READY = Ready(
    device="cpu", device_name="none", memory_bytes=Bytes(0), kind="null", workloads={"null": 1}
)


class Taken(NamedTuple):
    """Milliseconds until an update was acknowledged: first, and when it was said again."""

    first_ms: list[float]
    again_ms: list[list[float]]
    """A list for each turn."""
    again_cpu_ms: list[float]
    """Of the coordinator for each of them, on average of a turn."""


class Acknowledged(NamedTuple):
    """Of both jobs, turn by turn."""

    paying: Taken
    free: Taken

    def added_p99_ms(self) -> IntervalEstimate:
        """By how much the 99th percentile is higher with a voucher, where nothing is stored."""
        paying, free = (np.array(each.again_ms) for each in self)

        def added(turns: Sequence[int]) -> float:
            return float(np.quantile(paying[turns], 0.99) - np.quantile(free[turns], 0.99))

        return bootstrap_estimate(added, len(paying))

    def added_median_ms(self) -> IntervalEstimate:
        """The same of each turn's median."""
        medians = (map(statistics.median, each.again_ms) for each in self)
        return median_of([paying - free for paying, free in zip(*medians, strict=True)])

    def added_cpu_ms(self) -> IntervalEstimate:
        """What a voucher takes of the coordinator's CPU time."""
        both = zip(self.paying.again_cpu_ms, self.free.again_cpu_ms, strict=True)
        return median_of([paying - free for paying, free in both])


class Work(NamedTuple):
    """An assignment, and the update for it."""

    assignment: Assignment
    update: Update
    content: bytes


class Session:
    """A node's session that answers each assignment with some numbers."""

    def __init__(self, key: IdentityKey, calls: Calls, job_id: str, pay: Pay) -> None:
        """Open the control stream of a node that joined, and is to work for a job."""
        self._key = key
        self._calls = calls
        self._job_id = job_id
        self._is_paid = pay.unit_price > 0
        self._nonce = 0
        self._control = calls.control()
        self._said = aiter(self._control)

    async def greet(self) -> None:
        """Say what the node can do: work follows."""
        hello = node_pb2.Hello(
            version=version_message(), capabilities=capabilities_message(_READY, "benchmark")
        )
        await self._control.write(node_pb2.ControlRequest(hello=hello))
        self._beating = asyncio.create_task(self._beat())

    def leave(self) -> None:
        """Say nothing any more."""
        self._beating.cancel()
        self._control.cancel()

    async def _beat(self) -> None:
        for sequence in itertools.count(1):
            beat = node_pb2.Heartbeat(sequence=sequence)
            await self._control.write(node_pb2.ControlRequest(heartbeat=beat))
            await asyncio.sleep(_BEAT_S)

    async def work(self) -> Work:
        """Wait for the next assignment, and make its update."""
        assignment = await self._assigned()
        samples = Samples(sum(run.count for run in assignment.task.ranges))
        content = np.full(PARAMETERS, self._nonce / 1_000, np.float32).tobytes()
        steps = assignment.task.inner_steps
        update = Update(digest_of(content), Bytes(len(content)), steps, samples)
        return Work(assignment, update, content)

    async def submit(self, work: Work) -> float:
        """Send an update, for the first time or again.

        Returns:
            Milliseconds until it was acknowledged.

        Raises:
            BenchmarkError: it was not accepted, or has no voucher though it is paid, or has one.
        """
        self._nonce += 1
        assignment, update, content = work
        signed = contribution(self._key.node_id, assignment, update, self._nonce)
        signature = sign(self._key, separator_of(assignment.terms.domain), signed)
        header = update_header(assignment.lease, update, nonce=self._nonce, signature=signature)
        messages = _messages(header, content)
        begun_s = time.perf_counter()
        answer = await self._calls.submit(messages, _TIMEOUT_MS / 1_000, len(content))
        taken_ms = 1_000 * (time.perf_counter() - begun_s)
        if not answer.is_accepted or answer.HasField("voucher") is not self._is_paid:
            raise BenchmarkError(f"an update of {self._job_id} was acknowledged wrongly: {answer}")
        return taken_ms

    async def _assigned(self) -> Assignment:
        async for message in self._said:
            if message.HasField("assignment"):
                assignment = assignment_value(message.assignment)
                if assignment.lease.job_id != self._job_id:
                    raise BenchmarkError(f"the node of {self._job_id} works for another job")
                return assignment
        raise BenchmarkError(f"the session of {self._job_id} ended without work")


def acknowledged(folder: Path, count: int) -> Acknowledged:
    """Submit so many updates of each job and time their acknowledgements."""
    folder.mkdir(parents=True)
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        settings = {
            "HYPERGPU_COORDINATOR_CHAIN": "anvil",
            "HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url,
        }
        with running(folder, is_plaintext=True, settings=settings) as cluster:
            return asyncio.run(_in_turns(cluster, count))


async def _in_turns(cluster: Running, count: int) -> Acknowledged:
    spec = _spec(count + WARM_UP)
    taken = Acknowledged(Taken([], [], []), Taken([], [], []))
    async with AsyncExitStack() as owner:
        paying = await _session(cluster, owner, "paying", spec)
        free = await _session(cluster, owner, "free", replace(spec, pay=Pay()))
        both = [(paying, taken.paying), (free, taken.free)]
        last = {session: await session.work() for session, _ in both}
        for turn in range(count + WARM_UP):
            pace = asyncio.create_task(asyncio.sleep(_TURN_S))
            both.reverse()
            for session, into in both:
                into.first_ms.append(await session.submit(last[session]))
            # With the next assignment the coordinator has done all that the update led to.
            following = {session: await session.work() for session, _ in both}
            for session, into in both:
                begun_ms = cpu_ms(cluster)
                into.again_ms.append([await session.submit(last[session]) for _ in range(AGAIN)])
                into.again_cpu_ms.append((cpu_ms(cluster) - begun_ms) / AGAIN)
            last = following
            await pace
            if turn < WARM_UP:
                _forget(taken)
    return taken


def _forget(taken: Acknowledged) -> None:
    """Leave the first turns out, which touch everything for the first time."""
    for each in (*taken.paying, *taken.free):
        each.clear()


async def _session(cluster: Running, owner: AsyncExitStack, name: str, spec: JobSpec) -> Session:
    """A job, and a node that it gets since no other is free."""
    places = owner.enter_context(Places(cluster.folder / name))
    key = identity_key(places)
    token = parse_token(cluster.node_token())
    applicant = Applicant(places, key, capabilities_message(_READY, name), _TIMEOUT_MS)
    coordinator = await join(applicant, token)
    with cluster.client() as client:
        job_id = client.submit(spec)
    channel = await owner.enter_async_context(open_channel(coordinator.address, None))
    metadata = (PROTOCOL_ENTRY, (NODE_KEY, key.node_id))
    session = Session(key, Calls(channel, metadata, _TIMEOUT_MS), job_id, spec.pay)
    await session.greet()
    owner.callback(session.leave)
    return session


def _spec(rounds: int) -> JobSpec:
    return JobSpec(
        workload="null",
        options={"parameters": PARAMETERS},
        # One round more than there are updates: the job does not end while it is measured.
        training=TrainingSettings(rounds=rounds + 1, inner_steps=2, batch_size=50, nodes=1),
        codec=CodecChoice("fp32", "fp32"),
        evaluation=Evaluation(every=rounds + 1),
        # Judging is work beside the acknowledgement, which the other job would pay for with time.
        pay=Pay(unit_price=1_000_000, judged=0),
    )


async def _messages(header: node_pb2.UpdateHeader, content: bytes) -> AsyncIterator[bytes]:
    yield node_pb2.SubmitUpdateRequest(header=header).SerializeToString()
    yield submitted(0, memoryview(content))


def cpu_ms(cluster: Running) -> float:
    """CPU time of the thread in which the coordinator serves, exact while it waits."""
    schedule = Path(f"/proc/{cluster.coordinator.pid}/schedstat").read_text()
    return int(schedule.split()[0]) / 1e6


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]
