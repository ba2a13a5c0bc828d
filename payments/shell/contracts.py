"""The compiled contracts, and the bytes of calls to them and answers from them.

Artifacts are committed under ``contracts/artifacts`` and lie in ``payments/compiled`` in a wheel.
Calls are encoded by web3's codec: `encode_abi` of its contract class takes twenty times as long.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eth_abi.exceptions import DecodingError
from eth_utils.abi import (
    abi_to_signature,
    function_signature_to_4byte_selector,
    get_abi_input_types,
    get_abi_output_types,
)
from eth_utils.address import to_checksum_address
from web3 import AsyncWeb3
from web3.types import Nonce
from web3.utils.address import get_create_address

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address

LEDGER = "TrainingLedger"
TOKEN = "TestToken"
_FOLDERS = (
    Path(__file__).parents[1] / "compiled",
    Path(__file__).parents[2] / "contracts" / "artifacts",
)
_SELECTOR_BYTES = 4
_BUILT_IN_ERRORS: tuple[Any, ...] = (
    {"type": "error", "name": "Error", "inputs": [{"name": "reason", "type": "string"}]},
    {"type": "error", "name": "Panic", "inputs": [{"name": "code", "type": "uint256"}]},
)
_codec = AsyncWeb3().codec


class Contract:
    """Encodes calls to a compiled contract and decodes its answers, events and errors."""

    def __init__(self, name: str) -> None:
        artifact = _read_artifact(name)
        self.abi: list[Any] = artifact["abi"]
        self._code = bytes.fromhex(artifact["bytecode"][2:])
        self._functions = {each["name"]: each for each in self.abi if each["type"] == "function"}
        errors = [*_BUILT_IN_ERRORS, *(each for each in self.abi if each["type"] == "error")]
        self._errors = {_selector(each): each for each in errors}
        self._selectors = {each: _selector(self._functions[each]) for each in self._functions}
        self._inputs: dict[str, list[str]] = {
            each: get_abi_input_types(self._functions[each]) for each in self._functions
        }

    def encode(self, function: str, *arguments: object) -> bytes:
        """Data of a call. Addresses are ``0x`` text or 20 bytes; structs are tuples."""
        return self._selectors[function] + _codec.encode(self._inputs[function], arguments)

    def encode_creation(self, *arguments: object) -> bytes:
        """Data of the transaction that creates the contract."""
        constructors = [each for each in self.abi if each["type"] == "constructor"]
        types = [kind for each in constructors for kind in get_abi_input_types(each)]
        return self._code + _codec.encode(types, arguments)

    def decode(self, function: str, answer: bytes) -> Any:
        """The answer of a view: a mapping where it is one struct, else a value or a tuple.

        Raises:
            ValueError: The bytes are no such answer, as from an address without the contract.
        """
        found = self._functions[function]
        try:
            values = _codec.decode(get_abi_output_types(found), answer)
        except DecodingError as broken:
            raise ValueError(f"{function} was answered with {len(answer)} odd bytes") from broken
        return _struct_mapping(found["outputs"][0], values[0]) if len(values) == 1 else values

    def describe_error(self, answer: bytes) -> str:
        """A revert in words: the contract's error with its arguments."""
        found = self._errors.get(answer[:_SELECTOR_BYTES])
        if found is None:
            return f"0x{answer.hex()}" if answer else "no reason given"
        try:
            values = _codec.decode(get_abi_input_types(found), answer[_SELECTOR_BYTES:])
        except DecodingError:
            return f"0x{answer.hex()}"
        if found["name"] == "Error":
            return str(values[0])
        return f"{found['name']}({', '.join(map(_text, values))})"


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


def _selector(abi: Any) -> bytes:
    return function_signature_to_4byte_selector(abi_to_signature(abi))


def _struct_mapping(output: Mapping[str, Any], value: Any) -> Any:
    """A struct as a mapping by the names of its fields, nested ones too."""
    if output["type"] != "tuple":
        return value
    fields: Sequence[Mapping[str, Any]] = output["components"]
    return {
        each["name"]: _struct_mapping(each, part) for each, part in zip(fields, value, strict=True)
    }


def _text(value: object) -> str:
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


def _read_artifact(name: str) -> dict[str, Any]:
    for folder in _FOLDERS:
        path = folder / f"{name}.json"
        if path.is_file():
            artifact: dict[str, Any] = json.loads(path.read_bytes())
            return artifact
    raise HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"the compiled contract {name} is not installed",
        fix="in a clone: make contracts; else install hypergpu again",
    )
