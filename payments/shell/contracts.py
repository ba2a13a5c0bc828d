"""The compiled contracts, and the bytes of calls to them and answers from them.

Artifacts are committed under ``contracts/artifacts`` and lie in ``payments/compiled`` in a wheel.
Calls are encoded by web3's codec with types that are read once: `encode_abi` of its contract class
takes twenty times as long.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from eth_abi.exceptions import DecodingError
from eth_utils.abi import collapse_if_tuple
from eth_utils.address import to_checksum_address
from web3 import AsyncWeb3
from web3.types import Nonce
from web3.utils.address import get_create_address

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak

LEDGER = "TrainingLedger"
TOKEN = "TestToken"
_FOLDERS = (
    Path(__file__).parents[1] / "compiled",
    Path(__file__).parents[2] / "contracts" / "artifacts",
)
_SELECTOR_BYTES = 4
_ERROR = keccak(b"Error(string)")[:_SELECTOR_BYTES]
_PANIC = keccak(b"Panic(uint256)")[:_SELECTOR_BYTES]
_web3: AsyncWeb3[Any] = AsyncWeb3()


class Artifact(msgspec.Struct, frozen=True, rename="camel"):
    """One compiled contract."""

    contract_name: str
    compiler: str
    abi: list[dict[str, Any]]
    bytecode: str
    """Creation code without constructor arguments; ``0x`` and hex digits."""


class _Function:
    """Selector and types of one function."""

    def __init__(self, abi: Mapping[str, Any]) -> None:
        self.inputs = _types(abi["inputs"])
        self.outputs = _types(abi.get("outputs", ()))
        self.fields = _field_names(abi.get("outputs", ()))
        signature = f"{abi['name']}({','.join(self.inputs)})"
        self.selector = keccak(signature.encode())[:_SELECTOR_BYTES]


class Contract:
    """Encodes calls to a compiled contract and decodes its answers, events and errors."""

    def __init__(self, name: str) -> None:
        self.artifact = _read_artifact(name)
        named = [each for each in self.artifact.abi if each["type"] == "function"]
        self._functions = {each["name"]: _Function(each) for each in named}
        errors = [_Function(each) for each in self.artifact.abi if each["type"] == "error"]
        names = [each["name"] for each in self.artifact.abi if each["type"] == "error"]
        self._errors = {
            each.selector: (name, each) for each, name in zip(errors, names, strict=True)
        }

    def encode(self, function: str, *arguments: object) -> bytes:
        """Data of a call. Addresses are ``0x`` text or 20 bytes; structs are tuples."""
        found = self._functions[function]
        return found.selector + _web3.codec.encode(found.inputs, arguments)

    def encode_creation(self, *arguments: object) -> bytes:
        """Data of the transaction that creates the contract."""
        code = bytes.fromhex(self.artifact.bytecode[2:])
        constructors = [each for each in self.artifact.abi if each["type"] == "constructor"]
        inputs = constructors[0]["inputs"] if constructors else []
        return code + _web3.codec.encode(_types(inputs), arguments)

    def decode(self, function: str, answer: bytes) -> Any:
        """The answer of a view: a mapping where it is one struct, else a value or a tuple.

        Raises:
            ValueError: The bytes are no such answer, as from an address without the contract.
        """
        found = self._functions[function]
        try:
            values = _web3.codec.decode(found.outputs, answer)
        except DecodingError as broken:
            raise ValueError(f"{function} was answered with {len(answer)} odd bytes") from broken
        if len(values) == 1:
            return _named(found.fields[0], values[0])
        return values

    def decode_call(self, function: str, calldata: bytes) -> tuple[Any, ...]:
        """Arguments of a call. The inverse of `encode`."""
        found = self._functions[function]
        return tuple(_web3.codec.decode(found.inputs, calldata[_SELECTOR_BYTES:]))

    def describe_error(self, answer: bytes) -> str:
        """A revert in words: the contract's error with its arguments."""
        try:
            return self._described(answer)
        except DecodingError:
            return f"0x{answer.hex()}"

    def _described(self, answer: bytes) -> str:
        selector, rest = answer[:_SELECTOR_BYTES], answer[_SELECTOR_BYTES:]
        if selector == _ERROR:
            return str(_web3.codec.decode(["string"], rest)[0])
        if selector == _PANIC:
            return f"Panic({_web3.codec.decode(['uint256'], rest)[0]})"
        if selector not in self._errors:
            return f"0x{answer.hex()}" if answer else "no reason given"
        name, found = self._errors[selector]
        values = _web3.codec.decode(found.inputs, rest)
        return f"{name}({', '.join(map(_text, values))})"


@cache
def ledger_contract() -> Contract:
    """The training ledger."""
    return Contract(LEDGER)


@cache
def token_contract() -> Contract:
    """The test token; its ERC-20 part serves any token."""
    return Contract(TOKEN)


def created_address(sender: Address, nonce: int) -> Address:
    """Address of the contract that an account creates with a transaction."""
    return Address(get_create_address(to_checksum_address(sender), Nonce(nonce)).lower())


def _types(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [collapse_if_tuple(dict(each)) for each in inputs]


def _field_names(outputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Of each output its components' names, nested, or None for a plain value."""
    return [
        [(each["name"], _field_names([each])[0]) for each in output["components"]]
        if output["type"] == "tuple"
        else None
        for output in outputs
    ]


def _named(fields: Any, value: Any) -> Any:
    if fields is None:
        return value
    return {name: _named(inner, part) for (name, inner), part in zip(fields, value, strict=True)}


def _text(value: object) -> str:
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


def _read_artifact(name: str) -> Artifact:
    for folder in _FOLDERS:
        path = folder / f"{name}.json"
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=Artifact)
    raise HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"the compiled contract {name} is not installed",
        fix="in a clone: make contracts; else install hypergpu again",
    )
