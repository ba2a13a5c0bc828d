"""Commands that act on a ledger, on an Anvil: claims without a coordinator, stake, verdicts."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from hypergpu.crypto import IdentityKey, keccak
from hypergpu.digests import digest_of
from hypergpu.ids import Address
from hypergpu.keys import encrypt_key, made_passphrase
from hypergpu.ledger_terms import Domain, Terms, job_salt, terms_of, word_bytes
from hypergpu.statements import SignedReceipt
from hypergpu.units import Wei
from hypergpu.user.cli.main import app
from payments.cli.account import ContractCall, Wallet
from payments.core.settlement import leaf, merkle_root
from payments.core.transactions import TotalsEntry
from payments.core.verify import ReceiptFile, encode_file
from payments.shell.anvil import Anvil
from payments.shell.chains import ChainProfile, profile_of_id
from payments.shell.ethereum import (
    Contract,
    ContractView,
    Ethereum,
    created_address,
    ledger_contract,
    token_contract,
)
from payments.shell.ledger_choice import LedgerOptions
from tests.properties.statements import COORDINATOR, JOB, Work, node_key, signed_receipt

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
        job_folder = folder / "ledger" / self.terms.job
        job_folder.mkdir(parents=True)
        (folder / "worker.json").write_bytes(
            b'{"type":"Ready","device":"cuda","device_name":"x","memory_bytes":8589934592,'
            b'"kind":"torch","workloads":{"digits":1}}'
        )
        self.keystore(folder / "identity.key", key, folder.with_name(folder.name + ".passphrase"))
        (job_folder / "terms.json").write_bytes(
            msgspec.json.encode({"job_id": JOB, "terms": self.terms})
        )
        own = [each for each in self.receipts if each.receipt.node == key.node_id]
        if own:
            (job_folder / "newest.json").write_bytes(msgspec.json.encode(own[-1]))
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
        answer: dict[str, Any] = msgspec.json.decode(result.stdout)
        return answer

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
            (answer,) = await chain.read([ContractView(contract, address, name, arguments)])
            return answer

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

        connected_work: Coroutine[Any, Any, Any] = run_connected()
        return asyncio.run(connected_work)


def job_of(terms: Terms) -> bytes:
    """The job's key as bytes."""
    return word_bytes(terms.job)


NODE, OTHER = node_key(1), node_key(2)
ARBITERS = sorted((node_key(8), node_key(9)), key=lambda key: key.address)


@pytest.fixture
def site(anvil: Anvil, tmp_path: Path) -> LedgerSite:
    """An open job, and a chain that makes a block for each transaction."""
    ledger_site = LedgerSite(anvil, tmp_path, tuple(key.address for key in ARBITERS))
    ledger_site.ask("evm_setAutomine", True)
    ledger_site.deploy()
    return ledger_site


def test_an_undercounted_node_is_paid_in_full_after_its_coordinator_vanished(
    site: LedgerSite,
) -> None:
    site.work(NODE, 7)
    site.batch(0, 0, {NODE: 2})
    folder = site.node(NODE)

    first = site.as_node(folder, "claim")["acts"][0]
    assert first["amounts"] == {"recorded": str(5 * EACH)}
    assert any("you may close later" in text for text in first["done"])
    assert first["again_at_unix_s"] > 0

    site.pass_time(UNBONDING_S)
    second = site.as_node(folder, "claim", JOB)["acts"][0]
    assert any("was left open" in text for text in second["done"])
    assert "paid" not in second["amounts"]

    site.pass_time(WINDOW_S)
    third = site.as_node(folder, "claim", JOB[:8])["acts"][0]
    assert third["amounts"]["paid"] == str(7 * EACH)
    assert site.balance(NODE.address) == 7 * EACH

    assert site.as_node(folder, "claim")["acts"][0]["done"] == [f"{JOB}: nothing is due"]


def test_a_staked_node_is_paid_at_once_and_its_stake_comes_back_after_the_lock(
    site: LedgerSite,
) -> None:
    site.work(NODE, 3)
    site.mint(NODE, 10 * EACH)
    folder = site.node(NODE)
    assert site.as_node(folder, "register", "--stake", str(EACH))["amounts"] == {
        "staked": str(EACH)
    }
    metrics = site.view("getNodeMetrics", NODE.address, [])
    content = (folder / "worker.json").read_bytes()
    assert metrics["meta"] == {
        "capabilities": word_bytes(digest_of(content)),
        "device": keccak(b"cuda"),
        "memoryMb": 8_192,
    }
    assert site.as_node(folder, "stake", str(4 * EACH))["amounts"]["staked"] == str(5 * EACH)

    site.batch(0, 0, {NODE: 3})
    site.act(COORDINATOR, "closeEpoch", job_of(site.terms), 0)
    paid_act = site.as_node(folder, "claim")["acts"][0]
    assert paid_act["amounts"] == {"paid": str(3 * EACH)}

    refusal = site.hypergpu(
        *("unstake", str(3 * EACH), "--state-dir", str(folder), "--chain-url", site.url)
    )
    assert "payments lock the rest" in refusal.output
    assert f"lock ends within {2 * WINDOW_S} s" in refusal.output
    unstake_answer = site.as_node(folder, "unstake")
    assert unstake_answer["amounts"] == {"unbonding": str(2 * EACH)}
    assert site.as_node(folder, "unstake")["again_at_unix_s"] == unstake_answer["again_at_unix_s"]
    site.pass_time(UNBONDING_S)
    assert site.as_node(folder, "unstake")["amounts"] == {"withdrawn": str(2 * EACH)}
    assert site.balance(NODE.address) == (10 - 5 + 3 + 2) * EACH


def test_registering_twice_and_staking_without_tokens_are_refused_with_the_fix(
    site: LedgerSite,
) -> None:
    folder = site.node(NODE)
    where = ("--state-dir", str(folder), "--chain-url", site.url)
    assert "hypergpu ledger register" in site.hypergpu("stake", "5", *where).output
    assert "has 0 of the token" in site.hypergpu("register", "--stake", "5", *where).output
    site.as_node(folder, "register")
    again = site.hypergpu("register", *where)
    assert again.exit_code != 0
    assert "hypergpu ledger stake" in again.output


def test_what_a_node_cannot_claim_is_said(site: LedgerSite) -> None:
    site.work(NODE, 2)
    folder = site.node(NODE)
    where = ("--state-dir", str(folder))
    assert "no RPC of chain 31337" in site.hypergpu("claim", *where).output
    assert "no one job 'job-9'" in site.hypergpu("claim", "job-9", *where).output
    nobody = site.hypergpu("claim", "--state-dir", str(folder / "nowhere"))
    assert "no one job" in nobody.output
    newest = folder / "ledger" / site.terms.job / "newest.json"
    newest.write_bytes(newest.read_bytes().replace(b'"round":1', b'"round":2'))
    assert "the receipt in" in site.hypergpu("claim", *where).output


def test_an_escrow_that_was_short_is_made_good_by_a_later_claim(
    anvil: Anvil, tmp_path: Path
) -> None:
    site = LedgerSite(anvil, tmp_path)
    site.ask("evm_setAutomine", True)
    site.deploy(escrow=2 * EACH)
    site.work(NODE, 3)
    folder = site.node(NODE)
    first = site.as_node(folder, "claim")["acts"][0]
    assert first["amounts"]["recorded"] == str(2 * EACH)
    assert any(f"short of {EACH:,}"[:8] in text for text in first["done"])
    site.mint(COORDINATOR, EACH)
    site.send(
        COORDINATOR,
        site.token_call("approve", site.ledger, EACH),
        site.call("fund", job_of(site.terms), EACH),
    )
    assert site.as_node(folder, "claim")["acts"][0]["amounts"]["recorded"] == str(EACH)


def test_arbiters_void_a_paid_share_down_to_the_slashed_stake(
    site: LedgerSite, tmp_path: Path
) -> None:
    site.work(NODE, 3)
    site.mint(NODE, 5 * EACH)
    site.as_node(site.node(NODE), "register", "--stake", str(5 * EACH))
    site.batch(0, 0, {NODE: 3})
    site.act(COORDINATOR, "distributePayments", job_of(site.terms), 0, [NODE.address])
    assert site.balance(NODE.address) == 3 * EACH
    free = site.view("getJob", job_of(site.terms))["free"]

    passphrase, evidence = tmp_path / "passphrase", tmp_path / "evidence.md"
    keys = [
        site.keystore(tmp_path / f"arbiter{at}", key, passphrase) for at, key in enumerate(ARBITERS)
    ]
    evidence.write_text("its updates were copies")
    common = [
        *("void", "--node", NODE.node_id, "--epoch", "0", "--penalty", str(EACH)),
        *("--evidence", str(evidence), "--file", str(site.export())),
        *("--key-passphrase-file", str(passphrase), "--chain-url", site.url),
    ]
    signing_result = site.hypergpu(*common, "--key", str(keys[1]), "--sign-only")
    signature: str = msgspec.json.decode(signing_result.stdout)["signature"]

    alone = site.hypergpu(*common, "--key", str(keys[0]), "--signature", "ab" * 65, "--yes")
    assert "who is no arbiter" in alone.output
    assert site.hypergpu(*common, "--key", str(keys[0])).exit_code != 0, "nobody agreed"

    site.fund(ARBITERS[0])
    result = site.hypergpu(
        *common, "--key", str(keys[0]), "--signature", signature, "--yes", "--json"
    )
    assert result.exit_code == 0, result.output
    amounts = msgspec.json.decode(result.stdout)["amounts"]
    assert amounts == {"void": str(3 * EACH), "slashed": str(4 * EACH)}
    assert site.view("stakeOf", NODE.address)[0] == EACH
    assert site.view("getJob", job_of(site.terms))["free"] == free + 3 * EACH

    again = site.hypergpu(*common, "--key", str(keys[0]), "--signature", signature, "--yes")
    assert "to void: VOID" in again.output


def test_a_file_of_receipts_is_verified_against_the_ledger(site: LedgerSite) -> None:
    site.work(NODE, 6)
    site.work(OTHER, 3)
    site.batch(0, 0, {NODE: 3, OTHER: 3})
    site.act(COORDINATOR, "distributePayments", job_of(site.terms), 0, [NODE.address])
    site.pass_time(WINDOW_S)
    site.act(
        COORDINATOR, "distributePayments", job_of(site.terms), 0, [NODE.address, OTHER.address]
    )
    folder, file = site.node(NODE), site.export()
    verification = verify_file(site, file)
    assert (verification["is_sound"], verification["faults"]) == (True, [])
    assert verification["open"] == [f"{NODE.node_id}: {3 * EACH} of its work is not recorded"]
    by_node = {each["node"]: each for each in verification["nodes"]}
    assert by_node[OTHER.node_id]["paid"] == by_node[OTHER.node_id]["worth"] == 3 * EACH
    assert by_node[NODE.node_id]["worth"] == 6 * EACH

    site.as_node(folder, "claim")
    forced_verification = verify_file(site, file)
    assert forced_verification["faults"] == []
    assert any("is due (open)" in text for text in forced_verification["open"])

    site.batch(1, 1, {NODE: 6, OTHER: 9})
    bad = site.hypergpu("verify", "--file", str(file), "--chain-url", site.url)
    assert bad.exit_code != 0
    assert f"{OTHER.node_id}: 9 receipts of score {9 * SCORE} are recorded" in bad.output


def verify_file(site: LedgerSite, file: Path) -> dict[str, Any]:
    result = site.hypergpu("verify", "--file", str(file), "--chain-url", site.url, "--json")
    assert result.exit_code == 0, result.output
    verification: dict[str, Any] = msgspec.json.decode(result.stdout)
    return verification


def test_a_file_is_verified_without_a_chain(site: LedgerSite) -> None:
    site.work(NODE, 4)
    result = site.hypergpu("verify", "--file", str(site.export()), "--offline")
    assert result.exit_code == 0
    assert f"{JOB}: 4 receipts, sound; no chain was asked" in result.output


def test_a_coordinator_deploys_a_ledger_that_commands_accept(
    site: LedgerSite, tmp_path: Path
) -> None:
    folder = tmp_path / "coordinator"
    (folder / "identity").mkdir(parents=True)
    key = node_key(5)
    site.keystore(folder / "identity" / "coordinator.key", key, tmp_path / "coordinator.passphrase")
    order = [
        *("deploy", "--token", site.token, "--data-dir", str(folder), "--yes", "--json"),
        *("--chain", "anvil", "--chain-url", site.url),
    ]
    assert "no gas money" in site.hypergpu(*order).output
    site.fund(key)
    wrong = site.hypergpu(*order, "--window", "5", "--quorum", "3")
    assert "--window is from 30" in wrong.output
    assert "--quorum is from 1 to 1" in wrong.output
    result = site.hypergpu(*order, "--arbiter", ARBITERS[0].address)
    assert result.exit_code == 0, result.output
    deployment = msgspec.json.decode(result.stdout)
    site.ledger = deployment["ledger"]
    assert site.view("isArbiter", ARBITERS[0].address)
    assert site.view("TREASURY").lower() == key.address
    assert site.view("UNBONDING") == 86_400
