import pytest

from coordinator.core.settlement.refused import Refused, failed, refused_with

NOTHING = Refused("a contract refused it without a word")


@pytest.mark.parametrize(
    ("name", "texts", "said", "words"),
    [
        ("", {}, b"", "a contract refused it without a word"),
        ("", {}, bytes(40), f"a contract refused it with 0x{'00' * 36}"),
        (
            "Strange",
            {"a": "1", "b": "0x02"},
            b"1234",
            "a contract refused it with Strange(a 1, b 0x02)",
        ),
        ("Error", {"reason": "no"}, b"1234", 'a contract refused it: "no"'),
        ("Panic", {"code": "17"}, b"1234", "a number went out of its range (panic 0x11)"),
    ],
)
def test_what_a_contract_says_is_told_in_words(
    name: str, texts: dict[str, str], said: bytes, words: str
) -> None:
    assert refused_with(name, texts, said).words == words


@pytest.mark.parametrize(
    ("gas_used", "is_starved"), [(64_000, True), (63_000, True), (62_999, False)]
)
def test_what_ran_out_of_gas_is_told_from_what_was_refused(
    gas_used: int, *, is_starved: bool
) -> None:
    found = failed(None, gas_used, 64_000)
    assert (found is not None and found.is_starved) == is_starved
    refused = failed(NOTHING, gas_used, 64_000)
    assert refused is not None
    assert not refused.is_starved
    assert refused.fix == "mend that; then start once with: hypergpu up --retry-failed"


def test_a_pause_passes_and_a_missing_bond_does_not() -> None:
    paused = refused_with("EnforcedPause", {}, b"1234")
    bond = refused_with("BondMissing", {"required": "9", "posted": "4"}, b"1234")
    assert (paused.is_passing, bond.is_passing) == (True, False)
    assert bond.fix == "post 5 more: hypergpu ledger bond"


def test_a_coordinator_is_told_its_own_fix_where_a_command_has_another() -> None:
    ended = {"endedAt": "1970-01-01 00:00:07 UTC"}
    found = refused_with("JobEnded", ended, b"1234")
    assert found.words == "the job has ended on the ledger, at 1970-01-01 00:00:07 UTC"
    assert found.fix == "submit it again as another job"
