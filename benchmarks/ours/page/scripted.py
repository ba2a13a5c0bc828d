"""A coordinator that only says what one with many nodes would, for the page's server to follow.

Run as a process: says its port and start on stdout; when its stdin ends, when each event happened.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import grpc
import msgspec

from benchmarks.ours.cluster import BenchmarkError
from coordinator.shell.service.telemetry import LOOK_MS, NODES_A_TURN, TURNS_OF_SEVERAL
from hypergpu.command_line import program
from hypergpu.v1 import job_pb2, job_pb2_grpc

JOB = "job-0123456789ab"
NODES_A_PAGE = 100
"""As a coordinator lists them."""
PROGRESS_EVERY_S = 0.25
STEPS = 20


class ScriptedReady(msgspec.Struct, frozen=True):
    """First line of the process."""

    address: str


def node_id(number: int) -> str:
    """Id of a node."""
    return f"0x{number:040x}"


def update_sequence(number: int, node: int, nodes: int) -> int:
    """Sequence number of a node's update in a round: beside updates a round has three events."""
    return 1 + number * (nodes + 3) + 1 + node


class JobScript:
    """One job whose nodes all take part in every round, one update after another."""

    def __init__(self, nodes: int, round_s: float) -> None:
        self.nodes = [node_id(number) for number in range(nodes)]
        self.events: list[job_pb2.JobEvent] = []
        self.times_ms: list[float] = []
        """Unix time of each event."""
        self.more = asyncio.Event()
        self.round = 0
        self.done: set[str] = set()
        """Nodes whose update of the open round is in."""
        self._round_s = round_s
        self._start_ms = time.time() * 1000
        self._rng = Random(1)

    def job_ms(self) -> int:
        """The job's time."""
        return int(time.time() * 1000 - self._start_ms)

    async def run(self) -> None:
        """Let rounds happen until cancelled."""
        self._add("JobCreated", job_id=JOB, spec={"workload": "digits-softmax", "name": "scripted"})
        for self.round in range(1_000_000):
            self.done = set()
            plan = {"inner_steps": STEPS, "codec": "int4", "reason": "H=20, int4"}
            plans = dict.fromkeys(self.nodes, plan)
            self._add("RoundPlanned", plan={"round": self.round, "nodes": plans, "resting": {}})
            for node in self.nodes:
                await asyncio.sleep(self._round_s / len(self.nodes) * self._rng.uniform(0.2, 1.8))
                update = {
                    "blob": {"digest": "x", "size_bytes": 1300},
                    "inner_steps": STEPS,
                    "compute_ms": 900,
                }
                self._add("UpdateReceived", node=node, round=self.round, update=update)
                self.done.add(node)
            self._add(
                "AggregateReady",
                round=self.round,
                model={"blob": {"digest": "x", "size_bytes": 1300}},
            )
            took_ms = int(self._round_s * 1000)
            self._add("RoundRecorded", round=self.round, duration_ms=took_ms, loss=1.0)

    def _add(self, kind: str, **body: Any) -> None:
        self.times_ms.append(time.time() * 1000)
        event = job_pb2.JobEvent(
            sequence=len(self.events), at_ms=self.job_ms(), kind=kind, body_json=json.dumps(body)
        )
        self.events.append(event)
        self.more.set()
        self.more = asyncio.Event()

    def summary(self) -> job_pb2.JobSummary:
        """The job in a list."""
        return job_pb2.JobSummary(
            job_id=JOB,
            name="scripted",
            phase="training",
            reason=f"round {self.round + 1} is open",
            round=self.round,
            rounds=1_000_000,
            nodes=len(self.nodes),
            updates_accepted=len(self.events),
            at_ms=self.job_ms(),
        )

    def node(self, node_id: str) -> job_pb2.NodeSummary:
        """A node in a list; its round trip wanders."""
        summary = job_pb2.NodeSummary(
            node_id=node_id,
            state="working",
            job_id=JOB,
            last_seen_ms_ago=self._rng.randrange(5_000),
            software="hypergpu",
            updates_accepted=self.round,
            health=job_pb2.Health(
                value=0.83,
                level="high",
                speed=0.75,
                reliability=0.9,
                quality=0.85,
                uptime=0.95,
                reason="speed 0.75 lowers it most",
            ),
            plan_reason="H=20",
        )
        summary.capabilities.device = "cuda"
        summary.capabilities.device_name = "GPU"
        summary.capabilities.memory_bytes = 8 << 30
        reading = summary.reading
        reading.congestion_control = "bbr"
        _state(reading.round_trip_us, 40_000 * (1 + self._rng.random() / 50))
        for each in (reading.up_bits_per_s, reading.down_bits_per_s, reading.step_us):
            _state(each, 6e6)
        return summary

    def participants(self) -> Iterator[job_pb2.ParticipantSummary]:
        """Progress of the nodes whose update is awaited."""
        for slot, node in enumerate(self.nodes):
            is_done = node in self.done
            yield job_pb2.ParticipantSummary(
                node_id=node,
                slot=slot,
                state="delivered" if is_done else "pending",
                steps_done=STEPS if is_done else self._rng.randrange(STEPS),
                steps_total=STEPS,
                loss=1.0,
            )


def _state(estimate: Any, mean: float) -> None:
    estimate.mean, estimate.spread, estimate.samples, estimate.age_ms = mean, mean / 50, 9, 10


class ScriptedJobs(job_pb2_grpc.JobServiceServicer):
    """The jobs' part."""

    def __init__(self, script: JobScript) -> None:
        self._script = script

    async def ListJobs(  # noqa: N802 - the protocol's name
        self, request: Any, _context: Any
    ) -> job_pb2.ListJobsResponse:
        """See the protocol."""
        return job_pb2.ListJobsResponse(jobs=[self._script.summary()])

    async def WatchJob(  # noqa: N802 - the protocol's name
        self, request: Any, _context: Any
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        """See the protocol."""
        script, next_sequence = self._script, request.from_sequence
        told_s = 0.0
        while True:
            more = script.more
            for event in script.events[next_sequence:]:
                yield job_pb2.WatchJobResponse(event=event)
            next_sequence = len(script.events)
            if not request.events_only and time.monotonic() - told_s >= PROGRESS_EVERY_S:
                told_s = time.monotonic()
                report = job_pb2.ProgressReport(participants=list(script.participants()))
                yield job_pb2.WatchJobResponse(progress=report)
            try:
                async with asyncio.timeout(PROGRESS_EVERY_S):
                    await more.wait()
            except TimeoutError:
                continue


class ScriptedNodes(job_pb2_grpc.OperatorServiceServicer):
    """The nodes' part."""

    def __init__(self, script: JobScript) -> None:
        self._script = script

    async def ListNodes(  # noqa: N802 - the protocol's name
        self, request: Any, _context: Any
    ) -> job_pb2.ListNodesResponse:
        """See the protocol."""
        first = int(request.page or "0")
        next_node = first + NODES_A_PAGE
        nodes = [self._script.node(each) for each in self._script.nodes[first:next_node]]
        page = str(next_node) if next_node < len(self._script.nodes) else ""
        return job_pb2.ListNodesResponse(nodes=nodes, next_page=page)

    async def WatchTelemetry(  # noqa: N802 - the protocol's name
        self, request: Any, _context: Any
    ) -> AsyncIterator[job_pb2.WatchTelemetryResponse]:
        """See the protocol: nodes by turns, as often as a coordinator tells them."""
        script = self._script
        while True:
            levels = [_levels(script, each) for each in script.participants()]
            turn = min(NODES_A_TURN, -(-len(levels) // TURNS_OF_SEVERAL))
            for first in range(0, len(levels), turn):
                piece = levels[first : first + turn]
                yield job_pb2.WatchTelemetryResponse(nodes=piece)
                await asyncio.sleep(LOOK_MS / 1000)


def _levels(script: JobScript, part: job_pb2.ParticipantSummary) -> job_pb2.NodeLevels:
    node = script.node(part.node_id)
    return job_pb2.NodeLevels(
        node_id=part.node_id,
        state=node.state,
        job_id=JOB,
        health=node.health,
        plan_reason=node.plan_reason,
        round_trip_us=int(node.reading.round_trip_us.mean),
        step_us=int(node.reading.step_us.mean),
        round=script.round,
        participant=part,
    )


async def serve(nodes: int, round_s: float) -> None:
    """Serve until stdin ends."""
    script = JobScript(nodes, round_s)
    server = grpc.aio.server()
    job_pb2_grpc.add_JobServiceServicer_to_server(ScriptedJobs(script), server)  # type: ignore[abstract]
    job_pb2_grpc.add_OperatorServiceServicer_to_server(ScriptedNodes(script), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    script_task = asyncio.create_task(script.run())
    _say(ScriptedReady(f"127.0.0.1:{port}"))
    await asyncio.to_thread(sys.stdin.read)
    script_task.cancel()
    await server.stop(None)
    _say(script.times_ms)


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


class ScriptedCoordinator:
    """The process, from outside."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child
        self.address = self._read(ScriptedReady).address

    def end(self) -> list[float]:
        """End it; returns when each event happened, Unix time in milliseconds."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        times_ms: list[float] = self._read(list[float])
        return times_ms

    def _read(self, said: Any) -> Any:
        line = self._child.stdout.readline() if self._child.stdout is not None else ""
        if not line:
            raise BenchmarkError("the scripted coordinator ended")
        return msgspec.json.decode(line, type=said)


@contextmanager
def scripted_coordinator(nodes: int, round_s: float) -> Iterator[ScriptedCoordinator]:
    """A coordinator with so many nodes that report in rounds of so many seconds."""
    command = program("benchmarks.ours.page.scripted", str(nodes), str(round_s))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield ScriptedCoordinator(child)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int)
    parser.add_argument("round_s", type=float)
    options = parser.parse_args()
    asyncio.run(serve(options.nodes, options.round_s))


if __name__ == "__main__":
    main()
