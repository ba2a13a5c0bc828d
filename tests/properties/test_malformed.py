"""Malformed input of every parser that strangers reach: each ends in a precise error or in success.

FUZZ_MESSAGES sets how many there are in all.
"""

import io
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from google.protobuf.message_factory import GetMessageClass
from starlette.websockets import WebSocket

from coordinator.core.network.observations import add_observation
from coordinator.core.network.reading import NodeReading
from coordinator.core.training.job.events import Event
from coordinator.shell import translate
from coordinator.shell.driver.replay import event_entry, state_json
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.service.calls import parser
from coordinator.shell.store.bulk.server import asked_span
from coordinator.shell.store.bulk.tickets import Claims, authorization, claims_in
from coordinator.shell.store.journal.journal import check_rows, genesis
from dashboard_api.shell.feed_socket import resume_wanted
from gpu_node.shell.worker import protocol
from hypergpu.assignment import FailureCause, Lease
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.frames import FrameError, frame, read_frame
from hypergpu.ids import TokenId
from hypergpu.jobfile.reading import parse_job, parse_spec_json, spec_json
from hypergpu.jobfile.spec import CODECS
from hypergpu.jobfile.toml import JobFileError
from hypergpu.packed_work import unpack_work
from hypergpu.tensors.codec import IncrementalCheck, decode_parameters, decode_update, update_bytes
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import (
    job_pb2,
    measurement_pb2,
    node_pb2,
    payments_pb2,
    receipt_pb2,
    tensor_pb2,
    work_pb2,
)
from hypergpu.wire.credentials import Role, Token, parse_authorization, parse_token, token_text
from hypergpu.wire.messages import assignment_value, blob_value, digest_value, receipt_value
from hypergpu.wire.update_requests import range_in
from hypergpu.wire.work import work_assignment_value, work_value
from payments.core.ledger import decode as pay_decode
from payments.core.verify import decode_file, encode_file
from tests.kinds.echo.core.state import EchoItem
from tests.malformed import JOB, NODE, fill, mutate
from tests.properties.payments.test_verify import FILE
from tests.unit.aggregation.fold_files import LAYOUT
from tests.unit.job_states import after, all_events, planning

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "100000"))
UNREADABLE = (msgspec.MsgspecError, UnicodeError)
PRECISE = (HyperGPUError, JobFileError)
TOML = b'workload = "digits-softmax"\n[training]\nrounds = 5\nnodes = 2\n[round]\ndeadline = "9s"\n'
TOKEN = Token(("127.0.0.1:7700",), digest_of(b"ca"), Role.NODE, TokenId("0123456789ab"), "s" * 24)
CLAIMS = Claims("PUT", "name", Bytes(9), NODE, "", Milliseconds(1 << 40))
SECRET = bytes(32)
MESSAGE_TYPES = [
    GetMessageClass(kind)
    for file in (job_pb2, node_pb2, payments_pb2, receipt_pb2, tensor_pb2, work_pb2)
    for kind in file.DESCRIPTOR.message_types_by_name.values()
]
"""Every message of every schema."""


def hear_hello(hello: node_pb2.Hello) -> None:
    translate.capabilities_value(hello.capabilities)
    for each in hello.newest_receipts:
        receipt_value(each.receipt, NODE)


def hear_measured(measured: measurement_pb2.Measured) -> None:
    reading = NodeReading()
    for each in translate.observations(measured, Milliseconds(0), own=""):
        reading = add_observation(reading, each)


def hear_work(message: work_pb2.PackedWork) -> None:
    work = work_value(message)
    unpack_work(work, work.kind, EchoItem)


TRANSLATIONS: dict[str, Callable[[Any], object]] = {
    "Assignment": assignment_value,
    "WorkAssignment": work_assignment_value,
    "PackedWork": hear_work,
    "ContributeRequest": lambda message: hear_work(message.result),
    "Hello": hear_hello,
    "JoinRequest": lambda message: translate.capabilities_value(message.capabilities),
    "Progress": translate.progress_value,
    "Measured": hear_measured,
    "Receipt": lambda message: receipt_value(message, NODE),
    "OfferUpdateRequest": lambda message: digest_value(message.digest),
    "CommitUpdateRequest": lambda message: digest_value(message.digest),
    "OfferDataRequest": lambda message: blob_value(message.blob),
    "CommitDataRequest": lambda message: blob_value(message.blob),
    "CreateJobRequest": lambda message: parse_spec_json(message.spec_json),
}
"""What the servicers and the daemon make of a message, before they act."""


def judge_rpc(dice: random.Random) -> None:
    kind = dice.choice(MESSAGE_TYPES)
    message = parser(kind)(mutate(fill(kind(), dice).SerializeToString(), dice))
    TRANSLATIONS.get(kind.DESCRIPTOR.name, str)(message)


def judge_ticket(dice: random.Random) -> None:
    altered_header = mutate(authorization(CLAIMS, SECRET).encode(), dice).decode("latin-1")
    claims = claims_in(altered_header, SECRET, Milliseconds(0))
    assert claims in (None, CLAIMS)


def judge_token(dice: random.Random) -> None:
    parse_token(mutate(token_text(TOKEN).encode(), dice).decode("latin-1"))
    parse_authorization(mutate(b"Bearer 0123456789ab.secret", dice).decode("latin-1"))


def judge_job(dice: random.Random) -> None:
    if dice.random() < 0.5:
        parse_job(mutate(TOML, dice).decode("utf-8", "replace"))
    else:
        plain = spec_json(parse_job(TOML.decode())).encode()
        parse_spec_json(mutate(plain, dice).decode("utf-8", "replace"))


def judge_update(dice: random.Random) -> None:
    codec = dice.choice(CODECS)
    payload = mutate(dice.randbytes(update_bytes(LAYOUT, codec)), dice)
    check = IncrementalCheck(LAYOUT, codec)
    try:
        check.feed(payload)
        check.finish()
    finally:
        # A node decodes what it kept of its own: any bytes of the right size.
        decode_update(LAYOUT, codec, payload)
        decode_parameters(LAYOUT, codec, payload)


def judge_rows(dice: random.Random) -> None:
    values: tuple[object, ...] = (0, 1, -1, 2**70, None, "text", b"\xff", b"JobPaused", 1.5)
    rows = [[dice.choice(values) for _ in range(dice.randrange(8))] for _ in range(3)]
    assert check_rows(JOB, genesis(JOB), rows, None).damage


RECEIPTS = encode_file(FILE)


def judge_receipts(dice: random.Random) -> None:
    decode_file(mutate(RECEIPTS, dice), source="a file")


DEEP = b"\x91" * 100_000 + b"\xc0"
"""A list in a list and so on."""
EVENTS = [event_entry(JOB, number, event) for number, event in enumerate(all_events())]
STORED_KIND = KINDS.of_journal("JobCreated")
STATE = state_json(after(planning()))


def judge_stored(dice: random.Random) -> None:
    """A journal's events and snapshots, as the coordinator and payments read them."""
    entry = dice.choice(EVENTS)
    body = mutate(entry.body_json, dice)
    with suppress(ValueError):
        pay_decode(entry.kind, body)
    with suppress(*UNREADABLE):
        msgspec.json.decode(body, type=Event)
    with suppress(*UNREADABLE):
        STORED_KIND.stored_state(mutate(STATE, dice))


LEASE = Lease(JOB, 0, 1)
REPLIES: list[protocol.Reply] = [
    protocol.ShardProgress(LEASE, 1, 2, 0.5),
    protocol.ShardFailed(lease=LEASE, reason="2 GiB", cause=FailureCause.OUT_OF_MEMORY),
    protocol.ShardAborted(LEASE),
]


def judge_frames(dice: random.Random) -> None:
    """What a worker writes into its pipe."""
    payload = protocol.encode(dice.choice(REPLIES))
    if dice.random() < 0.05:
        payload = b"\x82\xa4type\xacShardAborted\xa3new" + DEEP
    content = mutate(frame(payload), dice) + frame(payload)
    pipe = io.BytesIO(content)
    with suppress(FrameError):
        while (read := read_frame(pipe)) is not None:
            with suppress(*UNREADABLE):
                protocol.decode_reply(read)


def judge_ranges(dice: random.Random) -> None:
    """Ranges that are asked for or sent, and where a client of the feed says that it was."""
    mutated_header = mutate(dice.choice((b"bytes=0-99", b"bytes 0-99/*", b"bytes=-1")), dice)
    header = mutated_header.decode("latin-1").replace("\r", "").replace("\n", "")
    headers = {"Range": header, "Content-Range": header, "Content-Length": "100"}
    request = make_mocked_request("GET", "/", headers=headers)
    span = asked_span(request)
    assert span is None or 0 <= span.start < span.end
    span = range_in(header, request.content_length)
    assert span is None or span.end - span.start == 100
    query = mutate(b"epoch=abc&seq=17", dice)
    socket = WebSocket({"type": "websocket", "query_string": query}, _silence, _silence)
    resume = resume_wanted(socket)
    assert resume is None or resume.seq >= 0


async def _silence(*_: object) -> Any:
    return {}


SHARES: dict[Callable[[random.Random], None], float] = {
    judge_rpc: 0.5,
    judge_ticket: 0.1,
    judge_token: 0.1,
    judge_job: 0.03,
    judge_update: 0.05,
    judge_rows: 0.1,
    judge_receipts: 0.02,
    judge_stored: 0.05,
    judge_frames: 0.045,
    judge_ranges: 0.005,
}


@pytest.mark.parametrize("judge", SHARES, ids=lambda each: each.__name__)
def test_malformed_input_ends_in_a_precise_error_or_in_success(
    judge: Callable[[random.Random], None],
    record_property: Callable[[str, object], None],
) -> None:
    count, crashes = round(SHARES[judge] * MESSAGES), list[str]()
    for seed in range(count):
        try:
            judge(random.Random(seed))
        except PRECISE:
            continue
        except Exception as error:  # noqa: BLE001  counted: the seed says which
            crashes.append(f"seed {seed}: {type(error).__name__}: {error}"[:200])
    summary = f"{judge.__name__}: malformed_crashes: {len(crashes)} of {count}"
    record_property("said", summary)
    assert not crashes, (summary, crashes[:5])


def test_shares_of_malformed_input_make_up_all_messages() -> None:
    assert sum(round(share * MESSAGES) for share in SHARES.values()) == MESSAGES
