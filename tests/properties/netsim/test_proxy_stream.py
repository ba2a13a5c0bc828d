import random
from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.transfer.path import CongestionControl
from netsim.proxy.stream import StreamEnd
from tests.unit.netsim.proxy.one_stream import OneStream, direction

LOSSES = st.sampled_from([0.0, 0.001, 0.02, 0.3])
RATES = st.sampled_from([0.0, 0.3, 5.0, 80.0])
WRITES = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(1, 100_000)), min_size=1, max_size=12
)
OUTAGES = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(1, 2_000_000), st.booleans()), max_size=3
)


@given(
    writes=WRITES,
    outages=OUTAGES,
    loss=LOSSES,
    rate=RATES,
    control=st.sampled_from(list(CongestionControl)),
    seed=st.integers(0, 1000),
)
def test_every_byte_arrives_once_and_in_order_whatever_the_link_does(
    writes: list[tuple[int, int]],
    outages: list[tuple[int, int, bool]],
    *,
    loss: float,
    rate: float,
    control: CongestionControl,
    seed: int,
) -> None:
    one = OneStream(direction(20, rate, loss=loss), control=control, seed=seed)
    dice = random.Random(seed)
    sent = bytearray()
    one.stream.open()

    def write(payload: bytes) -> None:
        sent.extend(payload)
        one.write(payload)

    for at_us, size_bytes in sorted(writes):
        payload = dice.randbytes(size_bytes)
        one.clock.at(at_us, partial(write, payload))
    for from_us, lasting_us, is_cut in outages:
        begin_outage(one, from_us, from_us + lasting_us, is_cut=is_cut)
    one.clock.run()
    one.stream.end()
    one.clock.run()
    assert one.arrived == sent
    assert one.marks == [StreamEnd.END]
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(one.arrivals))


def begin_outage(one: OneStream, from_us: int, until_us: int, *, is_cut: bool) -> None:
    """A cut, or a standstill; outages may overlap."""
    bottleneck = one.there.hops[0]

    def begin() -> None:
        if is_cut:
            one.there.is_cut = one.back.is_cut = True
        else:
            bottleneck.stop()

    def end() -> None:
        if is_cut:
            one.there.is_cut = one.back.is_cut = False
            one.stream.resume_after_cut()
        else:
            bottleneck.resume()

    one.clock.at(from_us, begin)
    one.clock.at(until_us, end)
