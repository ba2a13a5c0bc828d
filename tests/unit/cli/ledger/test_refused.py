"""Whatever a ledger or its token reverts with has a name, its values and a fix."""

import pytest
from eth_abi.abi import encode

from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT, TOKEN, LedgerCalls
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.cli.ledger.acts.refused import refusal
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.refused import MEANINGS

CALLS = LedgerCalls()
ERRORS = {
    each["name"]: each
    for name in (CONTRACT, TOKEN)
    for each in artifact(name).abi
    if each["type"] == "error"
}
SOME = {"address": "0x" + "ab" * 20, "bytes32": bytes(32), "string": "words"}


def reverted(name: str) -> RpcRefusedError:
    types = [each["type"] for each in ERRORS[name]["inputs"]]
    selector = keccak(f"{name}({','.join(types)})".encode())[:4]
    values = [SOME.get(each, 7) for each in types]
    return RpcRefusedError("eth_call", 3, "execution reverted", selector + encode(types, values))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_named_with_its_values_and_a_fix(name: str) -> None:
    told = refusal(CALLS, "something", reverted(name))
    shown = [each["name"] for each in ERRORS[name]["inputs"]]
    assert told.detail.startswith(f"the ledger refuses something: {name}(")
    assert all(f"{each} " in told.detail for each in shown)
    assert told.fix
    assert "{" not in told.fix


def test_no_meaning_is_of_an_error_that_is_gone() -> None:
    assert MEANINGS.keys() == ERRORS.keys()


def test_a_time_is_written_as_one() -> None:
    told = refusal(CALLS, "reclaim", reverted("TooEarly"))
    assert told.detail == "the ledger refuses reclaim: TooEarly(until 1970-01-01 00:00:07 UTC)"
    assert told.fix == "wait until 1970-01-01 00:00:07 UTC"


@pytest.mark.parametrize("words", [b"", b"1234", bytes(100)])
def test_what_has_no_name_is_told_as_the_rpc_says_it(words: bytes) -> None:
    told = refusal(CALLS, "stake", RpcRefusedError("eth_call", 3, "no such luck", words))
    assert told.detail == "the ledger refuses stake: no such luck"
