"""Reads what a chain answers, and believes none of it before its form is checked."""

import re
from typing import Any

import msgspec

from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.units import several

HASH_BYTES = 32
ADDRESS_BYTES = 20
_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}", re.ASCII)


class Block(msgspec.Struct, frozen=True):
    """A block's header, as far as it is used."""

    number: int
    hash: bytes
    parent: bytes
    time_s: int
    """Unix seconds by the chain's own clock."""
    base_fee_wei: int
    gas_max: int
    transactions: tuple[bytes, ...] = ()
    """Hashes of what it holds."""


class Event(msgspec.Struct, frozen=True):
    """One log entry of a contract."""

    address: bytes
    topics: tuple[bytes, ...]
    body: bytes


class Inclusion(msgspec.Struct, frozen=True):
    """What a chain says about a transaction that is in a block."""

    hash: bytes
    block_number: int
    block_hash: bytes
    is_success: bool
    gas_used: int
    contract: bytes
    """The contract that it made; empty when it made none."""
    events: tuple[Event, ...] = ()


def quantity(value: object) -> int:
    """Read ``0x`` and hex digits as a number that fits 256 bits.

    Raises:
        RpcGarbledError: it is something else.
    """
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        return int(value, 0)
    raise RpcGarbledError(f"the chain's RPC answered {_shown(value)} where a number belongs")


def octets(value: object, length: int | None = None) -> bytes:
    """Read ``0x`` and hex digits as bytes, of exactly ``length`` when that is given.

    Raises:
        RpcGarbledError: it is something else.
    """
    if isinstance(value, str) and value[:2] == "0x":
        try:
            content = bytes.fromhex(value[2:])
        except ValueError:
            content = None
        if content is not None and (length is None or len(content) == length):
            return content
    wanted = "bytes" if length is None else f"{length} bytes"
    raise RpcGarbledError(f"the chain's RPC answered {_shown(value)} where {wanted} belong")


def block(value: object, number: int | None = None) -> Block:
    """Read a block without its transactions' bodies.

    Args:
        value: What was answered.
        number: The block asked for; another one is not believed.

    Raises:
        RpcGarbledError: it is no block, or another one.
    """
    fields = _fields(value, "a block")
    found = Block(
        number=quantity(fields.get("number")),
        hash=octets(fields.get("hash"), HASH_BYTES),
        parent=octets(fields.get("parentHash"), HASH_BYTES),
        time_s=quantity(fields.get("timestamp")),
        # Chains before EIP-1559 have none; tips alone then make the price.
        base_fee_wei=quantity(fields.get("baseFeePerGas", "0x0")),
        gas_max=quantity(fields.get("gasLimit")),
        transactions=tuple(octets(each, HASH_BYTES) for each in _list(fields, "transactions")),
    )
    if number is not None and found.number != number:
        raise RpcGarbledError(f"asked for block {number}, the chain's RPC gave {found.number}")
    return found


def inclusion(value: object, transaction: bytes) -> Inclusion:
    """Read what an RPC calls a transaction's receipt.

    Raises:
        RpcGarbledError: it is none, another transaction's, or of one that failed and did something.
    """
    fields = _fields(value, "a transaction's receipt")
    named = octets(fields.get("transactionHash"), HASH_BYTES)
    if named != transaction:
        raise RpcGarbledError(
            f"asked for transaction 0x{transaction.hex()}, the chain's RPC gave 0x{named.hex()}"
        )
    made = fields.get("contractAddress")
    found = Inclusion(
        hash=transaction,
        block_number=quantity(fields.get("blockNumber")),
        block_hash=octets(fields.get("blockHash"), HASH_BYTES),
        is_success=_is_success(fields.get("status")),
        gas_used=quantity(fields.get("gasUsed")),
        contract=b"" if made is None else octets(made, ADDRESS_BYTES),
        events=tuple(_event(each) for each in _list(fields, "logs")),
    )
    if found.events and not found.is_success:
        raise RpcGarbledError(
            f"the chain's RPC says that transaction 0x{transaction.hex()} failed, and gives"
            f" {several(len(found.events), 'event')} of it: what fails has none"
        )
    return found


def _is_success(value: object) -> bool:
    status = quantity(value)
    if status not in {0, 1}:
        raise RpcGarbledError(f"a transaction's status is 0 or 1, the chain's RPC gave {status}")
    return status == 1


def _event(value: object) -> Event:
    fields = _fields(value, "a log entry")
    return Event(
        address=octets(fields.get("address"), ADDRESS_BYTES),
        topics=tuple(octets(each, HASH_BYTES) for each in _list(fields, "topics")),
        body=octets(fields.get("data")),
    )


def _fields(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RpcGarbledError(f"the chain's RPC answered {_shown(value)} where {what} belongs")
    return value


def _list(fields: dict[str, Any], name: str) -> list[object]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise RpcGarbledError(f"the chain's RPC answered {_shown(value)} where a list belongs")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
