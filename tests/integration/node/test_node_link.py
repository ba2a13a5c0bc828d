import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpu_node.core import events
from gpu_node.core.link import ToldPace
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.folder.state import StatePaths, identity_key, load_coordinator, save_coordinator
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.link.dialling import dial_first
from gpu_node.shell.link.event_queue import EventQueue
from hypergpu.crypto import IdentityKey, JoinClaim, node_id_of, verify
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest
from hypergpu.ledger_terms import Domain, Terms
from hypergpu.protocol import PROTOCOL
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.authority import reject_distant_plaintext
from hypergpu.wire.credentials import Role
from hypergpu.wire.messages import assignment_value, lease_message, receipt_message, terms_message
from netsim.emulation.requests import Condition, SetCondition
from netsim.proxy.proxies import Proxies
from tests.integration.netsim.proxied import link, plan
from tests.integration.node.fake_coordinator import (
    TIMEOUT_MS,
    WELCOME,
    FakeCoordinator,
    Served,
    serve,
    state_paths_in,
    terms_for,
)
from tests.properties.statements import JOB, TERMS, Work, signed_receipt
from tests.unit.node.node_states import lease

CAPABILITIES = node_pb2.Capabilities(device="cpu", worker="null")
HELD = lease()


class JoinedNode:
    """A service, and a node that joined it."""

    def __init__(self, there: Served, paths: StatePaths) -> None:
        self.there = there
        self.service: FakeCoordinator = there.service
        self.paths = paths
        self.identity: IdentityKey = identity_key(paths)
        self.event_queue = EventQueue()
        self.dial_with(Access(paths, self.identity, timeout_ms=TIMEOUT_MS))

    def dial_with(self, access: Access) -> None:
        self.access = access
        receipts = ReceiptKeeper(self.paths, self.identity.node_id)
        self.link = CoordinatorStream(access, receipts, self.event_queue, renewal_retry_s=0.05)
        self.link.capabilities = CAPABILITIES

    async def join(self) -> None:
        await self.access.join(self.there.token, CAPABILITIES)

    async def event(self) -> events.NodeEvent:
        async with asyncio.timeout(240):
            return await self.event_queue.next()

    def say(self, **message: object) -> None:
        self.service.to_say.put_nowait(node_pb2.ControlResponse(**message))  # type: ignore[arg-type]


@pytest.fixture(params=["tls", "plaintext"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[JoinedNode]:
    folder = tmp_path / "authority" if request.param == "tls" else None
    with state_paths_in(tmp_path) as paths:
        async with serve(folder) as there:
            node = JoinedNode(there, paths)
            await node.join()
            yield node
            await node.link.close()


@pytest.fixture
async def tls_node(tmp_path: Path) -> AsyncIterator[JoinedNode]:
    with state_paths_in(tmp_path) as paths:
        async with serve(tmp_path / "authority") as there:
            node = JoinedNode(there, paths)
            yield node
            await node.link.close()


async def connect(node: JoinedNode) -> None:
    node.link.open((HELD,))
    assert isinstance(await node.event(), events.Connected)


async def test_a_join_is_signed_by_the_key_whose_id_the_node_bears(node: JoinedNode) -> None:
    (request,) = node.service.joins
    claim = JoinClaim(node.there.token.id, digest_of(request.certificate_request))
    assert verify(node.identity.node_id, claim, request.signature)
    assert node_id_of(request.public_key) == node.identity.node_id


async def test_the_secret_is_not_sent_to_another_authority(tls_node: JoinedNode) -> None:
    token = msgspec.structs.replace(tls_node.there.token, authority=Digest("ab" * 32))
    tls_node.there = tls_node.there._replace(token=token)
    with pytest.raises(HyperGPUError) as failure:
        await tls_node.join()
    assert failure.value.reason is Reason.AUTHORITY_MISMATCH
    assert tls_node.service.joins == []


async def test_a_join_goes_on_to_the_next_address(tls_node: JoinedNode) -> None:
    token = tls_node.there.token
    token = msgspec.structs.replace(token, addresses=("127.0.0.1:1", *token.addresses))
    tls_node.there = tls_node.there._replace(token=token)
    await tls_node.join()
    assert len(tls_node.service.joins) == 1


async def test_a_join_that_reaches_nobody_says_where_it_tried(tls_node: JoinedNode) -> None:
    token = msgspec.structs.replace(tls_node.there.token, addresses=("127.0.0.1:1",))
    tls_node.there = tls_node.there._replace(token=token)
    with pytest.raises(HyperGPUError, match=r"COORDINATOR_UNREACHABLE.*127\.0\.0\.1:1"):
        await tls_node.join()


async def test_a_users_token_does_not_make_a_node(tls_node: JoinedNode) -> None:
    token = msgspec.structs.replace(tls_node.there.token, role=Role.USER)
    tls_node.there = tls_node.there._replace(token=token)
    with pytest.raises(HyperGPUError, match="ROLE_FORBIDDEN"):
        await tls_node.join()


async def test_the_first_message_is_a_hello_with_what_is_being_worked_on(node: JoinedNode) -> None:
    await connect(node)
    hello = await node.service.next_said("hello")
    assert hello.version.protocol == PROTOCOL
    assert list(hello.working) == [lease_message(HELD)]
    assert hello.capabilities == CAPABILITIES


async def test_a_hello_shows_the_last_receipt_of_each_job(node: JoinedNode) -> None:
    receipt = signed_receipt(node.identity, Work())
    node.link.receipts.take(JOB, [receipt], TERMS)
    node.link.open(())
    (newest_receipt,) = (await node.service.next_said("hello")).newest_receipts
    assert (newest_receipt.job_id, newest_receipt.receipt) == (JOB, receipt_message(receipt))


async def test_a_hello_says_that_the_worker_is_starting_until_it_is_ready(node: JoinedNode) -> None:
    node.link.note_worker_starting()
    await connect(node)
    assert (await node.service.next_said("hello")).is_starting
    node.link.note_worker_ready()
    await node.service.next_said("worker_ready")


async def test_a_hello_after_the_worker_got_ready_says_nothing_of_it(node: JoinedNode) -> None:
    node.link.note_worker_starting()
    node.link.note_worker_ready()
    await connect(node)
    assert not (await node.service.next_said("hello")).is_starting


async def test_a_worker_that_gets_ready_during_the_greeting_is_told_of_after_it(
    tls_node: JoinedNode,
) -> None:
    await tls_node.join()
    tls_node.link.note_worker_starting()
    tls_node.link.open((HELD,))
    assert (await tls_node.service.next_said("hello")).is_starting
    tls_node.link.note_worker_ready()
    await tls_node.service.next_said("worker_ready")


async def test_what_the_coordinator_says_becomes_events(node: JoinedNode) -> None:
    await connect(node)
    new_assignment = node_pb2.Assignment(
        lease=lease_message(HELD),
        workload_options='{"width": 8}',
        terms=terms_message(terms_for(HELD.job_id), epoch=3),
    )
    for digest in (new_assignment.model.blob.digest, new_assignment.model.layout):
        digest.value = bytes(32)
    node.say(assignment=new_assignment)
    node.say(cancel=node_pb2.Cancel(lease=lease_message(HELD), reason="closed"))
    node.say(release=node_pb2.Release(job_id=HELD.job_id, reason="over"))
    node.say(drain=node_pb2.Drain(reason="maintenance"))
    first = await node.event()
    assert isinstance(first, events.ShardAssigned)
    assert first.assignment == assignment_value(new_assignment)
    assert first.assignment.task.options == {"width": 8}
    kinds = [type(await node.event()) for _ in range(3)]
    assert kinds == [events.ShardCancelled, events.JobReleased, events.DrainRequested]


async def test_an_assignment_that_cannot_be_read_is_handed_back(node: JoinedNode) -> None:
    await connect(node)
    node.say(assignment=node_pb2.Assignment(lease=lease_message(HELD), workload_options="{"))
    back = await node.service.next_said("hand_back")
    assert back.lease == lease_message(HELD)
    assert back.cause == node_pb2.FAILURE_CAUSE_OTHER
    assert "REQUEST_INVALID" not in back.reason


async def test_work_for_other_terms_than_its_job_had_is_handed_back(node: JoinedNode) -> None:
    await connect(node)
    agreed_terms = terms_for(HELD.job_id)
    others = Terms(agreed_terms.job, agreed_terms.coordinator, Domain(1, Address("0x" + "99" * 20)))
    new_assignment = node_pb2.Assignment(
        lease=lease_message(HELD), terms=terms_message(others, epoch=0)
    )
    for digest in (new_assignment.model.blob.digest, new_assignment.model.layout):
        digest.value = bytes(32)
    first = replace(assignment_value(new_assignment), terms=agreed_terms)
    node.link.receipts.agree(first.lease.job_id, first.terms)
    node.say(assignment=new_assignment)
    back = await node.service.next_said("hand_back")
    assert back.lease == lease_message(HELD)
    assert "now on chain 1, contract 0x99" in back.reason


async def test_what_the_node_says_last_still_arrives(node: JoinedNode) -> None:
    await connect(node)
    node.link.send(node_pb2.ControlRequest(draining=node_pb2.Draining(reason="SIGTERM")))
    await node.link.close()
    assert (await node.service.next_said("draining")).reason == "SIGTERM"


async def test_a_stream_that_ends_is_a_lost_link(node: JoinedNode) -> None:
    await connect(node)
    node.service.to_say.put_nowait(None)
    assert isinstance(await node.event(), events.LinkLost)
    assert node.link.calls is None


async def test_a_refused_stream_says_why(node: JoinedNode) -> None:
    node.service.rejection = HyperGPUError(Reason.NODE_REVOKED, "it was revoked")
    node.link.open(())
    event = await node.event()
    while isinstance(event, events.LinkLost):
        # A refusal that comes while the hello is being written is lost by gRPC: a node dials again.
        assert event.reason.startswith("INTERNAL: Internal error from Core")
        node.link.open(())
        event = await node.event()
    assert isinstance(event, events.LinkRejected)
    assert event.reason == "NODE_REVOKED (1107): it was revoked"


async def test_a_coordinator_of_another_version_is_refused_with_the_upgrade(
    node: JoinedNode,
) -> None:
    newer = node_pb2.Version(protocol=PROTOCOL + 1, software="hypergpu 2")
    node.service.welcome = node_pb2.Welcome(version=newer, heartbeat_interval_ms=200)
    node.link.open(())
    event = await node.event()
    assert isinstance(event, events.LinkRejected)
    assert "run here: pip install --upgrade hypergpu" in event.reason


async def test_a_coordinator_that_falls_silent_is_a_lost_link(node: JoinedNode) -> None:
    node.service.echoes = False
    node.service.welcome = node_pb2.Welcome(version=WELCOME.version, heartbeat_interval_ms=20)
    await connect(node)
    event = await node.event()
    assert isinstance(event, events.LinkLost)
    assert event.reason == "the coordinator is silent"
    assert event.is_silent


async def test_a_welcome_over_a_known_line_is_waited_for_no_longer_than_that_line_takes(
    node: JoinedNode,
) -> None:
    assert node.link._welcome_timeout_s() == TIMEOUT_MS / 1000
    node.link.prober.measurements.add_round_trip(50_000)
    assert node.link._welcome_timeout_s() == 4.5
    node.link.prober.measurements.add_round_trip(4_000_000)
    assert node.link._welcome_timeout_s() == TIMEOUT_MS / 1000


async def test_a_handshake_with_a_process_of_thousands_may_wait_for_its_turn(
    node: JoinedNode,
) -> None:
    node.link.prober.measurements.add_round_trip(50_000)
    node.link._pace = ToldPace(Milliseconds(5_000))
    assert (node.link._timeout_s, node.link._welcome_timeout_s()) == (TIMEOUT_MS / 1000, 5.0)
    node.link._pace = ToldPace(Milliseconds(30_000))
    assert (node.link._timeout_s, node.link._welcome_timeout_s()) == (90.0, 90.0)


async def test_a_node_that_a_process_at_its_start_tells_to_speak_often_dials_as_before(
    node: JoinedNode,
) -> None:
    for interval_ms in (30_000, 5_000):
        node.service.welcome = node_pb2.Welcome(
            version=WELCOME.version, heartbeat_interval_ms=interval_ms
        )
        await connect(node)
        node.service.to_say.put_nowait(None)
        event = await node.event()
        assert isinstance(event, events.LinkLost)
        assert event.heartbeat_ms == 30_000


async def test_a_dial_into_a_half_open_line_is_through_once_that_is_healed(
    node: JoinedNode,
) -> None:
    coordinator = load_coordinator(node.paths)
    assert coordinator is not None
    node_port = int(coordinator.address.rpartition(":")[2])
    node.link.prober.measurements.add_round_trip(5_000)
    async with Proxies(plan(node_port, node=link(1))) as proxies:
        host, port = proxies.address("node")
        through = msgspec.structs.replace(coordinator, address=f"{host}:{port}")
        save_coordinator(node.paths, through)
        await proxies.obey(SetCondition("node", Condition.HALF_OPEN))
        node.link.open(())
        accepted_count = 0
        while not accepted_count:
            await asyncio.sleep(0)
            accepted_count = proxies.statistics().nodes["node"].accepted
        await proxies.obey(SetCondition("node", Condition.OPEN))
        # What was accepted stays dead, yet nothing has to be given up before another is tried.
        assert isinstance(await node.event(), events.Connected)
        await node.link.close()


def put_first(node: JoinedNode, address: str) -> str:
    """Let the node know another coordinator, which it dials first; gives the real one's address."""
    coordinator = load_coordinator(node.paths)
    assert coordinator is not None
    changed_coordinator = replace(coordinator, address=address, others=(coordinator.address,))
    save_coordinator(node.paths, changed_coordinator)
    return coordinator.address


async def test_where_a_coordinator_is_gone_the_next_one_is_dialled_and_kept(
    node: JoinedNode,
) -> None:
    address = put_first(node, "127.0.0.1:1")
    await connect(node)
    kept_coordinator = load_coordinator(node.paths)
    assert kept_coordinator is not None
    assert (kept_coordinator.address, kept_coordinator.others) == (address, ())


async def test_a_coordinator_that_stands_still_does_not_hold_up_the_next(node: JoinedNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        put_first(node, f"127.0.0.1:{silent.getsockname()[1]}")
        await connect(node)


async def test_a_coordinator_that_stands_still_gets_ever_fewer_connections(
    node: JoinedNode,
) -> None:
    call_ends: list[Calls] = []

    def open_calls() -> Calls:
        call_ends.append(node.access.open_calls())
        return call_ends[-1]

    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        coordinator = load_coordinator(node.paths)
        assert coordinator is not None
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        save_coordinator(node.paths, replace(coordinator, address=address))
        with pytest.raises(TimeoutError):
            await dial_first(open_calls, again_s=0.01, timeout_s=0.64)
    # After 0, 10, 30, 70, 150, 310 and 630 ms.
    assert 2 <= len(call_ends) <= 7


async def test_a_welcome_tells_of_other_coordinators(node: JoinedNode) -> None:
    welcome = node_pb2.Welcome(coordinators=["192.0.2.7:7701"])
    welcome.MergeFrom(WELCOME)
    node.service.welcome = welcome
    await connect(node)
    kept_coordinator = load_coordinator(node.paths)
    assert kept_coordinator is not None
    assert kept_coordinator.others == ("192.0.2.7:7701",)


async def test_a_dial_that_nobody_answers_ends(node: JoinedNode) -> None:
    coordinator = load_coordinator(node.paths)
    assert coordinator is not None
    node_port = int(coordinator.address.rpartition(":")[2])
    node.dial_with(Access(node.paths, node.identity, timeout_ms=Milliseconds(100)))
    async with Proxies(plan(node_port, node=link(1))) as proxies:
        host, port = proxies.address("node")
        through = msgspec.structs.replace(coordinator, address=f"{host}:{port}")
        save_coordinator(node.paths, through)
        await proxies.obey(SetCondition("node", Condition.HALF_OPEN))
        node.link.open(())
        event = await node.event()
        assert isinstance(event, events.LinkLost)
        assert event.reason == "the coordinator is silent"
        assert event.is_silent
        await node.link.close()


async def test_a_node_that_is_to_have_bbr_dials_its_own_machine_without(
    tls_node: JoinedNode,
) -> None:
    await tls_node.join()
    access = Access(
        tls_node.paths, tls_node.identity, timeout_ms=TIMEOUT_MS, congestion_control="bbr"
    )
    tls_node.dial_with(access)
    await connect(tls_node)
    access.restore_route()


async def test_a_certificate_past_two_thirds_of_its_life_is_renewed(tls_node: JoinedNode) -> None:
    await tls_node.join()
    due_s = tls_node.access.renewal_due_s()
    assert due_s is not None
    assert 15 * 3600 < due_s <= 16 * 3600
    os.utime(tls_node.paths.certificate, (0, 0))
    await connect(tls_node)
    async with asyncio.timeout(240):
        await tls_node.service.renewed.wait()


async def test_a_renewal_that_finds_the_disk_full_is_tried_again(tls_node: JoinedNode) -> None:
    await tls_node.join()
    os.utime(tls_node.paths.certificate, (0, 0))
    # What cannot be written to, for whatever reason.
    certificate = tls_node.paths.certificate
    certificate.with_name(f".{certificate.name}.new").mkdir()
    await connect(tls_node)
    async with asyncio.timeout(240):
        for _ in range(3):
            await tls_node.service.renewed.wait()
            tls_node.service.renewed.clear()
    assert tls_node.link.calls is not None


async def test_a_renewed_certificate_is_kept_and_lasts_as_long_again(tls_node: JoinedNode) -> None:
    await tls_node.join()
    before = tls_node.paths.certificate.read_bytes()
    os.utime(tls_node.paths.certificate, (0, 0))
    calls = tls_node.access.open_calls()
    await tls_node.access.renew(calls)
    await calls.close()
    assert tls_node.paths.certificate.read_bytes() != before
    assert (tls_node.access.renewal_due_s() or 0) > 15 * 3600


async def test_a_certificate_that_ran_out_asks_for_another_join(tls_node: JoinedNode) -> None:
    await tls_node.join()
    assert tls_node.access.expiry_reason() == ""
    assert tls_node.service.authority is not None
    request = tls_node.service.joins[0].certificate_request
    long_ago = tls_node.service.authority.issue(tls_node.identity.node_id, request, 1_000_000_000)
    tls_node.paths.certificate.write_bytes(long_ago.pem)
    tls_node.link.open(())
    event = await tls_node.event()
    assert isinstance(event, events.LinkRejected)
    assert "join again" in event.reason


async def test_a_node_that_never_joined_is_told_to(tmp_path: Path) -> None:
    with state_paths_in(tmp_path) as paths:
        event_queue, identity = EventQueue(), identity_key(paths)
        access = Access(paths, identity, timeout_ms=TIMEOUT_MS)
        CoordinatorStream(access, ReceiptKeeper(paths, identity.node_id), event_queue).open(())
        event = await event_queue.next()
    assert isinstance(event, events.LinkRejected)
    assert "NODE_NOT_JOINED" in event.reason


async def test_keys_are_readable_by_their_owner_alone(tls_node: JoinedNode) -> None:
    await tls_node.join()
    for path in (tls_node.paths.identity, tls_node.paths.tls_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tls_node.paths.identity.chmod(0o640)
    with pytest.raises(HyperGPUError, match="chmod 600"):
        identity_key(tls_node.paths)


async def test_the_identity_outlives_the_daemon(tls_node: JoinedNode) -> None:
    assert identity_key(tls_node.paths).node_id == tls_node.identity.node_id


def test_two_daemons_never_share_a_state_folder(tmp_path: Path) -> None:
    with (
        state_paths_in(tmp_path),
        pytest.raises(HyperGPUError, match=r"STATE_LOCKED.*give another folder: --state-dir"),
        state_paths_in(tmp_path),
    ):
        pass


def test_nothing_but_this_machine_is_spoken_to_in_the_clear() -> None:
    for address in ("127.0.0.1:7700", "localhost:7700", "[::1]:7700"):
        reject_distant_plaintext(address)
    for address in ("10.0.0.1:7700", "example.org:7700"):
        with pytest.raises(HyperGPUError, match="AUTHORITY_MISMATCH"):
            reject_distant_plaintext(address)


async def test_the_node_dials_the_port_that_the_join_named(tls_node: JoinedNode) -> None:
    await tls_node.join()
    coordinator = load_coordinator(tls_node.paths)
    assert coordinator is not None
    assert coordinator.address == f"127.0.0.1:{tls_node.service.node_port}"
