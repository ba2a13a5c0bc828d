"""Who may call what: tokens, roles, and the service that payments add to the user port."""

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.shell.app.listeners import payments_handlers
from coordinator.shell.rate import LINES
from coordinator.shell.service.calls import Caller, page_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.user.client import AsyncCoordinator, ConnectionTarget, Coordinator
from hypergpu.v1 import node_pb2, payments_pb2, payments_pb2_grpc
from hypergpu.wire.credentials import Role, parse_token, token_text
from hypergpu.wire.free_ports import free_ports
from tests.node_client import NOBODY_LOST, WireNode, next_assignment, reason_of
from tests.processes import Cluster, json_lines

VERSION = (PROTOCOL_ENTRY,)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("access"), *NOBODY_LOST) as cluster:
        yield cluster


def client_with(cluster: Cluster, text: str) -> Coordinator:
    """A connection with some token."""
    return Coordinator(ConnectionTarget(cluster.coordinator.address, parse_token(text), 10.0))


def raw_call(cluster: Cluster, method: str, metadata: tuple[tuple[str, str], ...]) -> None:
    """One unary call with bytes that are no message."""
    with grpc.insecure_channel(cluster.coordinator.address) as channel:
        call: Any = channel.unary_unary(f"/hypergpu.v1.{method}")
        call(b"\xff\xff", metadata=metadata, timeout=240)


def operator_metadata(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """What an operator's calls carry."""
    token = parse_token((cluster.coordinator.data_dir / "operator.token").read_text())
    return (*VERSION, ("authorization", f"Bearer {token.id}.{token.secret}"))


def role_client(cluster: Cluster, role: Role) -> Coordinator:
    """A connection with a new token of a role."""
    with cluster.coordinator.client() as operator:
        return client_with(cluster, operator.create_token(role, ttl_s=600, label="test").token)


WAITING = JobSpec(workload="null", training=TrainingSettings(nodes=7))


def test_a_user_may_list_jobs_and_nodes_and_not_tokens(cluster: Cluster) -> None:
    with role_client(cluster, Role.USER) as user:
        user.jobs()
        user.nodes()
        with pytest.raises(HyperGPUError) as failure:
            user.tokens()
    assert failure.value.reason is Reason.ROLE_FORBIDDEN


def test_only_its_owner_and_operators_change_a_job(cluster: Cluster) -> None:
    with role_client(cluster, Role.USER) as owner, role_client(cluster, Role.USER) as other:
        job_id = owner.submit(WAITING)
        assert other.job(job_id).job.owner == owner.token_id
        for change in (
            lambda: other.stop(job_id),
            lambda: other.pause(job_id),
            lambda: other.resume(job_id),
            lambda: other.set_parameters(job_id, {"training.rounds": "3"}),
            lambda: other.remove(job_id),
        ):
            with pytest.raises(HyperGPUError, match="belongs to token") as failure:
                change()
            assert failure.value.reason is Reason.ROLE_FORBIDDEN
        owner.pause(job_id)
        assert owner.job(job_id).job.phase == "paused"
        with cluster.coordinator.client() as operator:
            operator.stop(job_id)
        owner.remove(job_id)


def test_a_viewer_sees_all_and_changes_nothing(cluster: Cluster) -> None:
    with cluster.coordinator.client() as operator, role_client(cluster, Role.VIEWER) as viewer:
        job_id = operator.submit(WAITING)
        assert job_id in [job.id for job in viewer.jobs()]
        viewer.nodes()
        for change in (lambda: viewer.submit(WAITING), lambda: viewer.stop(job_id)):
            with pytest.raises(HyperGPUError) as failure:
                change()
            assert failure.value.reason is Reason.ROLE_FORBIDDEN
        operator.stop(job_id)
        operator.remove(job_id)


async def test_a_nodes_token_sees_and_drains_the_nodes_that_joined_with_it(
    cluster: Cluster,
) -> None:
    with cluster.coordinator.client() as operator:
        text = operator.create_token(Role.NODE, ttl_s=600, label="test").token
        both = operator.submit(JobSpec(workload="null", training=TrainingSettings(nodes=2)))
    own = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await own.join(text)
    foreign = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await foreign.join(cluster.coordinator.node_token())
    streams = [node.control([("null", 1)]) for node in (own, foreign)]
    for stream in streams:
        await next_assignment(stream)
    with cluster.coordinator.client() as operator:
        other = await asyncio.to_thread(operator.submit, WAITING)
    await asyncio.to_thread(_test_owner, client_with(cluster, text), own.node_id, both, other)
    with cluster.coordinator.client() as operator:
        for job_id in (both, other):
            await asyncio.to_thread(operator.stop, job_id)
    await own.close()
    await foreign.close()


def _test_owner(owner: Coordinator, own: str, job_id: str, foreign_job: str) -> None:
    """The owner of one node sees it, its job, and in that job nothing of others' nodes."""
    with owner:
        assert [node.id for node in owner.nodes()] == [own]
        assert [job.id for job in owner.jobs()] == [job_id]
        assert [each.node for each in owner.job(job_id).participants] == [own]
        events = list(itertools.islice(owner.read_events(job_id), 3))
        assert {event.kind for event in events} == {"JobCreated", "ModelInitialised", "NodeJoined"}
        assert {event.body.get("node", own) for event in events} == {own}
        for read in (owner.job, lambda job: next(owner.read_events(job))):
            with pytest.raises(HyperGPUError, match="no node that joined with this token"):
                read(foreign_job)
        for steer in (owner.drain, owner.pause_node, owner.resume_node):
            with pytest.raises(HyperGPUError, match="did not join with this token"):
                steer("0x" + "00" * 20)
        for change in (
            lambda: owner.stop(job_id),
            lambda: owner.submit(WAITING),
            lambda: owner.revoke_node(own),
            owner.tokens,
        ):
            with pytest.raises(HyperGPUError) as failure:
                change()
            assert failure.value.reason is Reason.ROLE_FORBIDDEN


async def test_a_pause_takes_the_work_back_at_once_and_outlasts_a_restart(
    cluster: Cluster,
) -> None:
    with cluster.coordinator.client() as operator:
        text = operator.create_token(Role.NODE, ttl_s=600, label="test").token
        job_id = operator.submit(JobSpec(workload="null", training=TrainingSettings(nodes=1)))
    own = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await own.join(text)
    stream = own.control([("null", 1)])
    lease = (await next_assignment(stream)).lease
    with client_with(cluster, text) as owner:
        await asyncio.to_thread(owner.pause_node, own.node_id)
    cancel = await anext(message.cancel async for message in stream if message.HasField("cancel"))
    assert (cancel.lease, cancel.reason) == (lease, "paused by its owner")
    own.hang_up()
    cluster.coordinator.kill()
    await asyncio.to_thread(cluster.coordinator.start)
    again = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    again.key, again.node_id, again.metadata = own.key, own.node_id, own.metadata
    stream = again.control([("null", 1)])
    assert (await anext(stream)).HasField("welcome")
    with client_with(cluster, text) as owner, cluster.coordinator.client() as operator:
        (node,) = await asyncio.to_thread(owner.nodes)
        assert (node.state, node.reason) == ("paused", "paused by its owner")
        assert node.job is None
        await asyncio.to_thread(owner.resume_node, own.node_id)
        assert (await next_assignment(stream)).lease.number > lease.number
        await asyncio.to_thread(operator.stop, job_id)
    await own.close()
    await again.close()


async def read_to_the_end(updates: AsyncIterator[object]) -> None:
    async for _ in updates:
        pass


async def test_a_revoked_token_ends_its_idle_watch_at_once(cluster: Cluster) -> None:
    with cluster.coordinator.client() as operator:
        new_token = operator.create_token(Role.VIEWER, ttl_s=600, label="test")
        job_id = operator.submit(WAITING)
        target = ConnectionTarget(cluster.coordinator.address, parse_token(new_token.token), 10.0)
        async with await AsyncCoordinator.open(target) as viewer:
            updates, levels = viewer.read_events(job_id), viewer.watch_telemetry()
            await anext(updates)
            node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
            await node.join(cluster.coordinator.node_token())
            assert node.node_id in [each.id for each in await anext(levels)]
            endings = [asyncio.create_task(read_to_the_end(each)) for each in (updates, levels)]
            operator.revoke_token(new_token.id)
            # Nothing happens in the job: no event wakes the stream.
            for end in endings:
                with pytest.raises(HyperGPUError) as failure:
                    async with asyncio.timeout(5):
                        await end
                assert failure.value.reason is Reason.TOKEN_REVOKED
            await node.close()
        operator.stop(job_id)
        operator.remove(job_id)


def test_a_list_is_cut_into_pages_and_nothing_is_lost() -> None:
    item_list, page = list(range(250)), ""
    collected_items: list[int] = []
    while True:
        items, page = page_of(item_list, page)
        assert len(items) <= 100
        collected_items += items
        if not page:
            break
    assert collected_items == item_list


@pytest.mark.parametrize("page", ["x", "-1", "9" * 20])
def test_a_page_that_no_list_named_is_rejected(page: str) -> None:
    with pytest.raises(HyperGPUError, match="there is no page"):
        page_of([1], page)


def test_a_revoked_token_opens_nothing(cluster: Cluster) -> None:
    with cluster.coordinator.client() as operator:
        new_token = operator.create_token(Role.USER, ttl_s=60, uses=0, label="test")
        operator.revoke_token(new_token.id)
    with client_with(cluster, new_token.token) as user, pytest.raises(HyperGPUError) as failure:
        user.jobs()
    assert failure.value.reason is Reason.TOKEN_REVOKED


def test_a_call_without_a_token_is_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        raw_call(cluster, "JobService/ListJobs", VERSION)
    assert reason_of(failure.value) == "TOKEN_INVALID"


@pytest.mark.parametrize("protocol", ["6", "8"])
def test_another_protocol_is_refused_with_the_command_that_upgrades(
    cluster: Cluster, protocol: str
) -> None:
    with pytest.raises(grpc.RpcError, match="pip install --upgrade hypergpu") as failure:
        raw_call(cluster, "JobService/ListJobs", (("hypergpu-protocol", protocol),))
    assert reason_of(failure.value) == "VERSION_MISMATCH"


def test_bytes_that_are_no_message_are_refused_and_leave_no_traceback(cluster: Cluster) -> None:
    before = len(cluster.coordinator.log.read_text())
    for method in ("JobService/CreateJob", "OperatorService/CreateToken", "NodeService/Join"):
        with pytest.raises(grpc.RpcError) as failure:
            raw_call(cluster, method, operator_metadata(cluster))
        assert reason_of(failure.value) == "REQUEST_INVALID"
    assert "Traceback" not in cluster.coordinator.log.read_text()[before:]


async def test_a_node_that_never_joined_is_refused(cluster: Cluster) -> None:
    stranger = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    request = node_pb2.CommitUpdateRequest()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stranger.stub.CommitUpdate(request, metadata=stranger.metadata, timeout=240)
    await stranger.close()
    assert reason_of(failure.value) == "NODE_UNKNOWN"


async def test_a_join_signed_by_another_key_is_refused_and_spends_nothing(
    cluster: Cluster,
) -> None:
    with cluster.coordinator.client() as operator:
        new_token = operator.create_token(Role.NODE, ttl_s=60, uses=1, label="test")
    impostor = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    honest = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    impostor.key.public_key = honest.key.public_key
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await impostor.join(new_token.token)
    assert reason_of(failure.value) == "SIGNATURE_INVALID"
    assert (await honest.join(new_token.token)).node_id == honest.node_id
    await impostor.close()
    await honest.close()


async def test_a_revoked_node_is_shut_out_at_once_until_it_is_admitted_again(
    cluster: Cluster,
) -> None:
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    stream = node.control([("null", 1)])
    job_id = cluster.submit(JobSpec(workload="null", training=TrainingSettings(nodes=1)))
    await next_assignment(stream)
    with cluster.coordinator.client() as operator:
        operator.revoke_node(node.node_id)
        assert operator.job(job_id).job.nodes == 0
        [summary] = [one for one in operator.nodes() if one.id == node.node_id]
        assert summary.state == "revoked"
        assert [message async for message in stream if message.HasField("assignment")] == []
        node.hang_up()
        with pytest.raises(HyperGPUError) as update_failure:
            await node.ask(node_pb2.OfferUpdateRequest(nonce=1))
        assert update_failure.value.reason is Reason.NODE_REVOKED

        operator.readmit_node(node.node_id)
        assert (await next_assignment(node.control([("null", 1)]))).lease.job_id == job_id
        operator.stop(job_id)
    await node.close()


def test_an_unknown_node_cannot_be_paused(cluster: Cluster) -> None:
    with (
        cluster.coordinator.client() as operator,
        pytest.raises(HyperGPUError, match="never joined"),
    ):
        operator.pause_node("0x" + "00" * 20)


def test_an_unknown_node_cannot_be_revoked(cluster: Cluster) -> None:
    with cluster.coordinator.client() as operator, pytest.raises(HyperGPUError) as failure:
        operator.revoke_node("0x0")
    assert failure.value.reason is Reason.NODE_UNKNOWN


def test_a_thousand_guesses_are_refused_and_lock_out_neither_holder_nor_neighbour(
    cluster: Cluster,
) -> None:
    with cluster.coordinator.client() as operator:
        guessed_token = parse_token(operator.create_token(Role.USER, ttl_s=600, label="test").token)
        neighbour = operator.create_token(Role.USER, ttl_s=600, label="test").token
    guess = (*VERSION, ("authorization", f"Bearer {guessed_token.id}.{'x' * 32}"))
    reasons: Counter[str] = Counter()
    with grpc.insecure_channel(cluster.coordinator.address) as channel:
        call: Any = channel.unary_unary("/hypergpu.v1.JobService/ListJobs")
        guess_calls = [call.future(b"", metadata=guess, timeout=240) for _ in range(1000)]
        for each in guess_calls:
            reasons[reason_of(each.exception())] += 1
    assert reasons.total() == 1000
    assert set(reasons) == {"TOKEN_INVALID", "RATE_LIMITED"}
    assert reasons["TOKEN_INVALID"] < 100
    for text in (token_text(guessed_token), neighbour):
        with client_with(cluster, text) as user:
            user.jobs()


async def test_a_join_line_is_for_its_number_of_nodes_and_revoking_it_ends_their_streams(
    cluster: Cluster,
) -> None:
    with cluster.coordinator.client() as operator:
        line = operator.create_token(Role.NODE, ttl_s=600, uses=2, label="line")
    address, node_address = cluster.coordinator.address, cluster.coordinator.node_address
    own = [WireNode(address, node_address) for _ in range(2)]
    for node in own:
        await node.join(line.token)
    third = WireNode(address, node_address)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await third.join(line.token)
    assert reason_of(failure.value) == "TOKEN_USED_UP"
    await third.join(cluster.coordinator.node_token())
    streams = [node.control([("null", 1)]) for node in (*own, third)]
    for stream in streams:
        assert (await anext(stream)).HasField("welcome")
    with cluster.coordinator.client() as operator:
        uses_by_token = {each.id: each.uses_left for each in operator.tokens()}
        assert uses_by_token[line.id] == 0
        assert operator.revoke_token(line.id) == 2
        states = {each.id: each.state for each in operator.nodes()}
        assert [states[node.node_id] for node in own] == ["revoked", "revoked"]
        assert states[third.node_id] == "idle"
    for node, stream in zip(own, streams, strict=False):
        async with asyncio.timeout(5):
            assert [message async for message in stream if message.HasField("assignment")] == []
        with pytest.raises(HyperGPUError) as update_failure:
            await node.ask(node_pb2.OfferUpdateRequest(nonce=1))
        assert update_failure.value.reason is Reason.NODE_REVOKED
    with cluster.coordinator.client() as operator:
        operator.readmit_node(own[0].node_id)
    own[0].hang_up()
    assert (await anext(own[0].control([("null", 1)]))).HasField("welcome")
    for node in (*own, third):
        await node.close()


def test_plaintext_beyond_loopback_is_refused(tmp_path: Path) -> None:
    coordinator = Cluster(tmp_path, "--listen", "0.0.0.0").coordinator  # noqa: S104
    status = coordinator.launch().wait(timeout=240)
    coordinator.end()
    assert status == Reason.ADDRESS_UNUSABLE.exit_code
    assert "--plaintext needs a loopback address" in coordinator.log.read_text()


def test_the_operators_token_is_for_its_owner_alone(cluster: Cluster) -> None:
    token_file = cluster.coordinator.data_dir / "operator.token"
    assert token_file.stat().st_mode & 0o777 == 0o600
    assert cluster.coordinator.data_dir.stat().st_mode & 0o077 == 0
    assert parse_token(token_file.read_text()).secret not in cluster.coordinator.log.read_text()


def test_the_operators_token_survives_a_restart(cluster: Cluster) -> None:
    token_file = cluster.coordinator.data_dir / "operator.token"
    before = token_file.read_text()
    cluster.coordinator.kill()
    cluster.coordinator.start()
    assert token_file.read_text() == before
    with cluster.coordinator.client() as operator:
        operator.jobs()


class RoleGate:
    """Admits who shows a role."""

    def __init__(self, role: str) -> None:
        self._role = role

    async def admit(self, caller: Caller) -> None:
        if caller.metadata.get("role") != self._role:
            raise HyperGPUError(Reason.ROLE_FORBIDDEN, f"{caller.method} needs {self._role}")


class LedgerAnswers:
    async def get_ledger(self, request: Any, caller: Caller) -> Any:
        if request.job_id == "unknown":
            raise HyperGPUError(Reason.JOB_UNKNOWN, "there is no job 'unknown'")
        return payments_pb2.GetLedgerResponse(escrow=request.job_id)

    async def list_receipts(self, request: Any, caller: Caller) -> Any:
        for number in range(2):
            yield payments_pb2.ListReceiptsResponse(node_id=str(number))

    async def request_reclaim(self, request: Any, caller: Caller) -> Any:
        raise HyperGPUError(Reason.JOB_UNKNOWN, "no job ends here")

    async def reclaim(self, request: Any, caller: Caller) -> Any:
        raise HyperGPUError(Reason.JOB_UNKNOWN, "no job ends here")

    async def retry_halted(self, request: Any, caller: Caller) -> Any:
        return payments_pb2.RetryHaltedResponse(purposes=[request.job_id])


def refuse_foreign_jobs(_caller: Caller, job_id: str) -> None:
    if job_id == "foreign":
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, "no node of the caller had a part in it")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    handlers = payments_handlers(
        LedgerAnswers(), RoleGate("user"), RoleGate("operator"), refuse_foreign_jobs
    )
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


USER, OPERATOR = (("role", "user"),), (("role", "operator"),)


async def test_users_read_and_operators_act(channel: grpc.aio.Channel) -> None:
    stub: Any = payments_pb2_grpc.PaymentsServiceStub(channel)
    ledger = await stub.GetLedger(payments_pb2.GetLedgerRequest(job_id="job-1"), metadata=USER)
    assert ledger.escrow == "job-1"
    request = payments_pb2.ListReceiptsRequest(job_id="job-1")
    assert [each.node_id async for each in stub.ListReceipts(request, metadata=USER)] == ["0", "1"]
    retry = payments_pb2.RetryHaltedRequest(job_id="job-1")
    assert list((await stub.RetryHalted(retry, metadata=OPERATOR)).purposes) == ["job-1"]
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.RetryHalted(retry, metadata=USER)
    assert reason_of(failure.value) == "ROLE_FORBIDDEN"


async def test_an_error_of_the_service_keeps_its_reason(channel: grpc.aio.Channel) -> None:
    stub: Any = payments_pb2_grpc.PaymentsServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.GetLedger(payments_pb2.GetLedgerRequest(job_id="unknown"), metadata=USER)
    assert reason_of(failure.value) == "JOB_UNKNOWN"


def test_requests_that_are_no_http_are_a_line_each_up_to_a_rate(tmp_path: Path) -> None:
    """Anybody who reaches the port can send them: no traceback, and no log that grows by them."""
    count = 3 * LINES.burst
    (bulk_port,) = free_ports(1)
    with Cluster(tmp_path, "--bulk-port", str(bulk_port)) as cluster:
        for number in range(count):
            with socket.create_connection(("127.0.0.1", bulk_port)) as connection:
                connection.sendall(f"GET /{number} HTTP/1.1\r\nbad header\r\n\r\n".encode())
                assert b"400 Bad Request" in connection.recv(4096)
        text = cluster.coordinator.log.read_text("utf-8")
        lines = [each for each in json_lines(cluster.coordinator.log) if "no HTTP" in each["event"]]
    assert "Traceback" not in text
    assert LINES.burst <= len(lines) < 2 * LINES.burst
    assert {line["peer"] for line in lines} == {"127.0.0.1"}
    assert all(line["why"] for line in lines)
