"""The contracts' own tests are forge's (contracts/test); here they run, and are tested themselves.

A million random calls and all mutants are `make bench ONLY=contracts`; here are some calls, and
some mutants in `make full`.
"""

import json
from collections.abc import Callable

import pytest

from contracts.compile import sources, stale_artifacts
from contracts.tools.forge import build, forge_test, random_calls
from contracts.tools.mutate import (
    EQUIVALENT,
    Mutant,
    every_mutant,
    mutants,
    one_of,
    score,
)

CALLS = 2_000
PART = 20
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def build_contracts() -> None:
    build()


def printed_by(*choice: str) -> str:
    """Run some of forge's tests, see that they pass, and return what it printed."""
    answer = forge_test(*choice)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    return answer.stdout


@pytest.mark.full  # `make check` compiles and compares them, too.
def test_the_artifacts_are_what_the_sources_give() -> None:
    assert stale_artifacts() == []


def test_the_contracts_behave() -> None:
    output = printed_by("--no-match-contract", "GasTest|InvariantsTest")
    assert "test_an_undercounted_node_is_paid_in_full_by_its_newest_receipt" in output


def test_the_books_balance_after_any_calls(
    record_property: Callable[[str, object], None],
) -> None:
    campaign = random_calls(CALLS)
    invariants_text = f"{campaign.is_broken:d} invariants broken"
    record_property("said", f"contracts: {campaign.calls:,} random calls, {invariants_text}")
    assert not campaign.is_broken, campaign.printed[-8000:]
    assert (campaign.calls, campaign.reverts) == (CALLS, 0)


def test_gas_is_what_the_snapshots_say() -> None:
    output = printed_by("--isolate", "--match-contract", "GasTest", "--gas-snapshot-check=true")
    assert "test_gas_of_10000_receipts_of_10_nodes" in output


def test_a_mutant_is_one_changed_line_of_a_function() -> None:
    text = "// a < b\nfunction f() {\n    if (a < b) revert No();\n}\n"
    mutant_names = set(mutants({"ledger/A.sol": text, "interfaces/B.sol": text}))
    line = "    if (a < b) revert No();"
    assert mutant_names == {
        Mutant("ledger/A.sol", 2, line, "    if (a <= b) revert No();"),
        Mutant("ledger/A.sol", 2, line, "    if (false) revert No();"),
    }


@pytest.mark.full
def test_the_tests_notice_mutants(
    record_property: Callable[[str, object], None],
) -> None:
    chosen_mutants = one_of(PART, sources())
    outcome = score(chosen_mutants)
    record_property(
        "said",
        f"contracts: mutation score {outcome.percent:.1f} % of {outcome.judged_count} mutants",
    )
    explained_names = json.loads(EQUIVALENT.read_bytes()).keys()
    assert {mutant.name for mutant in outcome.survivors} <= explained_names
    assert outcome.judged_count > len(chosen_mutants) * 3 // 4


def test_each_mutant_is_in_one_of_its_parts() -> None:
    texts = {"ledger/A.sol": "if (a < b) return;\n" * 7}
    every = every_mutant(texts)
    assert len(every) == 14
    assert one_of(1, texts) == every
    assert len(one_of(7, texts)) == 2


def test_only_mutants_are_explained() -> None:
    names = {mutant.name for mutant in every_mutant(sources())}
    assert json.loads(EQUIVALENT.read_bytes()).keys() - names == set()
