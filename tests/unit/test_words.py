"""What people read of counts and of refusals."""

import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import are, several


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 rounds are over"), (1, "1 round is over"), (2, "2 rounds are over")],
)
def test_one_of_something_is_said_as_one(count: int, text: str) -> None:
    assert f"{several(count, 'round')} {are(count)} over" == text


def test_a_noun_may_have_another_ending() -> None:
    assert [several(count, "batch", "es") for count in (1, 2)] == ["1 batch", "2 batches"]


@pytest.mark.parametrize(
    ("detail", "fix", "told"),
    [
        ("transaction 4 failed", "mend it", "transaction 4 failed. Fix: mend it"),
        ("it failed. Fix: mend it", "", "it failed. Fix: mend it"),
    ],
)
def test_whoever_looks_on_is_told_a_sentence_and_one_fix(detail: str, fix: str, told: str) -> None:
    assert HyperGPUError(Reason.SENDING_HALTED, detail, fix=fix).message == told


def test_a_refusal_that_knows_no_closer_fix_tells_its_reasons() -> None:
    refused = HyperGPUError(Reason.SENDING_HALTED, "transaction 4 failed")
    assert refused.message == f"transaction 4 failed. Fix: {Reason.SENDING_HALTED.fix}"
