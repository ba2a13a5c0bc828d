"""`/metrics`: what it tells, and to whom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core.hub.node_figures import REST, SERIES_MOST
from coordinator.shell.gateway.counts import GatewayCounts
from coordinator.shell.gateway.figures import gateway_metrics
from coordinator.shell.metrics.coordinator import coordinator_metrics
from coordinator.shell.metrics.server import (
    MetricsServer,
    OperatorCheck,
    admit_loopback,
    metrics_address,
    require_loopback,
)
from coordinator.shell.nodes.identity.tokens import IssuedTokens, TokenGrant
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.store.journal.records import NodeRecord
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.wire.credentials import Role, parse_token, token_text
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    begin_job,
    connect_node,
    driving,
    finish_round,
    services_in,
)

Samples = dict[tuple[str, str], float]


def samples_of(text: bytes) -> Samples:
    """Values by name and the value of the one label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_a_coordinator_tells_figures_by_node_and_job(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    services.journal.record_node(NodeRecord(NODE, b"", b"{}", "test", 0, 0))
    connect_node(services)
    async with driving(services):
        await begin_job(services)
        await finish_round(services, 0)
        services.nodes.count(NODE, accepted=1)
        samples = samples_of(await coordinator_metrics(services.driver, services.fleet))
    assert samples["hypergpu_node_health", NODE] == 0.75
    assert samples["hypergpu_node_health_reliability", NODE] == 0.75
    assert samples["hypergpu_node_connected", NODE] == 1
    assert samples["hypergpu_node_updates_accepted_total", NODE] == 1
    assert samples["hypergpu_job_round", JOB] == 1
    assert samples["hypergpu_job_updates_accepted_total", JOB] == 1
    assert samples["hypergpu_coordinator_nodes_by_health", "normal"] == 1


async def test_a_large_fleet_has_at_most_a_thousand_series_by_node(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    for number in range(300):
        record = NodeRecord(NodeId(f"0x{number:040x}"), b"", b"{}", "test", number, 0)
        services.journal.record_node(record)
    async with driving(services):
        text = await coordinator_metrics(services.driver, services.fleet)
    by_node = [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if "node" in sample.labels
    ]
    assert len(by_node) <= SERIES_MOST
    assert any(sample.labels["node"] == REST for sample in by_node)


def test_a_gateway_counts_from_its_start_whatever_its_log_told() -> None:
    counts = GatewayCounts(passed=3)
    counts.take()
    counts.passed += 2
    samples = samples_of(gateway_metrics(counts, [], "hub:7700"))
    assert samples["hypergpu_gateway_passed_total", ""] == 5
    assert samples["hypergpu_gateway_coordinator", "hub:7700"] == 1


async def _text() -> bytes:
    return b"hypergpu 1\n"


@asynccontextmanager
async def serving(server: MetricsServer) -> AsyncIterator[str]:
    """The address of a server."""
    await server.open("127.0.0.1:0")
    try:
        yield f"http://127.0.0.1:{server.port}/metrics"
    finally:
        await server.close()


async def status(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status


async def test_loopback_is_answered_without_a_token_by_its_own_names_alone() -> None:
    async with serving(MetricsServer(_text, admit_loopback)) as url:
        assert await status(url) == 200
        assert await status(url, Host="elsewhere.example") == 400
        assert await status(url.replace("/metrics", "/")) == 404


async def test_beyond_loopback_an_operators_token_is_asked_for(tmp_path: Path) -> None:
    tokens = IssuedTokens(services_in(tmp_path).journal)

    def line(role: Role) -> str:
        grant = TokenGrant(role, ttl_s=0, uses=0, label="")
        token = tokens.create(grant, addresses=("hub:1",), authority=Digest(""), now_s=1)
        return f"Bearer {token_text(token)}"

    operator, user, node = line(Role.OPERATOR), line(Role.USER), line(Role.NODE)
    revoked_line = line(Role.OPERATOR)
    tokens.revoke(parse_token(revoked_line.removeprefix("Bearer ")).id)
    check = OperatorCheck(tokens, GuessLimiter())
    async with serving(MetricsServer(_text, check)) as url:
        assert await status(url) == 401
        assert await status(url, Authorization="Bearer nonsense") == 401
        assert await status(url, Authorization=user) == 403
        assert await status(url, Authorization=node) == 403
        assert await status(url, Authorization=revoked_line) == 401
        assert await status(url, Authorization=operator) == 200


def test_a_gateway_serves_metrics_on_loopback_alone() -> None:
    require_loopback("127.0.0.1:9464", "why")
    with pytest.raises(HyperGPUError) as failure:
        require_loopback("0.0.0.0:9464", "why")
    assert failure.value.reason is Reason.ADDRESS_UNUSABLE
    assert "127.0.0.1" in failure.value.fix


async def test_a_port_that_is_taken_is_refused_with_the_address() -> None:
    async with serving(MetricsServer(_text, admit_loopback)) as url:
        address = url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(HyperGPUError, match=address):
            await MetricsServer(_text, admit_loopback).open(address)


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:70000", "hub:x"])
def test_an_address_without_host_or_port_is_refused_with_the_fix(address: str) -> None:
    with pytest.raises(HyperGPUError) as failure:
        metrics_address(address)
    assert failure.value.fix == "such as 127.0.0.1:9464"
