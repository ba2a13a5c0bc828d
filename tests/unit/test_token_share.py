"""A limit on what one join token's nodes weigh together."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.training.trust.token_share import cap_tokens
from hypergpu.ids import NodeId

WEIGHTS = st.dictionaries(
    st.sampled_from([NodeId(f"{number:02d}") for number in range(12)]),
    st.integers(1_000, 100_000),
    max_size=12,
)


@given(WEIGHTS, st.integers(1, 4), st.sampled_from([0.5, 0.8, 0.95]))
def test_no_token_has_more_than_its_share_beside_others(
    weights: dict[NodeId, int], lines: int, share: float
) -> None:
    tokens = {node: f"line-{int(node) % lines}" for node in weights}
    after = cap_tokens(weights, tokens, share)
    assert all(1 <= after[node] <= weight for node, weight in weights.items())
    sums = dict.fromkeys(tokens.values(), 0)
    for node, weight in after.items():
        sums[tokens[node]] += weight
    if len(sums) > 1:
        assert max(sums.values()) <= share * sum(after.values()) * 1.001
    else:
        assert after == weights


def test_a_share_of_one_and_nodes_without_a_token_know_no_limit() -> None:
    weights = {NodeId("a"): 99_000, NodeId("b"): 1_000}
    assert cap_tokens(weights, {NodeId("a"): "x", NodeId("b"): "y"}, 1.0) == weights
    assert cap_tokens(weights, {NodeId("a"): "", NodeId("b"): "y"}, 0.5) == weights
