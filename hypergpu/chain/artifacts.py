"""Compiled contracts: what they answer to, and the code that makes them.

They are committed under ``contracts/artifacts`` and travel in the wheel beside this file.
"""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason

_PLACES = (
    Path(__file__).parent / "compiled",
    Path(__file__).parents[2] / "contracts" / "artifacts",
)


class Artifact(msgspec.Struct, frozen=True, rename="camel"):
    """One compiled contract."""

    contract_name: str
    compiler: str
    abi: list[dict[str, Any]]
    bytecode: str
    """Of the transaction that makes it, without constructor arguments; ``0x`` and hex digits."""

    @property
    def code(self) -> bytes:
        """`bytecode` as bytes."""
        return bytes.fromhex(self.bytecode[2:])


@cache
def artifact(name: str) -> Artifact:
    """Read a compiled contract by its name.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is not there.
    """
    for folder in _PLACES:
        path = folder / f"{name}.json"
        if path.is_file():
            return msgspec.json.decode(path.read_bytes(), type=Artifact)
    raise HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"the compiled contract {name} is not installed",
        fix="in a clone: make contracts; else install hypergpu again",
    )
