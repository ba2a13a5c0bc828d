"""What a new job's receipts are signed for while its chain is away."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.config import Settings
from coordinator.shell.chain.founding import deploy
from coordinator.shell.chain.sending import Account
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.metering.settling import Settling
from hypergpu.chain.profiles import ChainProfile, chain_profile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.signer import Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger.typed import Domain
from tests.signed_receipts import COORDINATOR

PROFILE = chain_profile("anvil")
PAID, FREE = Pay(unit_price=1_000), Pay()
NAMED = Address("0x" + "12" * 20)


@contextmanager
def settling_on(
    folder: Path, url: str, journal: MemoryJournal, *, contract: str = "", by_address: bool = False
) -> Iterator[Settling]:
    chain, chain_url = (url, "") if by_address else ("anvil", url)
    settings = Settings(data_dir=folder, chain=chain, chain_url=chain_url, ledger_contract=contract)
    made = Settling(settings, COORDINATOR, journal)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a chain that is away: the port is taken, and nobody listens."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def deployed(journal: MemoryJournal, profile: ChainProfile) -> bytes:
    """Have the journal know of a ledger that its coordinator made."""
    account = Account(Signer(COORDINATOR), journal, profile)
    head = Block(1, bytes(32), bytes(32), time_s=1, base_fee_wei=1, gas_max=30_000_000)
    return deploy(account, journal, profile, head)


def test_a_job_that_pays_waits_for_the_first_sight_of_its_ledger(
    tmp_path: Path, nobody: str
) -> None:
    with settling_on(tmp_path, nobody, MemoryJournal()) as settling:
        settling.start()
        with pytest.raises(HyperGPUError, match="none is known yet on chain 31337: ") as refused:
            settling.domain_for(PAID)
        assert settling.domain_for(FREE) == Domain()
    assert refused.value.reason is Reason.CHAIN_UNREACHABLE
    assert nobody.removeprefix("http://") in refused.value.detail
    assert "submit again" in refused.value.fix


def test_a_ledger_that_was_deployed_once_is_known_while_its_chain_is_away(
    tmp_path: Path, nobody: str
) -> None:
    journal = MemoryJournal()
    contract = deployed(journal, PROFILE)
    with settling_on(tmp_path, nobody, journal) as settling:
        settling.start()
        assert settling.domain_for(PAID) == Domain(31337, Address(f"0x{contract.hex()}"))


def test_a_ledger_that_is_named_is_known_while_its_chain_is_away(
    tmp_path: Path, nobody: str
) -> None:
    with settling_on(tmp_path, nobody, MemoryJournal(), contract=NAMED) as settling:
        settling.start()
        assert settling.domain_for(PAID) == Domain(31337, NAMED)


def test_an_address_that_is_away_stands_for_the_chain_that_was_settled_on_before(
    tmp_path: Path, nobody: str
) -> None:
    journal = MemoryJournal()
    deployed(journal, PROFILE)
    with settling_on(tmp_path, nobody, journal, by_address=True) as settling:
        settling.start()
        assert settling.account.chain_id == 31337
        assert settling.warning == (
            f"the RPC at {nobody} does not answer and was never asked of which chain it is; it is"
            " taken for one of chain 31337, on which this coordinator has settled before"
        )
        # It may be of another: what is created now could be signed for the wrong one.
        with pytest.raises(HyperGPUError, match="nobody has said yet that the chain is 31337: "):
            settling.domain_for(PAID)
        assert settling.domain_for(FREE) == Domain()


def test_an_address_that_is_away_and_was_never_settled_on_is_refused(
    tmp_path: Path, nobody: str
) -> None:
    with (
        pytest.raises(HyperGPUError, match="has settled on no chain yet") as refused,
        settling_on(tmp_path, nobody, MemoryJournal(), by_address=True),
    ):
        pass
    assert refused.value.reason is Reason.CHAIN_UNREACHABLE
    assert nobody in refused.value.detail


def test_an_address_that_is_away_and_may_be_of_several_chains_is_refused(
    tmp_path: Path, nobody: str
) -> None:
    journal = MemoryJournal()
    for name in ("anvil", "base-sepolia"):
        deployed(journal, chain_profile(name))
    with (
        pytest.raises(HyperGPUError, match="settled on the chains 31337, 84532") as refused,
        settling_on(tmp_path, nobody, journal, by_address=True),
    ):
        pass
    assert "HYPERGPU_CHAIN=NAME HYPERGPU_COORDINATOR_CHAIN_URL=URL" in refused.value.fix
