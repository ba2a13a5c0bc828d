from eth_account import Account
from eth_account.datastructures import SignedTransaction
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.chain.signer import Draft, Signer, contract_address, rlp
from hypergpu.keys.keccak import keccak
from hypergpu.signature import IdentityKey
from tests.signed_receipts import COORDINATOR

DRAFTS = st.builds(
    Draft,
    chain_id=st.integers(1, 2**63 - 1),
    nonce=st.integers(0, 2**40),
    to=st.binary(min_size=20, max_size=20) | st.just(b""),
    call=st.binary(max_size=300),
    gas=st.integers(21_000, 2**40),
    max_fee_wei=st.integers(0, 2**60),
    tip_wei=st.integers(0, 2**60),
    value_wei=st.integers(0, 2**90),
)


def by_eth_account(key: IdentityKey, draft: Draft) -> SignedTransaction:
    fields = {
        "type": 2,
        "chainId": draft.chain_id,
        "nonce": draft.nonce,
        "data": draft.call,
        "gas": draft.gas,
        "maxFeePerGas": draft.max_fee_wei,
        "maxPriorityFeePerGas": draft.tip_wei,
        "value": draft.value_wei,
    }
    to = {"to": draft.to} if draft.to else {}
    signed: SignedTransaction = Account.sign_transaction(fields | to, key.secret)
    return signed


@settings(max_examples=50)
@given(DRAFTS, st.binary(min_size=1, max_size=8))
def test_the_bytes_are_those_that_eth_account_makes(draft: Draft, seed: bytes) -> None:
    key = IdentityKey(keccak(seed))
    signed, expected = Signer(key).sign(draft), by_eth_account(key, draft)
    assert signed.raw == bytes(expected.raw_transaction)
    assert signed.hash == bytes(expected.hash)


def test_a_transaction_is_signed_alike_each_time() -> None:
    draft = Draft(chain_id=1, nonce=0, to=bytes(20), call=b"", gas=21_000, max_fee_wei=2, tip_wei=1)
    assert Signer(COORDINATOR).sign(draft) == Signer(COORDINATOR).sign(draft)


def test_lists_and_strings_are_prefixed_as_the_yellow_paper_has_it() -> None:
    assert rlp(b"dog") == b"\x83dog"
    assert rlp([b"cat", b"dog"]) == b"\xc8\x83cat\x83dog"
    assert rlp(0) == b"\x80"
    assert rlp(15) == b"\x0f"
    assert rlp(1024) == b"\x82\x04\x00"
    assert rlp([[], [[]], [[], [[]]]]) == bytes.fromhex("c7c0c1c0c3c0c1c0")
    assert rlp(b"a" * 56) == b"\xb8\x38" + b"a" * 56


def test_where_a_contract_comes_to_lie_is_known_before_it_is_made() -> None:
    sender = bytes.fromhex("6ac7ea33f8831ea9dcc53393aaa88b25a785dbf0")
    assert contract_address(sender, 0).hex() == "cd234a471b72ba2f1ccf0a70fcaba648a5eecd8d"
    assert contract_address(sender, 1).hex() == "343c43a37d37dff08ae8c4a11544c718abb4fcf8"


def test_a_secret_is_in_no_repr() -> None:
    assert COORDINATOR.secret.hex() not in repr(Signer(COORDINATOR))
