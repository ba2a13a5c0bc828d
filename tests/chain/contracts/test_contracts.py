"""The contracts' own tests are forge's (contracts/test); here they run whole, as CI sees them."""

import json

import pytest

from contracts.compile import drifted, sources
from contracts.tools.forge import forge_test
from contracts.tools.mutate import EQUIVALENT, Mutant, every_mutant, mutants

# The first run compiles the tests, which takes most of its time.
pytestmark = pytest.mark.timeout(600)


def printed_by(*choice: str) -> str:
    """Run some of forge's tests, see that they pass, and return what it printed."""
    answer = forge_test(*choice)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    return answer.stdout


def test_the_artifacts_are_what_the_sources_give() -> None:
    assert drifted() == []


def test_the_contracts_behave_and_the_books_balance_after_any_calls() -> None:
    printed = printed_by("--no-match-contract", "GasTest")
    assert "invariant_the_books_balance" in printed


def test_gas_is_what_the_snapshots_say() -> None:
    printed = printed_by("--isolate", "--match-contract", "GasTest", "--gas-snapshot-check=true")
    assert "test_gas_of_10000_receipts_of_10_nodes_by_their_sums" in printed


def test_a_mutant_is_one_changed_line_of_a_function() -> None:
    text = "// a < b\nfunction f() {\n    if (a < b) revert No();\n}\n"
    found = set(mutants({"ledger/A.sol": text, "interfaces/B.sol": text}))
    line = "    if (a < b) revert No();"
    assert found == {
        Mutant("ledger/A.sol", 2, line, "    if (a <= b) revert No();"),
        Mutant("ledger/A.sol", 2, line, "    if (false) revert No();"),
    }


def test_only_mutants_are_explained() -> None:
    names = {mutant.name for mutant in every_mutant(sources())}
    assert json.loads(EQUIVALENT.read_bytes()).keys() - names == set()
