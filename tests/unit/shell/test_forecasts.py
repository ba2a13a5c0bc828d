"""Estimates of jobs, and what is left of one that runs, as users ask for them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from coordinator.core.network.reading import RoundTrip
from coordinator.core.training.job.state import Job
from coordinator.core.work.work_events import NodeJoined
from coordinator.shell.kinds.training.command_times import CommandTimes
from coordinator.shell.kinds.training.speed_keys import speed_sources
from coordinator.shell.nodes.readings import FinishedUpdate
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.tensors.layout import TensorSpec, layout_of
from hypergpu.units import Bytes, Microseconds, Milliseconds
from hypergpu.v1 import forecast_pb2, job_pb2
from tests.unit.shell.test_job_services import CALLER
from tests.unit.shell.whole_shell import (
    JOB,
    WholeShell,
    connect_node,
    driving,
    prepared_job,
    services_in,
)

SPEC = with_strategy(
    JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=10, inner_steps=10, batch_size=16, nodes=2),
    ),
    "aware",
)
NODES = tuple(NodeId(f"0x{letter * 40}") for letter in "abc")


def connect_nodes(services: WholeShell, *, step_ms: int = 20, count: int = 2) -> None:
    """Nodes next door that trained a model of 650 parameters before."""
    layout = layout_of([TensorSpec("model", (650,))])
    earlier_job = Job(job_id=JobId("before"), spec=SPEC, layout=layout.digest)
    for node in NODES[:count]:
        connect_node(services, node)
        (source,) = speed_sources(earlier_job, services.nodes.streams, [node]).values()
        for lease in range(1, 5):
            services.readings.observe(node, RoundTrip(monotonic_ms(), Microseconds(1_000)))
            computing_ms = Milliseconds(10 * step_ms)
            update = FinishedUpdate(
                *(earlier_job.job_id, lease, 10, computing_ms),
                *(Milliseconds(0), computing_ms, source),
            )
            services.readings.record_accepted(node, update)


async def ask_estimate(
    services: WholeShell, spec: JobSpec, parameters: int = 650
) -> forecast_pb2.JobForecast:
    request = job_pb2.EstimateJobRequest(spec_json=spec_json(spec), parameters=parameters)
    answer = await services.job_servicer().estimate_job(request, CALLER)
    return answer.forecast


def test_estimate_tells_time_bytes_and_what_they_are_based_on(tmp_path: Path) -> None:
    async def ask() -> tuple[forecast_pb2.JobForecast, forecast_pb2.JobForecast]:
        services = services_in(tmp_path)
        connect_nodes(services)
        small = await ask_estimate(services, SPEC)
        return small, await ask_estimate(services, SPEC, parameters=65_000)

    small, large = asyncio.run(ask())
    computing_ms = 10 * 10 * 20
    assert computing_ms <= small.left_ms.middle <= 10 * computing_ms
    assert 0 < small.left_ms.low <= small.left_ms.middle <= small.left_ms.high
    assert (small.nodes, small.measured_nodes) == (2, 2)
    assert small.reason == "by measurements of all 2 nodes"
    assert large.bytes_up.middle > small.bytes_up.middle > 0
    assert large.measured_nodes == 0, "speeds are of one model"
    assert not small.HasField("cost")


def test_estimate_creates_nothing(tmp_path: Path) -> None:
    async def ask() -> WholeShell:
        services = services_in(tmp_path)
        connect_nodes(services)
        await ask_estimate(services, SPEC)
        return services

    services = asyncio.run(ask())
    assert not services.driver.runtimes
    assert not services.journal.jobs()


def test_estimate_of_a_job_that_pays_tells_cost_within_its_escrow(tmp_path: Path) -> None:
    pay = Pay(unit_price=1_000, escrow=10**9)

    async def ask() -> forecast_pb2.JobForecast:
        services = services_in(tmp_path)
        connect_nodes(services)
        return await ask_estimate(services, msgspec.structs.replace(SPEC, pay=pay))

    cost = asyncio.run(ask()).cost
    assert int(cost.escrow) == 10**9
    assert pay.most_for(SPEC.stated_samples) <= int(cost.middle) <= pay.most_for(SPEC.most_samples)


@pytest.mark.parametrize(
    ("count", "nodes", "detail"),
    [
        (0, 1, "no node is connected"),
        (2, 3, "training.nodes is 3, and of 2 connected nodes 2 can train it"),
    ],
)
def test_estimate_without_nodes_says_what_is_missing(
    tmp_path: Path, count: int, nodes: int, detail: str
) -> None:
    async def ask() -> None:
        services = services_in(tmp_path)
        connect_nodes(services, count=count)
        training = msgspec.structs.replace(SPEC.training, nodes=nodes)
        await ask_estimate(services, msgspec.structs.replace(SPEC, training=training))

    with pytest.raises(HyperGPUError) as failure:
        asyncio.run(ask())
    assert failure.value.reason is Reason.NODES_MISSING
    assert failure.value.detail == detail
    assert failure.value.fix


def test_estimates_of_one_token_are_limited(tmp_path: Path) -> None:
    async def ask() -> None:
        services = services_in(tmp_path)
        servicer = services.job_servicer()
        request = job_pb2.EstimateJobRequest(spec_json=spec_json(SPEC), parameters=650)
        for _ in range(20):
            try:
                await servicer.estimate_job(request, CALLER)
            except HyperGPUError as error:
                if error.reason is not Reason.NODES_MISSING:
                    raise

    with pytest.raises(HyperGPUError) as failure:
        asyncio.run(ask())
    assert failure.value.reason is Reason.RATE_LIMITED


def test_job_tells_what_is_left_only_if_asked(tmp_path: Path) -> None:
    async def ask() -> list[bool]:
        services = services_in(tmp_path)
        servicer = services.job_servicer()
        async with driving(services):
            runtime = await prepared_job(services)
            runtime.layout = layout_of([TensorSpec("weight", (650,))])
            connect_nodes(services, count=1)
            join_event = NodeJoined(at_ms=Milliseconds(0), node=NODES[0])
            assert await services.driver.submit(JOB, join_event) == ""
            answers = []
            for wants in (False, True):
                request = job_pb2.GetJobRequest(job_id=JOB, wants_forecast=wants)
                answers.append((await servicer.get_job(request, CALLER)).HasField("forecast"))
            return answers

    assert asyncio.run(ask()) == [False, True]


def test_times_of_commands_are_told_by_the_size_of_the_model() -> None:
    times = CommandTimes()
    for took_ms in (40, 50, 60):
        times.note("aggregate", Bytes(1_000), Milliseconds(took_ms))
    times.note("deadline", Bytes(1_000), Milliseconds(1))
    assert times.times_for(Bytes(2_000)).aggregate_ms == 50
    assert times.times_for(Bytes(10**9)).aggregate_ms > 1_000
    assert times.times_for(Bytes(2_000)).plan_ms == CommandTimes().times_for(Bytes(1)).plan_ms
