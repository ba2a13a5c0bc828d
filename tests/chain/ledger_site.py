"""A ledger on an Anvil, a job that its coordinator opened, and folders of nodes, for commands."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner, Result

from hypergpu.cli.main import app
from hypergpu.ids import Address
from hypergpu.keys.keystore import encrypt_key
from hypergpu.keys.passphrase import made_passphrase
from hypergpu.keys.signature import IdentityKey
from hypergpu.statements.domain import Domain, Terms, job_salt, terms_of, word_bytes
from hypergpu.statements.receipt import SignedReceipt
from hypergpu.units import Wei
from payments.core.calls import TotalsEntry
from payments.core.merkle import leaf, merkle_root
from payments.core.receipt_file import ReceiptFile, encode_file
from payments.shell.anvil import Anvil
from payments.shell.chains import ChainProfile, profile_of_id
from payments.shell.contracts import Contract, created_address, ledger_contract, token_contract
from payments.shell.deployment import LedgerOptions
from payments.shell.ethereum import ContractView, Ethereum
from payments.shell.wallet import ContractCall, Wallet
from tests.properties.statements.strategies import COORDINATOR, JOB, Work, signed_receipt

PRICE, SAMPLES, QUALITY = 1_000_000, 320, 9_000
SCORE = SAMPLES * QUALITY
EACH = PRICE * SCORE // 1_000_000
"""Worth of one receipt."""
WINDOW_S, UNBONDING_S = 60, 600
_HOMES = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME")
_SETTINGS = tuple(
    f"HYPERGPU_{name}"
    for name in ("CONFIG", "TOKEN", "TOKEN_FILE", "ADDRESS", "STATE_DIR", "DATA_DIR", "CHAIN")
)


class LedgerSite:
    """One ledger with one job."""

    def __init__(self, anvil: Anvil, folder: Path, arbiters: tuple[Address, ...] = ()) -> None:
        self.url, self.folder = anvil.url, folder
        self.profile: ChainProfile
        self.profile, _ = profile_of_id(31_337)
        self.arbiters = arbiters or (COORDINATOR.address,)
        self.token = created_address(COORDINATOR.address, 0)
        self.ledger = created_address(COORDINATOR.address, 1)
        self.terms = terms_of(COORDINATOR.address, JOB, Domain(31_337, self.ledger))
        self.receipts: list[SignedReceipt] = []

    def deploy(self, escrow: int = 10**15) -> None:
        """Make token and ledger, and open the job."""
        options = LedgerOptions(
            self.token, WINDOW_S, UNBONDING_S, 1, COORDINATOR.address, self.arbiters
        )
        self.send(
            COORDINATOR,
            ContractCall(token_contract(), None, token_contract().encode_creation()),
            ContractCall(ledger_contract(), None, options.creation_data()),
        )
        self.mint(COORDINATOR, escrow)
        terms = (COORDINATOR.address, bytes(32), bytes(32), PRICE, 4)
        self.send(
            COORDINATOR,
            self.token_call("approve", self.ledger, escrow),
            self.call("openJob", job_salt(JOB), terms, escrow),
        )

    def node(self, key: IdentityKey) -> Path:
        """The folder of a node with its key, terms and newest receipt."""
        folder = self.folder / key.node_id
        held = folder / "ledger" / self.terms.job
        held.mkdir(parents=True)
        (folder / "worker.json").write_bytes(
            b'{"type":"Ready","device":"cuda","device_name":"x","memory_bytes":8589934592,'
            b'"kind":"torch","workloads":{"digits":1}}'
        )
        self.keystore(folder / "identity.key", key, folder.with_name(folder.name + ".passphrase"))
        (held / "terms.json").write_bytes(msgspec.json.encode({"job_id": JOB, "terms": self.terms}))
        own = [each for each in self.receipts if each.receipt.node == key.node_id]
        if own:
            (held / "newest.json").write_bytes(msgspec.json.encode(own[-1]))
        self.fund(key)
        return folder

    def keystore(self, path: Path, key: IdentityKey, passphrase: Path) -> Path:
        """A key's encrypted file; it is opened by the file with its passphrase."""
        path.write_bytes(encrypt_key(key.secret, made_passphrase(passphrase)))
        path.chmod(0o600)
        return path

    def work(self, key: IdentityKey, rounds: int) -> None:
        """Give a node receipts of rounds 0, 1, ...: three rounds an epoch."""
        self.receipts.extend(
            signed_receipt(
                key,
                Work(number, number // 3, SAMPLES, QUALITY),
                sequence=number,
                before=number * SCORE,
                terms=self.terms,
            )
            for number in range(rounds)
        )

    def batch(self, sequence: int, epoch: int, counts: dict[IdentityKey, int]) -> None:
        """Record totals as the coordinator: receipts of each node."""
        entries = [TotalsEntry(key.node_id, count, count * SCORE) for key, count in counts.items()]
        leaves = [
            leaf(each.receipt)
            for each in self.receipts
            for key, count in counts.items()
            if each.receipt.node == key.node_id
            and each.receipt.sequence < count
            and each.receipt.epoch == epoch
        ]
        words = [entry.word() for entry in entries]
        self.act(
            COORDINATOR,
            "submitAggregate",
            *(word_bytes(self.terms.job), epoch, sequence, merkle_root(leaves), words),
        )

    def export(self) -> Path:
        """The job's receipts as a file."""
        path = self.folder / "receipts.jsonl"
        file = ReceiptFile(JOB, self.terms, Wei(PRICE), tuple(self.receipts))
        path.write_bytes(encode_file(file))
        return path

    def hypergpu(self, *words: str) -> Result:
        """Run a command of ``hypergpu ledger``, with no settings but these."""
        home = str(self.folder / "home")
        environment: dict[str, str | None] = dict.fromkeys(_SETTINGS)
        environment |= dict.fromkeys(_HOMES, home)
        return CliRunner().invoke(app, ["ledger", *words], env=environment)

    def as_node(self, folder: Path, *words: str) -> dict[str, Any]:
        """Run a command with a node's folder; its JSON."""
        more = ["--state-dir", str(folder), "--chain-url", self.url, "--json"]
        result = self.hypergpu(*words, *more)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = msgspec.json.decode(result.stdout)
        return found

    def act(self, key: IdentityKey, function: str, *arguments: object) -> None:
        """Call the ledger."""
        self.send(key, self.call(function, *arguments))

    def mint(self, key: IdentityKey, amount: int) -> None:
        """Give an account tokens and gas money."""
        self.fund(key)
        self.send(key, self.token_call("mint", key.address, amount))

    def fund(self, key: IdentityKey) -> None:
        """Give an account gas money."""
        self.ask("anvil_setBalance", key.address, hex(10**21))

    def pass_time(self, seconds: int) -> None:
        """Let the chain's clock go on."""
        self.ask("evm_increaseTime", seconds)
        self.ask("evm_mine")

    def balance(self, address: Address) -> int:
        """Tokens of an account."""
        return int(self.read(token_contract(), self.token, "balanceOf", address))

    def view(self, function: str, *arguments: object) -> Any:
        """A view of the ledger."""
        return self.read(ledger_contract(), self.ledger, function, *arguments)

    def read(self, contract: Contract, address: Address, name: str, *arguments: object) -> Any:
        """A view of a contract."""

        async def work(chain: Ethereum) -> Any:
            (found,) = await chain.read([ContractView(contract, address, name, arguments)])
            return found

        return self._run(work)

    def ask(self, method: str, *parameters: object) -> None:
        """A call of Anvil's own."""

        async def work(chain: Ethereum) -> None:
            await chain.ask(method, *parameters)

        self._run(work)

    def call(self, function: str, *arguments: object) -> ContractCall:
        """A call of the ledger."""
        return ContractCall(
            ledger_contract(), self.ledger, ledger_contract().encode(function, *arguments)
        )

    def token_call(self, function: str, *arguments: object) -> ContractCall:
        """A call of the token."""
        return ContractCall(
            token_contract(), self.token, token_contract().encode(function, *arguments)
        )

    def send(self, key: IdentityKey, *calls: ContractCall) -> None:
        """Have an account make calls."""
        self.fund(key)

        async def work(chain: Ethereum) -> None:
            for call in calls:
                await Wallet(chain, key).send(call)

        self._run(work)

    def _run(self, work: Any) -> Any:
        async def run_connected() -> Any:
            chain = Ethereum(self.url, self.profile)
            try:
                return await work(chain)
            finally:
                await chain.close()

        running: Coroutine[Any, Any, Any] = run_connected()
        return asyncio.run(running)


def job_of(terms: Terms) -> bytes:
    """The job's key as bytes."""
    return word_bytes(terms.job)
