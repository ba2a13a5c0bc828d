"""The contract and its model, told the same things: they must do and refuse the same."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, event, given, settings
from msgspec.structs import replace

from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.chain.reading.history import JobReader
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.audit.verify import verify
from hypergpu.ledger.settlement.state import RevertedError
from tests.chain.model.contract_town import ContractTown, RevertedOnChainError
from tests.properties.ledger.lives import histories, reached
from tests.properties.ledger.test_audit import HONEST
from tests.properties.ledger.town import JOB, PEOPLE, TERMS, WINDOW_S, Action, Town, done

START_S = 2_000_000_000


class Both(NamedTuple):
    """The contract as it is at the start of every history, and how to get back there."""

    contract: ContractTown
    started_at_s: int
    snapshots: list[object]

    def fresh(self) -> tuple[ContractTown, Town]:
        """Both towns as they were founded."""
        contract = self.contract
        contract.rpc.call(Call("evm_revert", (self.snapshots.pop(),)))
        self.snapshots.append(contract.rpc.call(Call("evm_snapshot")))
        contract.now_s = self.started_at_s
        town = Town(contract.now_s, contract.domain)
        return contract, town


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    log = tmp_path_factory.mktemp("anvil") / "log"
    with running_anvil(AnvilOptions(block_time_s=0), log=log) as anvil:
        rpc = HttpRpc(HttpTransport(anvil.url, timeout_s=20.0))
        contract = ContractTown(rpc, START_S)
        yield Both(contract, contract.now_s, [rpc.call(Call("evm_snapshot"))])
        rpc.close()


def lived(contract: ContractTown, town: Town, history: list[Action]) -> None:
    """Do a history to both, each action a second after the one before."""
    for action in history:
        said = refused = ""
        try:
            contract.do(town, action)
        except RevertedOnChainError as reverted:
            said = str(reverted)
        town.ledger.now_s = contract.now_s
        try:
            done(town, action)
        except RevertedError as reverted:
            refused = reverted.error
        assert said == refused, f"{action}: the contract says {said!r}, the model {refused!r}"
        contract.now_s = town.ledger.now_s
    contract.pass_time()
    town.ledger.now_s = contract.now_s
    assert contract.differences(town) == {}
    assert read(contract) == replace(town.fact(), time_s=0)


def read(contract: ContractTown) -> JobFact:
    """What the chain says of the job; blocks, and who sent what, aside."""
    fact = JobReader(EvmChain(contract.rpc), contract.domain, JOB).fact()
    return replace(
        fact,
        block=0,
        block_hash="",
        time_s=0,
        ends_at_s=0,
        recorded_at_s=0,
        batches=tuple(replace(batch, block=0) for batch in fact.batches),
        forced=tuple(replace(forced, block=0) for forced in fact.forced),
        epochs=tuple(replace(epoch, closed_by="") for epoch in fact.epochs),
    )


@given(history=histories)
@settings(
    max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True
)
def test_they_agree_whatever_anybody_does(both: Both, history: list[Action]) -> None:
    contract, town = both.fresh()
    lived(contract, town, history)
    for name, count in reached(town)._asdict().items():
        event(f"{name}: {bool(count)}")
    verdict = verify(town.fact(), town.receipts, town.vouchers)
    assert [one for one in verdict.wrong if one.kind not in HONEST] == []


def whole_life() -> list[Action]:
    """Work in two epochs, everything paid, a voucher beside it, and the owner takes the rest."""
    node = PEOPLE.index(next(one for one in PEOPLE[3:]))
    history = [
        Action("work", who=number, epoch=epoch, amount=1_700 + 13 * number)
        for epoch in (0, 1)
        for number in (0, 1, 2) * 3
    ]
    for epoch, form in ((0, "aggregate"), (1, "packed")):
        history += [Action(form, epoch=epoch, amount=1), Action("close", epoch=epoch)]
        history += [Action("redeem", who=node, amount=3_000 + epoch)]
        history += [Action("pay", epoch=epoch, several=(0, 1, 2))]
    history += [Action("void", who=1, epoch=1, amount=500), Action("wait", amount=WINDOW_S)]
    for epoch in (0, 1):
        history += [Action("pay", epoch=epoch, several=(0, 1, 2))]
        history += [Action("sweep", epoch=epoch, several=(0, 1, 2))]
    # The last epoch, worth more than may be spent in a window, is closed after the notice.
    history += [Action("work", who=0, epoch=2, amount=4_095 - number) for number in range(9)]
    history += [Action("aggregate", epoch=2, amount=1), Action("close", epoch=2)]
    history += [Action("announce", who=1), Action("wait", amount=2 * WINDOW_S - 1)]
    history += [Action("aggregate", epoch=2, amount=1), Action("close", who=2, epoch=2)]
    history += [Action("wait", amount=WINDOW_S), Action("pay", epoch=2, several=(0,))]
    return [*history, Action("reclaim", who=1), Action("retire")]


def test_they_agree_over_a_whole_life(both: Both) -> None:
    contract, town = both.fresh()
    lived(contract, town, whole_life())
    assert town.ledger.job(town.receipts[0].receipt.job).free == 0
    assert town.reclaimed > 0
    assert town.ledger.epoch(JOB, 2).pool > TERMS.spend_limit
