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
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.signer import Signer
from hypergpu.ids import Address
from hypergpu.ledger.typed import Domain
from hypergpu.refusal import Reason, RefusalError
from hypergpu.spec import Pay
from tests.signed_receipts import COORDINATOR

PROFILE = chain_profile("anvil")
PAID, FREE = Pay(unit_price=1_000), Pay()
NAMED = Address("0x" + "12" * 20)


@contextmanager
def settling_on(
    folder: Path, url: str, journal: MemoryJournal, *, contract: str = ""
) -> Iterator[Settling]:
    settings = Settings(data_dir=folder, chain="anvil", chain_url=url, ledger_contract=contract)
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


def test_a_job_that_pays_waits_for_the_first_sight_of_its_ledger(
    tmp_path: Path, nobody: str
) -> None:
    with settling_on(tmp_path, nobody, MemoryJournal()) as settling:
        settling.start()
        with pytest.raises(RefusalError, match="none is known yet on chain 31337: ") as refused:
            settling.domain_for(PAID)
        assert settling.domain_for(FREE) == Domain()
    assert refused.value.reason is Reason.CHAIN_UNREACHABLE
    assert nobody.removeprefix("http://") in refused.value.detail
    assert "submit again" in refused.value.fix


def test_a_ledger_that_was_deployed_once_is_known_while_its_chain_is_away(
    tmp_path: Path, nobody: str
) -> None:
    journal = MemoryJournal()
    account = Account(Signer(COORDINATOR), journal, PROFILE)
    head = Block(1, bytes(32), bytes(32), time_s=1, base_fee_wei=1, gas_max=30_000_000)
    contract = deploy(account, journal, PROFILE, head)
    with settling_on(tmp_path, nobody, journal) as settling:
        settling.start()
        assert settling.domain_for(PAID) == Domain(31337, Address(f"0x{contract.hex()}"))


def test_a_ledger_that_is_named_is_known_while_its_chain_is_away(
    tmp_path: Path, nobody: str
) -> None:
    with settling_on(tmp_path, nobody, MemoryJournal(), contract=NAMED) as settling:
        settling.start()
        assert settling.domain_for(PAID) == Domain(31337, NAMED)
