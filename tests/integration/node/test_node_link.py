import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpu_node.core.events import (
    Connected,
    DrainRequested,
    Event,
    JobReleased,
    LinkLost,
    LinkRefused,
    ShardAssigned,
    ShardCancelled,
)
from gpu_node.shell.link.access import Access, Applicant, join
from gpu_node.shell.link.channels import refuse_distant_plaintext
from gpu_node.shell.link.control import ControlLink
from gpu_node.shell.link.event_queue import EventQueue
from gpu_node.shell.state.files import load_coordinator, save_coordinator
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.receipts import ReceiptKeeper
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest
from hypergpu.keys.signature import IdentityKey, JoinClaim, node_id_of, verify
from hypergpu.statements.domain import Domain, Terms
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import assignment_value, lease_message
from hypergpu.wire.protocol import PROTOCOL
from hypergpu.wire.statements import receipt_message, terms_message
from hypergpu.wire.token import Role
from netsim.emulation.requests import Condition, SetCondition
from netsim.proxy.proxies import Proxies
from tests.integration.netsim.proxied import link, plan
from tests.integration.node.node_service import (
    TIMEOUT_MS,
    WELCOME,
    NodeService,
    Served,
    places_in,
    served,
    terms_for,
)
from tests.properties.statements.strategies import JOB, TERMS, Work, signed_receipt
from tests.unit.node.node_states import lease

CAPABILITIES = node_pb2.Capabilities(device="cpu", worker="null")
HELD = lease()


class Desk:
    """A service, and a node that joined it."""

    def __init__(self, there: Served, places: Places) -> None:
        self.there = there
        self.service: NodeService = there.service
        self.places = places
        self.identity: IdentityKey = identity_key(places)
        self.access = Access(places, self.identity)
        self.event_queue = EventQueue()
        self.link = ControlLink(
            self.access, CAPABILITIES, self.event_queue, timeout_ms=TIMEOUT_MS, renewal_retry_s=0.05
        )

    async def join(self) -> None:
        applicant = Applicant(self.places, self.identity, CAPABILITIES, TIMEOUT_MS)
        await join(applicant, self.there.token)

    async def event(self) -> Event:
        async with asyncio.timeout(240):
            return await self.event_queue.next()

    def say(self, **message: object) -> None:
        self.service.to_say.put_nowait(node_pb2.ControlResponse(**message))  # type: ignore[arg-type]


@pytest.fixture(params=["tls", "plaintext"])
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    folder = tmp_path / "authority" if request.param == "tls" else None
    with places_in(tmp_path) as places:
        async with served(folder) as there:
            desk = Desk(there, places)
            await desk.join()
            yield desk
            await desk.link.close()


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Desk]:
    with places_in(tmp_path) as places:
        async with served(tmp_path / "authority") as there:
            desk = Desk(there, places)
            yield desk
            await desk.link.close()


async def connect(desk: Desk) -> None:
    desk.link.open((HELD,))
    assert isinstance(await desk.event(), Connected)


async def test_a_join_is_signed_by_the_key_whose_id_the_node_bears(desk: Desk) -> None:
    (request,) = desk.service.joins
    claim = JoinClaim(desk.there.token.id, digest_of(request.certificate_request))
    assert verify(desk.identity.node_id, claim, request.signature)
    assert node_id_of(request.public_key) == desk.identity.node_id


async def test_the_secret_is_not_sent_to_another_authority(secured: Desk) -> None:
    token = msgspec.structs.replace(secured.there.token, authority=Digest("ab" * 32))
    secured.there = secured.there._replace(token=token)
    with pytest.raises(HyperGPUError) as refused:
        await secured.join()
    assert refused.value.reason is Reason.AUTHORITY_MISMATCH
    assert secured.service.joins == []


async def test_a_join_goes_on_to_the_next_address(secured: Desk) -> None:
    token = secured.there.token
    token = msgspec.structs.replace(token, addresses=("127.0.0.1:1", *token.addresses))
    secured.there = secured.there._replace(token=token)
    await secured.join()
    assert len(secured.service.joins) == 1


async def test_a_join_that_reaches_nobody_says_where_it_tried(secured: Desk) -> None:
    token = msgspec.structs.replace(secured.there.token, addresses=("127.0.0.1:1",))
    secured.there = secured.there._replace(token=token)
    with pytest.raises(HyperGPUError, match=r"COORDINATOR_UNREACHABLE.*127\.0\.0\.1:1"):
        await secured.join()


async def test_a_users_token_does_not_make_a_node(secured: Desk) -> None:
    token = msgspec.structs.replace(secured.there.token, role=Role.USER)
    secured.there = secured.there._replace(token=token)
    with pytest.raises(HyperGPUError, match="ROLE_FORBIDDEN"):
        await secured.join()


async def test_the_first_message_is_a_hello_with_what_is_being_worked_on(desk: Desk) -> None:
    await connect(desk)
    hello = await desk.service.next_said("hello")
    assert hello.version.protocol == PROTOCOL
    assert list(hello.working) == [lease_message(HELD)]
    assert hello.capabilities == CAPABILITIES


async def test_a_hello_shows_the_last_receipt_of_each_job(desk: Desk) -> None:
    signed = signed_receipt(desk.identity, Work())
    keeper = ReceiptKeeper(desk.places, desk.identity.node_id)
    keeper.take(JOB, [signed], TERMS)
    link = ControlLink(desk.access, CAPABILITIES, desk.event_queue, timeout_ms=TIMEOUT_MS)
    link.open(())
    (shown,) = (await desk.service.next_said("hello")).newest_receipts
    assert (shown.job_id, shown.receipt) == (JOB, receipt_message(signed))
    await link.close()


async def test_a_hello_says_that_the_worker_is_starting_until_it_is_ready(desk: Desk) -> None:
    desk.link.worker_starts()
    await connect(desk)
    assert (await desk.service.next_said("hello")).is_starting
    desk.link.worker_is_ready()
    await desk.service.next_said("worker_ready")


async def test_a_hello_after_the_worker_got_ready_says_nothing_of_it(desk: Desk) -> None:
    desk.link.worker_starts()
    desk.link.worker_is_ready()
    await connect(desk)
    assert not (await desk.service.next_said("hello")).is_starting


async def test_a_worker_that_gets_ready_during_the_greeting_is_told_of_after_it(
    secured: Desk,
) -> None:
    await secured.join()
    secured.link.worker_starts()
    secured.link.open((HELD,))
    assert (await secured.service.next_said("hello")).is_starting
    secured.link.worker_is_ready()
    await secured.service.next_said("worker_ready")


async def test_what_the_coordinator_says_becomes_events(desk: Desk) -> None:
    await connect(desk)
    assigned = node_pb2.Assignment(
        lease=lease_message(HELD),
        workload_options='{"width": 8}',
        terms=terms_message(terms_for(HELD.job_id), epoch=3),
    )
    for digest in (assigned.model.blob.digest, assigned.model.layout):
        digest.value = bytes(32)
    desk.say(assignment=assigned)
    desk.say(cancel=node_pb2.Cancel(lease=lease_message(HELD), reason="closed"))
    desk.say(release=node_pb2.Release(job_id=HELD.job_id, reason="over"))
    desk.say(drain=node_pb2.Drain(reason="maintenance"))
    first = await desk.event()
    assert isinstance(first, ShardAssigned)
    assert first.assignment == assignment_value(assigned)
    assert first.assignment.task.options == {"width": 8}
    kinds = [type(await desk.event()) for _ in range(3)]
    assert kinds == [ShardCancelled, JobReleased, DrainRequested]


async def test_an_assignment_that_cannot_be_read_is_handed_back(desk: Desk) -> None:
    await connect(desk)
    desk.say(assignment=node_pb2.Assignment(lease=lease_message(HELD), workload_options="{"))
    back = await desk.service.next_said("hand_back")
    assert back.lease == lease_message(HELD)
    assert "REQUEST_INVALID" not in back.reason


async def test_work_for_other_terms_than_its_job_had_is_handed_back(desk: Desk) -> None:
    await connect(desk)
    agreed = terms_for(HELD.job_id)
    others = Terms(agreed.job, agreed.coordinator, Domain(1, Address("0x" + "99" * 20)))
    assigned = node_pb2.Assignment(lease=lease_message(HELD), terms=terms_message(others, epoch=0))
    for digest in (assigned.model.blob.digest, assigned.model.layout):
        digest.value = bytes(32)
    first = replace(assignment_value(assigned), terms=agreed)
    desk.link.receipts.agree(first.lease.job_id, first.terms)
    desk.say(assignment=assigned)
    back = await desk.service.next_said("hand_back")
    assert back.lease == lease_message(HELD)
    assert "now on chain 1, contract 0x99" in back.reason


async def test_what_the_node_says_last_still_arrives(desk: Desk) -> None:
    await connect(desk)
    desk.link.send(node_pb2.ControlRequest(draining=node_pb2.Draining(reason="SIGTERM")))
    await desk.link.close()
    assert (await desk.service.next_said("draining")).reason == "SIGTERM"


async def test_a_stream_that_ends_is_a_lost_link(desk: Desk) -> None:
    await connect(desk)
    desk.service.to_say.put_nowait(None)
    assert isinstance(await desk.event(), LinkLost)
    assert desk.link.calls is None


async def test_a_refused_stream_says_why(desk: Desk) -> None:
    desk.service.refusal = HyperGPUError(Reason.NODE_REVOKED, "it was revoked")
    desk.link.open(())
    event = await desk.event()
    assert isinstance(event, LinkRefused)
    assert event.reason == "NODE_REVOKED: it was revoked"


async def test_a_coordinator_of_another_version_is_refused_with_the_upgrade(desk: Desk) -> None:
    newer = node_pb2.Version(protocol=PROTOCOL + 1, software="hypergpu 2")
    desk.service.welcome = node_pb2.Welcome(version=newer, heartbeat_interval_ms=200)
    desk.link.open(())
    event = await desk.event()
    assert isinstance(event, LinkRefused)
    assert "run here: pip install --upgrade hypergpu" in event.reason


async def test_a_coordinator_that_falls_silent_is_a_lost_link(desk: Desk) -> None:
    desk.service.echoes = False
    desk.service.welcome = node_pb2.Welcome(version=WELCOME.version, heartbeat_interval_ms=20)
    await connect(desk)
    event = await desk.event()
    assert isinstance(event, LinkLost)
    assert event.reason == "the coordinator is silent"


async def test_a_welcome_over_a_known_line_is_waited_for_no_longer_than_that_line_takes(
    desk: Desk,
) -> None:
    assert desk.link._patience_s() == TIMEOUT_MS / 1000
    desk.link.prober.findings.round_trip(50_000)
    assert desk.link._patience_s() == 4.5
    desk.link.prober.findings.round_trip(4_000_000)
    assert desk.link._patience_s() == TIMEOUT_MS / 1000


async def test_a_dial_into_a_half_open_line_is_through_once_that_is_healed(desk: Desk) -> None:
    coordinator = load_coordinator(desk.places)
    assert coordinator is not None
    node_port = int(coordinator.address.rpartition(":")[2])
    desk.link.prober.findings.round_trip(5_000)
    async with Proxies(plan(node_port, node=link(1))) as proxies:
        host, port = proxies.address("node")
        through = msgspec.structs.replace(coordinator, address=f"{host}:{port}")
        save_coordinator(desk.places, through)
        await proxies.obey(SetCondition("node", Condition.HALF_OPEN))
        desk.link.open(())
        accepted = 0
        while not accepted:
            await asyncio.sleep(0)
            accepted = proxies.statistics().nodes["node"].accepted
        await proxies.obey(SetCondition("node", Condition.OPEN))
        # What was accepted stays dead, yet nothing has to be given up before another is tried.
        assert isinstance(await desk.event(), Connected)
        await desk.link.close()


async def test_a_dial_that_nobody_answers_ends(desk: Desk) -> None:
    coordinator = load_coordinator(desk.places)
    assert coordinator is not None
    node_port = int(coordinator.address.rpartition(":")[2])
    desk.link = ControlLink(
        desk.access, CAPABILITIES, desk.event_queue, timeout_ms=Milliseconds(100)
    )
    async with Proxies(plan(node_port, node=link(1))) as proxies:
        host, port = proxies.address("node")
        through = msgspec.structs.replace(coordinator, address=f"{host}:{port}")
        save_coordinator(desk.places, through)
        await proxies.obey(SetCondition("node", Condition.HALF_OPEN))
        desk.link.open(())
        event = await desk.event()
        assert isinstance(event, LinkLost)
        assert event.reason == "the coordinator is silent"
        await desk.link.close()


async def test_a_node_that_is_to_have_bbr_dials_its_own_machine_without(secured: Desk) -> None:
    await secured.join()
    access = Access(secured.places, secured.identity, congestion_control="bbr")
    secured.link = ControlLink(access, CAPABILITIES, secured.event_queue, timeout_ms=TIMEOUT_MS)
    await connect(secured)
    access.leave_way()


async def test_a_certificate_past_two_thirds_of_its_life_is_renewed(secured: Desk) -> None:
    await secured.join()
    due_s = secured.access.renewal_due_s()
    assert due_s is not None
    assert 15 * 3600 < due_s <= 16 * 3600
    os.utime(secured.places.certificate, (0, 0))
    await connect(secured)
    async with asyncio.timeout(240):
        await secured.service.renewed.wait()


async def test_a_renewal_that_finds_the_disk_full_is_tried_again(secured: Desk) -> None:
    await secured.join()
    os.utime(secured.places.certificate, (0, 0))
    # What cannot be written to, for whatever reason.
    certificate = secured.places.certificate
    certificate.with_name(f".{certificate.name}.new").mkdir()
    await connect(secured)
    async with asyncio.timeout(240):
        for _ in range(3):
            await secured.service.renewed.wait()
            secured.service.renewed.clear()
    assert secured.link.calls is not None


async def test_a_renewed_certificate_is_kept_and_lasts_as_long_again(secured: Desk) -> None:
    await secured.join()
    before = secured.places.certificate.read_bytes()
    os.utime(secured.places.certificate, (0, 0))
    calls = secured.access.calls(TIMEOUT_MS)
    await secured.access.renew(calls)
    await calls.close()
    assert secured.places.certificate.read_bytes() != before
    assert (secured.access.renewal_due_s() or 0) > 15 * 3600


async def test_a_certificate_that_ran_out_asks_for_another_join(secured: Desk) -> None:
    await secured.join()
    assert secured.access.out_of_date() == ""
    assert secured.service.authority is not None
    request = secured.service.joins[0].certificate_request
    long_ago = secured.service.authority.issue(secured.identity.node_id, request, 1_000_000_000)
    secured.places.certificate.write_bytes(long_ago.pem)
    secured.link.open(())
    event = await secured.event()
    assert isinstance(event, LinkRefused)
    assert "join again" in event.reason


async def test_a_node_that_never_joined_is_told_to(tmp_path: Path) -> None:
    with places_in(tmp_path) as places:
        event_queue = EventQueue()
        access = Access(places, identity_key(places))
        ControlLink(access, CAPABILITIES, event_queue, timeout_ms=TIMEOUT_MS).open(())
        event = await event_queue.next()
    assert isinstance(event, LinkRefused)
    assert "NODE_NOT_JOINED" in event.reason


async def test_keys_are_readable_by_their_owner_alone(secured: Desk) -> None:
    await secured.join()
    for path in (secured.places.identity, secured.places.tls_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secured.places.identity.chmod(0o640)
    with pytest.raises(HyperGPUError, match="chmod 600"):
        identity_key(secured.places)


async def test_the_identity_outlives_the_daemon(secured: Desk) -> None:
    assert identity_key(secured.places).node_id == secured.identity.node_id


def test_two_daemons_never_share_a_state_folder(tmp_path: Path) -> None:
    with (
        places_in(tmp_path),
        pytest.raises(HyperGPUError, match="STATE_LOCKED"),
        places_in(tmp_path),
    ):
        pass


def test_nothing_but_this_machine_is_spoken_to_in_the_clear() -> None:
    for address in ("127.0.0.1:7700", "localhost:7700", "[::1]:7700"):
        refuse_distant_plaintext(address)
    for address in ("10.0.0.1:7700", "example.org:7700"):
        with pytest.raises(HyperGPUError, match="AUTHORITY_MISMATCH"):
            refuse_distant_plaintext(address)


async def test_the_node_dials_the_port_that_the_join_named(secured: Desk) -> None:
    await secured.join()
    coordinator = load_coordinator(secured.places)
    assert coordinator is not None
    assert coordinator.address == f"127.0.0.1:{secured.service.node_port}"
