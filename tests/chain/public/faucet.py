"""A public chain's stand-in: nobody makes play money there, and a stranger gives some of his."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.house.tree import ROOT
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.gas import DEPLOY_TOKEN, MINT, TRANSFER
from hypergpu.chain.ledger import TOKEN, ContractCall, LedgerCalls
from hypergpu.chain.local.anvil import Anvil, AnvilOptions
from hypergpu.chain.rpc.answers import Inclusion, quantity
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Draft, Signer
from hypergpu.ids import Address
from hypergpu.signature import IdentityKey

CHAIN_ID = 4242
STRANGER = IdentityKey(
    bytes.fromhex("ac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80")
)
"""The account that Anvil's well-known words give a fortune."""


class Faucet:
    """The stranger, with a token of his own."""

    def __init__(self, url: str) -> None:
        """Make the token.

        Args:
            url: Of a chain that makes a block when it is asked to.
        """
        self._signer = Signer(STRANGER)
        self.chain = EvmChain(HttpRpc(HttpTransport(url)))
        self.calls = LedgerCalls()
        made = self._sent(b"", ContractCall(artifact(TOKEN).code, DEPLOY_TOKEN))
        self.token = Address(f"0x{made.contract.hex()}")

    def give(self, to: str, wei: int) -> None:
        """Gas money."""
        self._sent(bytes.fromhex(to[2:]), ContractCall(b"", TRANSFER), wei)

    def give_tokens(self, to: str, amount: int) -> None:
        """Tokens, in the smallest unit."""
        minted = self.calls.mint(Address(to), amount).call
        self._sent(bytes.fromhex(self.token[2:]), ContractCall(minted, MINT))

    def tokens_of(self, whose: str) -> int:
        """What somebody has of the token."""
        call = self.calls.token.call("balanceOf", bytes.fromhex(whose[2:]))
        return quantity("0x" + self.chain.read(bytes.fromhex(self.token[2:]), call).hex())

    def mine(self, blocks: int = 1, apart_s: int = 1) -> None:
        """Make blocks, so many seconds apart by the chain's clock."""
        self.chain.rpc.call(Call("anvil_mine", (hex(blocks), hex(apart_s))))

    def close(self) -> None:
        """Let go of the connection."""
        self.chain.rpc.close()

    def _sent(self, to: bytes, what: ContractCall, value_wei: int = 0) -> Inclusion:
        draft = Draft(
            chain_id=CHAIN_ID,
            nonce=self.chain.next_nonce(self._signer.address),
            to=to,
            call=what.call,
            gas=what.gas,
            max_fee_wei=10**11,
            tip_wei=10**9,
            value_wei=value_wei,
        )
        signed = self._signer.sign(draft)
        self.chain.send([signed])
        self.mine()
        (place,) = self.chain.inclusions([signed.hash])
        assert place is not None
        assert place.is_success
        return place


@contextmanager
def public_chain(folder: Path, *, block_time_s: int) -> Iterator[tuple[Anvil, Faucet]]:
    """A chain that no profile is for, and the stranger, for as long as the block lasts."""
    options = AnvilOptions(chain_id=CHAIN_ID, block_time_s=block_time_s)
    anvil = Anvil(options, log=folder / "anvil.log")
    anvil.start()
    try:
        faucet = Faucet(anvil.url)
        yield anvil, faucet
        faucet.close()
    finally:
        anvil.stop()


def environment(folder: Path) -> dict[str, str]:
    """Of a person without any settings of ours, who has the command on the path."""
    programs = folder / "bin"
    if not programs.exists():
        programs.mkdir(parents=True)
        command = programs / "hypergpu"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hypergpu.cli "$@"\n', "utf-8")
        command.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HYPERGPU_")}
    return {
        **kept,
        "HOME": str(folder),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_DATA_HOME": str(folder / "data"),
        "OMP_NUM_THREADS": "1",
    }
