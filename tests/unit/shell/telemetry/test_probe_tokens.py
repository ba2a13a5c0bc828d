"""Tokens that open the echo, and those that do not."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.shell.telemetry.probe_tokens import LIFE_MS, RENEWAL_MS, ProbeTokens
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.wire.probing import TOKEN_BYTES

NODE = NodeId("0x" + "a1" * 20)
NOW = Milliseconds(5_000)


def test_a_token_names_its_bearer_until_its_time_is_over() -> None:
    tokens = ProbeTokens()
    token = tokens.token(NODE, NOW)
    assert len(token) == TOKEN_BYTES
    assert tokens.bearer(token, Milliseconds(NOW + LIFE_MS - 1)) == NODE
    assert tokens.bearer(token, Milliseconds(NOW + LIFE_MS)) is None


def test_a_token_is_renewed_well_before_it_ends() -> None:
    assert RENEWAL_MS <= LIFE_MS // 2


def test_a_token_of_another_start_is_worthless() -> None:
    assert ProbeTokens().bearer(ProbeTokens().token(NODE, NOW), NOW) is None


@given(st.integers(0, TOKEN_BYTES - 1), st.integers(1, 255))
def test_a_token_that_was_altered_anywhere_is_worthless(at: int, change: int) -> None:
    tokens = ProbeTokens(b"k" * 32)
    token = bytearray(tokens.token(NODE, NOW))
    token[at] ^= change
    assert tokens.bearer(bytes(token), NOW) is None


@given(st.binary(max_size=2 * TOKEN_BYTES))
def test_noise_is_no_token(noise: bytes) -> None:
    assert ProbeTokens(b"k" * 32).bearer(noise, NOW) is None
