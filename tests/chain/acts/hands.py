"""Folders with keys and vouchers in them, and the commands that a person gives there."""

import json
from pathlib import Path
from typing import Any

import msgspec
from gpu_node.shell.state.wallet import Wallet
from typer.testing import CliRunner, Result

from gpu_node.shell.state.places import Places
from hypergpu.cli.ledger.stored import VOUCHER_FILE
from hypergpu.cli.main import app
from hypergpu.errors import Reason
from hypergpu.ids import Address
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import separator_of, terms_of
from hypergpu.ledger.typed import Voucher, address_bytes, sign
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.signature import IdentityKey
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, PROFILE, Ground
from tests.signed_receipts import COORDINATOR

NODE = NODES[0]
EACH = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""
WINDOW_S = PROFILE.window_s


class Hands:
    """A person with a node's folder and with the coordinator's."""

    def __init__(self, ground: Ground) -> None:
        """Let the coordinator rest: each transaction now has its own block, once it is sent."""
        self.ground = ground
        self.node = _folder(ground.folder / "node", Path("identity.key"), NODE)
        self.data = _folder(ground.folder / "data", Path("identity/coordinator.key"), COORDINATOR)
        self.contract = ground.settler.contract
        self.domain = ground.settler.site.domain
        self.job = ground.settler.site.job_key(JOB)
        self._calls, self._token = ground.settler.site.calls, ground.settler.site.token()
        with Places(self.node) as places:
            self.wallet = Wallet(places, NODE.node_id)
            self.wallet.agree(JOB, terms_of(Address(COORDINATOR.node_id), JOB, self.domain))
        ground.ask("evm_setAutomine", True)

    def hold(self, *receipts: SignedReceipt) -> None:
        """Put receipts into the node's wallet."""
        with Places(self.node) as places:
            wallet = Wallet(places, NODE.node_id)
            wallet.agree(JOB, terms_of(Address(COORDINATOR.node_id), JOB, self.domain))
            for receipt in receipts:
                wallet.take(JOB, [receipt])

    def vouch(self, amount: int, *, signer: IdentityKey = COORDINATOR) -> None:
        """Put a voucher into the node's wallet, in the place of the one before."""
        voucher = Voucher(job=self.job, node=NODE.node_id, sequence=2, amount=Wei(amount))
        signature = sign(signer, separator_of(self.domain), voucher)
        (folder,) = (self.node / "ledger").iterdir()
        signed = SignedVoucher(voucher=voucher, signature=signature)
        (folder / VOUCHER_FILE).write_bytes(msgspec.json.encode(signed))

    def as_node(self, *words: str) -> Result:
        """`hypergpu ledger ...` of the node."""
        where = ["--state-dir", str(self.node), "--chain-url", self.ground.url]
        return CliRunner().invoke(app, ["ledger", *words, *where])

    def as_operator(self, *words: str) -> Result:
        """`hypergpu ledger ...` of the operator."""
        where = ["--data-dir", str(self.data), "--ledger-contract", self.contract]
        return CliRunner().invoke(app, ["ledger", *words, *where, "--chain-url", self.ground.url])

    def leave_unpaid(self, receipts: int) -> None:
        """Have the coordinator close an epoch, and be gone before its shares may be paid."""
        self.ground.ask("evm_setAutomine", False)
        self.ground.earn(0, range(receipts))
        self.ground.end(0)
        self.ground.rest()
        self.ground.crash()
        self.ground.ask("evm_setAutomine", True)

    def pass_time(self, seconds: int = WINDOW_S + 1) -> None:
        """Let the chain's clock go on."""
        self.ground.let_pass(seconds)
        self.ground.mine()

    def has(self, key: IdentityKey = NODE) -> int:
        """How much of the token is in a wallet."""
        call = self._calls.token.call("balanceOf", address_bytes(key.node_id))
        return int.from_bytes(self.ground.chain.read(self._token, call))

    @property
    def nonce(self) -> int:
        """How many transactions the node has sent."""
        return self.ground.chain.next_nonce(address_bytes(NODE.node_id))


def told(ended: Result) -> dict[str, Any]:
    """What a command that went well says with ``--json``."""
    assert ended.exit_code == 0, ended.output
    said = json.loads(ended.stdout)
    assert isinstance(said, dict)
    return said


def refused(ended: Result, reason: Reason) -> str:
    """What a command says that was refused."""
    assert ended.exit_code == reason.exit_code, ended.output
    assert ended.stderr.startswith(f"error {reason.number}: ")
    assert ended.stdout == ""
    return ended.stderr


def _folder(folder: Path, name: Path, key: IdentityKey) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(key.secret.hex())
    path.chmod(0o600)
    return folder
