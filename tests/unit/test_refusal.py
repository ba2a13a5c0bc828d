"""What people read of a refusal."""

import pytest

from hypergpu.refusal import Reason, RefusalError


@pytest.mark.parametrize(
    ("detail", "fix", "told"),
    [
        ("transaction 4 failed", "mend it", "transaction 4 failed. Fix: mend it"),
        ("it failed. Fix: mend it", "", "it failed. Fix: mend it"),
    ],
)
def test_whoever_looks_on_is_told_a_sentence_and_one_fix(detail: str, fix: str, told: str) -> None:
    assert RefusalError(Reason.SENDING_HALTED, detail, fix=fix).told == told


def test_a_refusal_that_knows_no_closer_fix_tells_its_reasons() -> None:
    refused = RefusalError(Reason.SENDING_HALTED, "transaction 4 failed")
    assert refused.told == f"transaction 4 failed. Fix: {Reason.SENDING_HALTED.value.fix}"
