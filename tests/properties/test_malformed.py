"""Malformed input of every parser that strangers reach: each ends in a precise error or in success.

FUZZ_MESSAGES sets how many there are in all.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.core.measure.observations import add_observation
from coordinator.core.measure.reading import NodeReading
from coordinator.shell import translate
from coordinator.shell.bulk.tickets import Claims, authorization, claims_in
from coordinator.shell.journal.journal import check_rows, genesis
from coordinator.shell.servicers.calls import parser
from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.reading import parse_job, parse_spec_json, spec_json
from hypergpu.jobfile.spec import CODECS
from hypergpu.jobfile.toml import JobFileError
from hypergpu.tensors.codec import IncrementalCheck, decode_update, update_bytes
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import job_pb2, node_pb2, payments_pb2, receipt_pb2, tensor_pb2
from hypergpu.wire.credentials import Role, Token, parse_authorization, parse_token, token_text
from hypergpu.wire.messages import assignment_value, blob_value, digest_value, receipt_value
from payments.core.verify import decode_file, encode_file
from tests.properties.payments.test_verify import FILE
from tests.unit.aggregation.fold_files import LAYOUT

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "100000"))
NODE = NodeId("0x" + "a1" * 20)
JOB = JobId("job-000000000001")
PRECISE = (HyperGPUError, JobFileError)
TOML = b'workload = "digits-softmax"\n[training]\nrounds = 5\nnodes = 2\n[round]\ndeadline = "9s"\n'
TOKEN = Token(("127.0.0.1:7700",), digest_of(b"ca"), Role.NODE, TokenId("0123456789ab"), "s" * 24)
CLAIMS = Claims("PUT", "name", Bytes(9), NODE, "", Milliseconds(1 << 40))
SECRET = bytes(32)
NUMBERS = (0, 1, 2, 255, 2**31 - 1)
LARGE = {
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_INT64: -(2**63),
}
TEXTS = ("", JOB, NODE, "latest", "\x00\x1b[2J", "9" * 400, "é" * 300)
BLOBS = (b"", *[bytes(32)] * 20, bytes(20), bytes(65), b"\xff" * 64)


def scalar(field: Any, dice: random.Random) -> object:
    """A value that a field may have."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            is_text = field.type == FieldDescriptor.TYPE_STRING
            return dice.choice(TEXTS) if is_text else dice.choice(BLOBS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return dice.choice((0.0, -1.5, float("nan"), float("inf")))
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.choice((0, 1, 99))
        case kind:
            return dice.choice((*NUMBERS, LARGE.get(kind, 0)))


def fill(message: Message, dice: random.Random, depth: int = 4) -> Message:
    """Give the fields of a message values."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.3 or depth == 0:
            continue
        held = getattr(message, field.name)
        is_many = field.is_repeated
        if field.message_type is None:
            value = scalar(field, dice)
            held.append(value) if is_many else setattr(message, field.name, value)
        elif not field.message_type.GetOptions().map_entry:
            within = held.add() if is_many else held
            within.SetInParent()
            fill(within, dice, depth - 1)
    return message


def mutate(content: bytes, dice: random.Random) -> bytes:
    """The bytes with a few changes; now and then other bytes altogether."""
    if dice.random() < 0.05:
        return dice.randbytes(dice.randrange(200))
    changed = bytearray(content)
    for _ in range(dice.randrange(4)):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(4):
            case 0:
                changed[at : at + 1] = dice.randbytes(1)
            case 1:
                del changed[at : at + dice.randrange(9)]
            case 2:
                changed[at:at] = dice.randbytes(dice.randrange(9))
            case _:
                changed[at:at] = changed[: dice.randrange(len(changed) + 1)][-64:]
    return bytes(changed)


KINDS = [
    GetMessageClass(kind)
    for file in (job_pb2, node_pb2, payments_pb2, receipt_pb2, tensor_pb2)
    for kind in file.DESCRIPTOR.message_types_by_name.values()
]
"""Every message of every schema."""


def hear_hello(hello: node_pb2.Hello) -> None:
    translate.capabilities_value(hello.capabilities)
    for each in hello.newest_receipts:
        receipt_value(each.receipt, NODE)


def hear_measured(measured: node_pb2.Measured) -> None:
    reading = NodeReading()
    for each in translate.observations(measured, Milliseconds(0), own=""):
        reading = add_observation(reading, each)


TRANSLATIONS: dict[str, Callable[[Any], object]] = {
    "Assignment": assignment_value,
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
    kind = dice.choice(KINDS)
    message = parser(kind)(mutate(fill(kind(), dice).SerializeToString(), dice))
    TRANSLATIONS.get(kind.DESCRIPTOR.name, str)(message)


def judge_ticket(dice: random.Random) -> None:
    altered = mutate(authorization(CLAIMS, SECRET).encode(), dice).decode("latin-1")
    claims = claims_in(altered, SECRET, Milliseconds(0))
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


def judge_rows(dice: random.Random) -> None:
    values: tuple[object, ...] = (0, 1, -1, 2**70, None, "text", b"\xff", b"JobPaused", 1.5)
    rows = [[dice.choice(values) for _ in range(dice.randrange(8))] for _ in range(3)]
    assert check_rows(JOB, genesis(JOB), rows, None).damage


RECEIPTS = encode_file(FILE)


def judge_receipts(dice: random.Random) -> None:
    decode_file(mutate(RECEIPTS, dice), source="a file")


SHARES: dict[Callable[[random.Random], None], float] = {
    judge_rpc: 0.6,
    judge_ticket: 0.1,
    judge_token: 0.1,
    judge_job: 0.03,
    judge_update: 0.05,
    judge_rows: 0.1,
    judge_receipts: 0.02,
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
        except Exception as broken:  # noqa: BLE001  counted: the seed says which
            crashes.append(f"seed {seed}: {type(broken).__name__}: {broken}"[:200])
    said = f"{judge.__name__}: malformed_crashes: {len(crashes)} of {count}"
    record_property("said", said)
    assert not crashes, (said, crashes[:5])


def test_shares_of_malformed_input_make_up_all_messages() -> None:
    assert sum(round(share * MESSAGES) for share in SHARES.values()) == MESSAGES
