from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.job import Phase
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.metering.unsettled import unsettled
from hypergpu.ids import Address
from hypergpu.ledger.terms import terms_of
from hypergpu.ledger.typed import Domain
from tests.scenarios.test_metering import FREE, PAID, training

OF_NO_CHAIN = Settings()
OF_A_LEDGER = Domain(4242, Address("0x" + "ab" * 20))


def test_a_start_without_a_chain_names_the_jobs_that_wait_for_theirs() -> None:
    journal = MemoryJournal()
    plain = training(PAID)
    assert unsettled([plain, training(FREE)], journal, OF_NO_CHAIN) == ""
    terms = terms_of(Address("0x" + "cd" * 20), plain.job_id, OF_A_LEDGER)
    job = replace(plain, terms=terms)
    assert unsettled([plain, job], journal, OF_NO_CHAIN) == (
        "no chain is named, and nothing is recorded or paid of what is signed for a ledger:"
        f" {job.job_id} (chain 4242); start with its chain: HYPERGPU_CHAIN=CHAIN"
    )
    ended = replace(job, phase=Phase.FINISHED)
    assert unsettled([ended], journal, OF_NO_CHAIN) == ""
    journal.append([], (), Earnings(ends=(EpochEnd(job.job_id, 0, is_last=True),)))
    assert f"{job.job_id} (chain 4242)" in unsettled([ended], journal, OF_NO_CHAIN)


def test_settings_of_a_chain_that_is_not_named_are_told() -> None:
    given = Settings(chain_url="http://127.0.0.1:8545", ledger_contract="0x" + "12" * 20)
    assert unsettled([], MemoryJournal(), given) == (
        "nothing is settled by HYPERGPU_COORDINATOR_CHAIN_URL and"
        " HYPERGPU_COORDINATOR_LEDGER_CONTRACT alone, and what nodes earn is signed for no chain:"
        " name it too, HYPERGPU_CHAIN=CHAIN"
    )
