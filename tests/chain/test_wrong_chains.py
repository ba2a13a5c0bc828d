"""A chain or a ledger that is not what was named is told at once, with what is there instead."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator.shell.metering.chains import chain_of
from coordinator.shell.metering.settling import Settling
from eth_abi.abi import encode
from gpu_node.shell.state.wallet import Wallet
from typer.testing import CliRunner

from coordinator.config import Settings
from coordinator.shell.journal.memory import MemoryJournal
from gpu_node.shell.state.places import Places
from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.cli.main import app
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.keyfile import stored_address
from hypergpu.ledger.terms import Terms, terms_of
from hypergpu.ledger.typed import Domain
from hypergpu.signature import IdentityKey
from tests.chain.ground import JOB, PROFILE, WITHIN_S, Ground
from tests.integration.cli.conftest import PROGRAM, Ended, home
from tests.signed_receipts import COORDINATOR, node_key

NOBODY = "http://127.0.0.1:9"
ABSENT, LATER = "0x" + "12" * 20, "0x" + "34" * 20
ACTS = ["register", "claim", "dispute"]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anvil]:
    """A chain that no profile is for."""
    log = tmp_path_factory.mktemp("elsewhere") / "anvil.log"
    with running_anvil(AnvilOptions(chain_id=999), log=log) as anvil:
        yield anvil


def refusal_of(
    folder: Path, chain: str, chain_url: str = "", ledger_contract: str = ""
) -> HyperGPUError:
    """Why a coordinator with these settings does not start."""
    settings = Settings(
        data_dir=folder, chain=chain, chain_url=chain_url, ledger_contract=ledger_contract
    )
    with pytest.raises(HyperGPUError) as refused:
        Settling(settings, IdentityKey.generate(), MemoryJournal()).start(least_s=WITHIN_S)
    return refused.value


def up(folder: Path, **variables: str) -> Ended:
    """`hypergpu up`, which is expected to end by itself."""
    return subprocess.run(
        [*PROGRAM, "up", "--plaintext", "--port", "0", "--node-port", "0"],
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
        env=home(folder) | variables,
        cwd=folder,
    )


def test_up_names_no_ledger_of_a_chain_that_it_does_not_know(
    tmp_path: Path, elsewhere: Anvil
) -> None:
    told = up(tmp_path, HYPERGPU_CHAIN=elsewhere.url)
    # Its key is new and has no gas money: without a ledger that would be of no use.
    assert told.returncode == Reason.LEDGER_WRONG.exit_code, told.stderr
    assert "no ledger is named for chain 999. Fix: name one of this version: " in told.stderr
    assert told.stdout == ""
    # Whoever makes a ledger with that key finds it there again.
    key = tmp_path / "data/hypergpu/coordinator/identity/coordinator.key"
    address = stored_address(key)
    again = up(tmp_path, HYPERGPU_CHAIN=elsewhere.url)
    assert again.stderr == told.stderr
    assert stored_address(key) == address


def test_up_says_that_the_ledger_is_not_there(tmp_path: Path, ground: Ground) -> None:
    variables = {
        "HYPERGPU_CHAIN": ground.url,
        "HYPERGPU_COORDINATOR_LEDGER_CONTRACT": ABSENT,
    }
    told = up(tmp_path, **variables)
    assert told.returncode == Reason.LEDGER_WRONG.exit_code, told.stderr
    assert told.stderr == (
        f"error 8003: there is no contract at {ABSENT} on chain 31337. Fix: name one of this"
        " version: HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS; or deploy one: hypergpu ledger"
        " deploy\n"
    )


def test_a_name_with_another_chains_address_is_refused(tmp_path: Path, elsewhere: Anvil) -> None:
    refused = refusal_of(tmp_path, "anvil", elsewhere.url)
    assert refused.reason is Reason.CHAIN_WRONG
    assert refused.detail == f"the RPC at {elsewhere.url} is of chain 999, not of 31337"


def a_contract_that_says(answer: bytes) -> str:
    """Code that gives the same answer to every call, as hex."""
    size = b"\x61" + len(answer).to_bytes(2, "big")
    copied = size + b"\x60\x0c\x5f\x39"
    return "0x" + (copied + size + b"\x5f\xf3" + answer).hex()


def test_a_ledger_of_another_version_is_refused(tmp_path: Path, ground: Ground) -> None:
    types = ["bytes1", "string", "string", "uint256", "address", "bytes32", "uint256[]"]
    none: list[int] = []
    values = (b"\x0f", "HyperGPU", "2", PROFILE.chain_id, LATER, bytes(32), none)
    ground.ask("anvil_setCode", LATER, a_contract_that_says(encode(types, values)))
    refused = refusal_of(tmp_path / "new", ground.url, ledger_contract=LATER)
    assert refused.reason is Reason.LEDGER_WRONG
    assert refused.detail == (
        f"the contract at {LATER} on chain 31337 is HyperGPU 2, this is for HyperGPU 1"
    )
    terms = terms_of(Address(COORDINATOR.node_id), JOB, Domain(31337, Address(LATER)))
    assert "HyperGPU 2, this is for HyperGPU 1" in told_by(tmp_path, terms, "claim", ground.url)


@pytest.mark.parametrize(
    ("named", "reason", "words"),
    [
        (["mars"], Reason.ARGUMENT_INVALID, "there is no chain 'mars'; known by name are anvil,"),
        (["tester"], Reason.ARGUMENT_INVALID, "the chain tester has no RPC of its own"),
        (
            ["anvil", "localhost:8545"],
            Reason.ARGUMENT_INVALID,
            "an RPC's address begins with http:// or https://",
        ),
        ([NOBODY], Reason.CHAIN_UNREACHABLE, f"the chain's RPC at {NOBODY} did not answer"),
    ],
)
def test_what_is_no_chain_is_refused(
    tmp_path: Path, named: list[str], reason: Reason, words: str
) -> None:
    refused = refusal_of(tmp_path, *named)
    assert refused.reason is reason
    assert refused.detail.startswith(words)


def test_an_address_stands_for_its_chain_also_while_that_is_away(
    tmp_path: Path, ground: Ground
) -> None:
    settings = Settings(data_dir=tmp_path, chain=ground.url)
    has_signed = set[int]().__contains__
    found = chain_of(settings, tmp_path / "chain", has_signed)
    assert (found.profile.chain_id, found.url) == (PROFILE.chain_id, ground.url)
    ground.anvil.stop()
    assert chain_of(settings, tmp_path / "chain", has_signed) == found


def test_a_chain_that_was_named_is_known_by_its_address_while_it_is_away(
    tmp_path: Path, ground: Ground
) -> None:
    ground.mine()
    named = Settings(data_dir=tmp_path, chain="anvil", chain_url=ground.url)
    settling = Settling(named, IdentityKey.generate(), MemoryJournal())
    settling.start(least_s=WITHIN_S)
    settling.stop()
    ground.anvil.stop()
    by_address = Settings(data_dir=tmp_path, chain=ground.url)
    again = Settling(by_address, IdentityKey.generate(), MemoryJournal())
    assert (again.account.chain_id, again.warning) == (PROFILE.chain_id, "")
    again.stop()


def told_by(folder: Path, terms: Terms, act: str, url: str) -> str:
    """What `hypergpu ledger` says to a node that agreed to such terms."""
    state = folder / "node"
    with Places(state) as places:
        key = places.identity
        key.write_text(node_key(7).secret.hex())
        key.chmod(0o600)
        Wallet(places, node_key(7).node_id).agree(JOB, terms)
    words = ["ledger", act, JOB, "--state-dir", str(state), "--chain-url", url]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code != 0, ended.output
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.mark.parametrize("act", ACTS)
def test_a_node_is_told_that_a_chain_is_another_one(
    tmp_path: Path, elsewhere: Anvil, act: str
) -> None:
    domain = Domain(31337, Address(ABSENT))
    terms = terms_of(Address(COORDINATOR.node_id), JOB, domain)
    assert told_by(tmp_path, terms, act, elsewhere.url) == (
        f"error 8002: the RPC at {elsewhere.url} is of chain 999, not of 31337."
        " Fix: name an RPC of the chain that is meant\n"
    )


@pytest.mark.parametrize("act", ACTS)
def test_a_node_is_told_that_its_ledger_is_not_there(
    tmp_path: Path, elsewhere: Anvil, act: str
) -> None:
    terms = terms_of(Address(COORDINATOR.node_id), JOB, Domain(999, Address(ABSENT)))
    assert told_by(tmp_path, terms, act, elsewhere.url) == (
        f"error 8003: there is no contract at {ABSENT} on chain 999."
        " Fix: name a ledger of this version, or let one be deployed\n"
    )


def test_a_node_is_told_that_an_address_is_none(tmp_path: Path) -> None:
    terms = terms_of(Address(COORDINATOR.node_id), JOB, Domain(31337, Address(ABSENT)))
    assert told_by(tmp_path, terms, "claim", "localhost:8545").startswith(
        "error 6002: an RPC's address begins with http:// or https://"
    )
