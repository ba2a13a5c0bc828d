"""`hypergpu workload check` of what cannot be tried: it is told before a process is started."""

import pytest

from tests.unit.cli.conftest import Hypergpu


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no workload 'nowhere'"),
        (["digits-softmax", "--option", "depth=1"], "digits-softmax has no such option"),
        (["imagefolder-resnet18"], "name their folder: --data PATH"),
        (["digits-softmax", "--option", "depth"], "give KEY=VALUE"),
    ],
)
def test_what_cannot_be_tried_is_told_with_its_fix(
    alone: Hypergpu, words: list[str], said: str
) -> None:
    result = alone("workload", "check", *words)
    assert result.exit_code != 0
    assert said in result.output
