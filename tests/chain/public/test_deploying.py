"""A ledger is made once, and what is lacking for it is said before anything is sent."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from coordinator.config import Settings
from hypergpu.chain.keylock import KeyLock, usual_locks
from hypergpu.chain.profiles.cautious import cautious_profile
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.client import Call
from hypergpu.cli.main import app
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger.typed import Domain
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, misbehaving
from tests.chain.public.faucet import CHAIN_ID, Faucet, environment, public_chain

NOBODY = "http://127.0.0.1:9"
BOND = "5000000"
WITHIN_S = 240.0
SOMEBODY = "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed"
"""With the checksum of EIP-55."""
PROFILE = """
chain_id = 4243
block_ms = 1000
depth = 2
window_s = 60
in_flight_max = 16
batch_max = 10
transaction_gas_max = 16777216
tip_wei = 1
max_fee_cap_wei = 100000000000
resend_ms = 1000
bump_blocks = 5
"""


class Sends:
    """A script that changes nothing: it counts what was sent and has reached the chain."""

    def __init__(self) -> None:
        self.count = 0
        self.arrived = threading.Semaphore(0)

    def __call__(self, calls: list[dict[str, Any]], _truth: bytes) -> None:
        if any(call["method"] == "eth_sendRawTransaction" for call in calls):
            self.count += 1
            self.arrived.release()


class Shop(NamedTuple):
    """A chain that makes a block when it is asked to, and an operator who has an empty key."""

    folder: Path
    faucet: Faucet
    rpc: MisbehavingRpc
    sent: Sends

    def ran(self, *words: str, url: str = "") -> Any:
        """`hypergpu ledger ...`, in this process."""
        return CliRunner().invoke(app, ["ledger", *words, "--chain-url", url or self.rpc.url])

    def key(self) -> str:
        """Of the coordinator."""
        return str(json.loads(self.ran("key", "--json").stdout)["coordinator"])

    def deploy(self, *words: str, url: str = "") -> Any:
        """`hypergpu ledger deploy` that is expected to send nothing."""
        return self.ran("deploy", *self.options, *words, url=url)

    @property
    def options(self) -> list[str]:
        """What cannot be left out."""
        return ["--token", self.faucet.token, "--minimum-bond", BOND]

    def started(self, *words: str) -> "subprocess.Popen[str]":
        """The same as a process; comes back once it has sent its transaction."""
        given = ["ledger", "deploy", *self.options, "--yes", "--json", *words]
        child = subprocess.Popen(
            [self.folder / "bin/hypergpu", *given, "--chain-url", self.rpc.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self.folder),
        )
        if not self.sent.arrived.acquire(timeout=WITHIN_S):
            child.kill()
        return child

    def deployed(self, *words: str) -> dict[str, Any]:
        """What a run says that sends, a block made for it."""
        child = self.started(*words)
        self.faucet.mine()
        try:
            out, errors = child.communicate(timeout=WITHIN_S)
        finally:
            child.kill()
        assert child.returncode == 0, errors
        told: dict[str, Any] = json.loads(out)
        return told

    def nonce(self) -> int:
        """How many transactions of the coordinator are in blocks."""
        return self.faucet.chain.next_nonce(bytes.fromhex(self.key()[2:]))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    with public_chain(tmp_path, block_time_s=0) as (anvil, faucet), misbehaving(anvil.url) as rpc:
        rpc.script = sent = Sends()
        yield Shop(tmp_path, faucet, rpc, sent)


@pytest.fixture
def funded(shop: Shop) -> Shop:
    shop.faucet.give(shop.key(), 10**18)
    return shop


def test_a_ledger_is_made_as_it_was_ordered(funded: Shop) -> None:
    told = funded.deployed(
        *("--window", "90", "--unbonding", "7200", "--quorum", "2", "--treasury", SOMEBODY),
        *("--arbiter", SOMEBODY, "--arbiter", "0x" + "12" * 20, "--arbiter", "0x" + "34" * 20),
    )
    chain, calls = funded.faucet.chain, funded.faucet.calls
    assert recognised(chain, Domain(CHAIN_ID, Address(told["address"])))
    for name, wanted in {
        "TOKEN": funded.faucet.token,
        "CHALLENGE_WINDOW": 90,
        "UNBONDING": 7200,
        "MINIMUM_BOND": int(BOND),
        "QUORUM": 2,
        "TREASURY": SOMEBODY.lower(),
        "GUARDIAN": funded.key(),
    }.items():
        answer = chain.read(bytes.fromhex(told["address"][2:]), calls.abi.call(name))
        assert calls.abi.answer(name, answer) == (wanted,)
    (place,) = chain.inclusions([bytes.fromhex(told["hash"][2:])])
    assert place is not None
    assert (place.gas_used, place.block_number) == (told["gas"], told["block"])
    assert told["final_after"] == cautious_profile(1).depth


def test_a_second_ledger_is_made_only_when_it_is_asked_for(funded: Shop) -> None:
    first = funded.deployed()
    sent = funded.sent.count
    refused = funded.deploy("--yes")
    assert refused.exit_code == Reason.FILE_PRESENT.exit_code
    assert f"has made the ledger {first['address']} on chain 4242 already" in refused.stderr
    assert f"HYPERGPU_COORDINATOR_LEDGER_CONTRACT={first['address']}" in refused.stderr
    assert funded.sent.count == sent
    second = funded.deployed("--again")
    assert second["address"] != first["address"]
    assert funded.nonce() == 2


@pytest.mark.parametrize("is_mined", [True, False])
def test_a_run_that_was_killed_after_it_sent_makes_no_second_ledger(
    funded: Shop, *, is_mined: bool
) -> None:
    foreseen = json.loads(funded.deploy("--dry-run", "--json").stdout)
    child = funded.started()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    if is_mined:
        funded.faucet.mine()
        assert foreseen["address"] in funded.deploy("--yes").stderr
    else:
        assert "with other options is on its way" in funded.deploy("--window", "77").stderr
        assert funded.deployed()["address"] == foreseen["address"]
    assert funded.nonce() == 1


def test_what_is_stuck_is_offered_more_under_the_same_nonce(funded: Shop) -> None:
    child = funded.started()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    funded.faucet.chain.rpc.call(Call("anvil_setNextBlockBaseFeePerGas", (hex(50 * 10**9),)))
    funded.faucet.mine()
    assert funded.nonce() == 0
    told = funded.deployed()
    assert recognised(funded.faucet.chain, Domain(CHAIN_ID, Address(told["address"])))
    assert funded.nonce() == 1


def test_an_order_with_other_options_can_take_the_place_of_one_that_waits(funded: Shop) -> None:
    child = funded.started()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    told = funded.deployed("--again", "--window", "77")
    assert told["window_s"] == 77
    assert funded.nonce() == 1


def test_without_gas_money_it_is_said_how_much_is_lacking(shop: Shop) -> None:
    told = shop.deploy("--yes")
    assert told.exit_code == Reason.CHAIN_WRONG.exit_code
    assert f"{shop.key()} has 0.000000000 of the currency of chain 4242" in told.stderr
    assert "Fix: send it at least 0.0" in told.stderr
    assert shop.sent.count == 0


def test_everything_that_is_lacking_is_said_at_once(shop: Shop) -> None:
    told = shop.ran(
        *("deploy", "--token", "0x" + "11" * 20, "--minimum-bond", "1", "--window", "3"),
        *("--unbonding", "2", "--quorum", "3", "--arbiter", SOMEBODY, "--arbiter", SOMEBODY),
        *("--treasury", "0x" + "00" * 20, "--yes"),
    )
    assert told.exit_code == Reason.ARGUMENT_INVALID.exit_code
    for words in (
        "--window 3 is not in the range from 30 to",
        "--unbonding 2 is not in the range from 3 to 4294967295 seconds, the window at least",
        "--quorum 3 is not in the range from 1 to 2 of the arbiters",
        "Fix: --window from 30 to 4294967295; --unbonding from 3 to 4294967295; --quorum from 1",
        "an --arbiter is named twice",
        "the --treasury is nobody",
        f"the token 0x{'11' * 20} is no contract on chain 4242",
        "has 0.000000000 of the currency",
    ):
        assert words in told.stderr
    assert shop.sent.count == 0


def test_what_a_ledger_would_take_is_told_while_the_coordinator_runs(funded: Shop) -> None:
    held = KeyLock(usual_locks(), CHAIN_ID, Address(funded.key()))
    told = funded.deploy("--dry-run")
    assert "nothing is lacking; it would lie at 0x" in told.stdout
    assert funded.deploy("--yes").exit_code == Reason.FOLDER_UNUSABLE.exit_code
    held.release()
    elsewhere = funded.deploy("--dry-run", "--data-dir", str(funded.folder / "typo"))
    assert "there is no coordinator's key in " in elsewhere.stderr
    assert not (funded.folder / "typo").exists()


def test_a_contract_that_is_no_token_is_refused(funded: Shop) -> None:
    ledger = funded.deployed()["address"]
    told = funded.ran("deploy", "--token", ledger, "--minimum-bond", "1", "--again", "--yes")
    assert f"the contract {ledger} on chain 4242 is no ERC-20 token" in told.stderr


def test_an_rpc_that_estimates_nothing_gets_the_limit_of_the_formula(funded: Shop) -> None:
    told = b'{"jsonrpc":"2.0","id":%d,"error":{"code":-32601,"message":"no such method"}}'

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        funded.sent(calls, truth)
        is_asked = calls[0]["method"] == "eth_estimateGas"
        return Answer(told % calls[0]["id"]) if is_asked else None

    funded.rpc.script = script
    foreseen = json.loads(funded.deploy("--dry-run", "--json").stdout)
    assert foreseen["gas"] == cautious_profile(1).transaction_gas_max
    assert funded.deployed()["address"] == foreseen["address"]


def test_a_window_that_is_over_before_anything_is_final_is_said(funded: Shop) -> None:
    told = funded.deploy("--window", "60", "--dry-run")
    assert "the window of 60 s is over before what is paid in it is final" in told.stderr
    assert "which takes 768 s" in told.stderr


def test_a_mistyped_address_is_refused(shop: Shop) -> None:
    told = shop.deploy("--treasury", SOMEBODY[:-1] + "D")
    assert told.exit_code == Reason.ARGUMENT_INVALID.exit_code
    assert "its capital letters do not fit it (EIP-55)" in told.stderr
    told = shop.deploy("--treasury", "0x12")
    assert "'0x12' is no address. Fix: name it like this: --treasury 0x" in told.stderr


def test_a_coordinator_takes_an_address_with_its_checksum() -> None:
    assert Settings(ledger_contract=SOMEBODY).ledger_contract == SOMEBODY.lower()
    with pytest.raises(HyperGPUError, match="its capital letters do not fit it"):
        Settings(ledger_contract=SOMEBODY[:-1] + "D")
    with pytest.raises(HyperGPUError, match="'0x12' is no address") as refused:
        Settings(ledger_contract="0x12")
    assert "HYPERGPU_COORDINATOR_LEDGER_CONTRACT=0x and 40 hex digits" in refused.value.fix


def test_nothing_is_made_before_somebody_has_said_yes(funded: Shop) -> None:
    told = funded.deploy()
    assert "Make this ledger on chain 4242? Nobody is there to answer" in told.stderr
    assert "mind: the treasury is this coordinator: what its bond loses" in told.stderr
    assert funded.sent.count == 0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(b"not found", status=404), "answered HTTP 404"),
        (Answer(b"<html>hello</html>"), "answered no JSON-RPC"),
        (Answer(b'{"jsonrpc":"2.0","id":1,"result":"hello"}'), "where a number belongs"),
    ],
)
def test_an_address_of_no_rpc_is_said(shop: Shop, answer: Answer, words: str) -> None:
    shop.rpc.script = lambda _calls, _truth: answer
    told = shop.deploy("--yes")
    assert told.exit_code == Reason.CHAIN_UNREACHABLE.exit_code
    assert words in told.stderr
    assert told.stderr.count("\n") == 1


def test_an_address_where_nobody_listens_is_said(shop: Shop) -> None:
    told = shop.deploy("--yes", url=NOBODY)
    assert told.exit_code == Reason.CHAIN_UNREACHABLE.exit_code
    assert f"the chain's RPC at {NOBODY} did not answer" in told.stderr


def test_a_chain_that_is_not_the_profiles_is_refused(funded: Shop) -> None:
    path = funded.folder / "mine.toml"
    path.write_text(PROFILE, "utf-8")
    told = funded.deploy("--chain", str(path), "--yes")
    assert told.exit_code == Reason.CHAIN_WRONG.exit_code
    assert f"the RPC at {funded.rpc.url} is of chain 4242, not of 4243" in told.stderr
    path.write_text(PROFILE.replace("4243", "4242"), "utf-8")
    made = funded.deployed("--chain", str(path))
    assert (made["window_s"], made["final_after"]) == (60, 2)


def test_a_key_that_a_coordinator_uses_is_left_to_it(funded: Shop) -> None:
    lock = KeyLock(usual_locks(), CHAIN_ID, Address(funded.key()))
    told = funded.deploy("--yes")
    lock.release()
    assert told.exit_code == Reason.FOLDER_UNUSABLE.exit_code
    assert "Fix: end the coordinator first" in told.stderr
    assert funded.sent.count == 0


def test_the_key_is_shown_without_a_chain(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(app, ["ledger", "key"])
    assert told.stdout.strip() == shop.key()
    assert "keep a copy of it and of its passphrase" in told.stderr
    monkeypatch.setenv("HYPERGPU_CHAIN", "anvil")
    assert CliRunner().invoke(app, ["ledger", "key"]).stdout == told.stdout
    refused = CliRunner().invoke(app, ["ledger", "deploy", *shop.options])
    assert "the chain anvil is started by the coordinator" in refused.stderr


def test_a_secret_in_an_address_is_shown_nowhere(shop: Shop) -> None:
    for url in (f"{shop.rpc.url}/v3/SECRET", f"{NOBODY}/v3/SECRET", "wss://rpc.example/v3/SECRET"):
        told = shop.deploy("--yes", url=url)
        assert told.exit_code != 0
        assert "SECRET" not in told.output


def test_the_missing_extra_is_named(shop: Shop) -> None:
    code = "import sys; sys.modules['eth_abi'] = None; from hypergpu.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "ledger", "deploy", *shop.options],
        capture_output=True,
        check=False,
        text=True,
        env=environment(shop.folder),
    )
    assert ended.returncode == Reason.MACHINE_UNFIT.exit_code
    assert ended.stderr.startswith("error 6005: this needs the package eth_abi. Fix: install")
