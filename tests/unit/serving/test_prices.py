"""What users state of prices, and what a job has of them."""

import pytest

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.journal.worth import most_for
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, span_blobs
from hypergpu.serving.serve_request import ENGINE_KIND, ServeRequest
from hypergpu.units import Bytes
from hypergpu.user.serving.starting import ServeOrder
from hypergpu.work_units import WorkUnit

LAYERS = 32
CUT = ModelCut(layers=LAYERS, hidden_size=4, layer_bytes=1, end_bytes=1, stages=2)
NAMES = span_blobs(LayerSpan(0, LAYERS), LAYERS)
FILES = dict.fromkeys(NAMES, BlobRef(digest_of(b"a layer"), Bytes(7)))


def ring_request(price: str) -> ServeRequest:
    order = ServeOrder("a folder", price=price, budget="1000000")
    return order.request("cut", STAGE_KIND, files=FILES, cut=CUT)


def test_a_thousand_tokens_of_a_ring_cost_what_its_user_stated() -> None:
    request = ring_request("5120")
    assert request.unit is WorkUnit.LAYER_TOKENS
    assert most_for(request.unit_price, 1_000 * LAYERS) == 5_120


@pytest.mark.parametrize(
    ("price", "nearest"), [("5000", "4800 or 5120"), ("10", "multiple of 320: 320$")]
)
def test_a_price_that_layers_do_not_share_is_refused_with_the_nearest(
    price: str, nearest: str
) -> None:
    with pytest.raises(HyperGPUError, match="32 layers") as refusal:
        ring_request(price)
    assert refusal.match(nearest)


def test_a_model_that_is_held_whole_is_paid_by_the_token() -> None:
    order = ServeOrder("a folder", price="5000", budget="1000000")
    request = order.request("whole", ENGINE_KIND, files=FILES)
    assert (request.unit, request.unit_price) == (WorkUnit.TOKENS, 500)
