"""Messages with any values in their fields, and bytes with changes in them."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hypergpu.ids import JobId, NodeId

NODE = NodeId("0x" + "a1" * 20)
JOB = JobId("job-000000000001")
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
        field_value = getattr(message, field.name)
        is_many = field.is_repeated
        if field.message_type is None:
            value = scalar(field, dice)
            field_value.append(value) if is_many else setattr(message, field.name, value)
        elif not field.message_type.GetOptions().map_entry:
            within = field_value.add() if is_many else field_value
            within.SetInParent()
            fill(within, dice, depth - 1)
    return message


def mutate(content: bytes, dice: random.Random) -> bytes:
    """The bytes with a few changes; now and then other bytes altogether."""
    if dice.random() < 0.05:
        return dice.randbytes(dice.randrange(200))
    changed_bytes = bytearray(content)
    for _ in range(dice.randrange(4)):
        at = dice.randrange(len(changed_bytes) + 1)
        match dice.randrange(4):
            case 0:
                changed_bytes[at : at + 1] = dice.randbytes(1)
            case 1:
                del changed_bytes[at : at + dice.randrange(9)]
            case 2:
                changed_bytes[at:at] = dice.randbytes(dice.randrange(9))
            case _:
                changed_bytes[at:at] = changed_bytes[: dice.randrange(len(changed_bytes) + 1)][-64:]
    return bytes(changed_bytes)
