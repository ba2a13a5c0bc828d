"""How often the API may be asked, by address and by key."""

from collections import deque

import pytest

from hypergpu.user.serving.api_keys import ApiKeyView
from hypergpu.user.serving.call_rates import ADDRESS_RATE, GUESS_RATE, CallRates
from hypergpu.user.serving.openai_requests import ApiError


def key(calls_per_minute: int | None) -> ApiKeyView:
    return ApiKeyView("key-1", "", (), None, 0, 0, False, calls_per_minute)


def test_a_key_may_ask_so_many_times_a_minute() -> None:
    rates = CallRates()
    for _ in range(3):
        rates.admit_key(key(3))
    with pytest.raises(ApiError, match="which may ask 3 a minute") as refusal:
        rates.admit_key(key(3))
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    assert 0 < int(refusal.value.headers["retry-after"]) <= 20
    for _ in range(1_000):
        rates.admit_key(key(None))


def test_one_address_waits_and_another_does_not() -> None:
    rates = CallRates()
    for _ in range(ADDRESS_RATE.burst):
        rates.admit_address("10.0.0.1")
    with pytest.raises(ApiError, match="too many requests of this address"):
        deque(map(rates.admit_address, ["10.0.0.1"] * ADDRESS_RATE.burst))
    rates.admit_address("10.0.0.2")


def test_wrong_keys_are_counted_apart() -> None:
    rates = CallRates()
    with pytest.raises(ApiError, match="wrong keys"):
        deque(map(rates.count_guess, ["10.0.0.1"] * (2 * GUESS_RATE.burst)))
    rates.admit_address("10.0.0.1")
