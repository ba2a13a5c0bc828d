"""Transactions of the coordinator's key, before any chain sees them."""

from pathlib import Path

from payments.shell.chains import named_chain
from payments.shell.ethereum import ChainBlock, Ethereum
from payments.shell.signing import Payload, read_transaction
from payments.shell.store import PaymentStore
from payments.shell.transactions import TransactionQueue, UnsignedTransaction
from tests.properties.statements import COORDINATOR


class UnusedAccount(Ethereum):
    """An RPC that knows of no transaction of the account."""

    async def next_nonce(self, account: str, height: int | None = None) -> int:
        return 0

    async def balance_wei(self, account: str) -> int:
        return 10**21


async def test_the_gas_limit_is_the_chains_share_of_the_formula_up_to_its_limit(
    tmp_path: Path,
) -> None:
    stated_chain = named_chain("monad-testnet")
    assert stated_chain is not None
    assert stated_chain.profile.gas_percent == 200
    store = PaymentStore("", tmp_path)
    chain = UnusedAccount(stated_chain.url, stated_chain.profile)
    queue = TransactionQueue(chain, COORDINATOR, stated_chain.profile, store)
    head = ChainBlock(1, bytes(32), bytes(32), 1, 1)
    await queue.look(head)
    transactions = [
        UnsignedTransaction(f"test/{gas}", None, None, Payload(bytes(20), b"", gas))
        for gas in (100_000, 20_000_000)
    ]
    rows = await queue.add(transactions, head)
    limits = [read_transaction(row.variants[-1].raw)[0].gas for row in rows]
    assert limits == [200_000, stated_chain.profile.transaction_gas_max]
    store.close()
    await chain.close()
