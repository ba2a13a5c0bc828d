"""A training through a ring in the journal: rounds that are stored, and what a job says of them."""

import pytest
from msgspec.structs import replace

from coordinator.core.serving.events import RingRoundStored
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob
from coordinator.shell.service.ring_summary import add_ring_training
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.journal.sentences import event_sentence
from hypergpu.journal.serving_events import RingRoundStoredEvent
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import job_pb2
from tests.kinds.serving.test_rings import CUT, FILES, LAYERS, NODES, advance, cut_job, placement
from tests.kinds.serving.walk import created_model

TRAINING = RingTraining(rounds=2, inner_steps=5, batch_rows=4)
ROWS = BlobRef(digest_of(b"rows"), Bytes(100))
ADAPTER = {
    layer_blob(layer): BlobRef(digest_of(b"layer %d" % layer), Bytes(10)) for layer in range(LAYERS)
}
FIRST = RingRoundStored(
    at_ms=Milliseconds(9), rounds=1, step=5, loss=2.5, tokens=100, adapter=ADAPTER
)
LAST = replace(FIRST, rounds=2, step=10, loss=1.5)


def trained_job() -> ServeJob:
    job = cut_job(*NODES[:3], training=TRAINING, files={**FILES, TRAINING_ROWS: ROWS})
    return advance(job, placement(job))


def test_a_job_goes_on_from_its_newest_round_and_says_so() -> None:
    job = trained_job()
    assert job.reason == "3 stages on nodes train, none of 2 rounds is stored yet"
    job = advance(job, FIRST)
    assert job.is_training
    assert job.reason == "3 stages on nodes train, 1 of 2 rounds are stored, loss 2.5"
    assert set(ADAPTER.values()) <= job.blobs
    job = advance(job, LAST)
    assert not job.is_training
    assert job.reason == "3 stages on nodes, fine-tuned in 2 rounds, loss 1.5"


def test_a_loss_of_rows_that_are_held_out_is_told_beside_the_other() -> None:
    job = advance(trained_job(), replace(FIRST, held_out_loss=2.25))
    assert job.reason.endswith("1 of 2 rounds are stored, loss 2.5, held out 2.25")
    assert job.stored_round is not None
    assert job.stored_round.held_out_loss == 2.25
    event = RingRoundStoredEvent(rounds=1, loss=2.5, held_out_loss=2.25)
    assert event_sentence(event, {}).endswith("stored: loss 2.5000, held out 2.2500")
    assert event_sentence(replace(event, held_out_loss=None), {}).endswith("stored: loss 2.5000")


def test_a_summary_has_the_rounds_that_are_stored_and_the_held_out_loss() -> None:
    summary = job_pb2.JobSummary()
    add_ring_training(summary, trained_job())
    assert (summary.round, summary.rounds) == (0, 2)
    add_ring_training(summary, advance(trained_job(), FIRST))
    assert (summary.round, summary.loss) == (1, FIRST.loss)
    add_ring_training(summary, advance(trained_job(), replace(FIRST, held_out_loss=2.25)))
    assert summary.loss == 2.25


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (FIRST, "has the model of step 5 of 10"),
        (replace(LAST, step=11), "has the model of step 5 of 10"),
        (replace(LAST, rounds=3), "step 10 is not after 3 rounds"),
        (replace(LAST, adapter={}), "the adapter lacks layers"),
        (replace(LAST, loss=float("nan")), "the loss is not finite"),
        (replace(LAST, held_out_loss=float("inf")), "the loss is not finite"),
    ],
)
def test_a_round_that_cannot_be_is_rejected(event: RingRoundStored, reason: str) -> None:
    assert reason in SERVING.rejection(advance(trained_job(), FIRST), event)


def test_nodes_get_the_settings_and_not_the_rows() -> None:
    work = trained_job().request.stage(LayerSpan(0, 3))
    assert work.training == TRAINING
    assert TRAINING_ROWS not in work.files


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"files": FILES}, "training-rows among them"),
        ({"cut": None, "engine": "serve/transformers"}, "for serve/stage alone"),
        ({"training": None}, "no training-rows where nothing is trained"),
        ({"training": replace(TRAINING, rank=0)}, "options.rank"),
        ({"unit_price": 10, "budget": 1_000}, "none for a training through a ring"),
    ],
)
def test_a_request_that_cannot_be_trained_is_refused(changes: dict[str, object], rule: str) -> None:
    request = created_model(
        engine="serve/stage", files={**FILES, TRAINING_ROWS: ROWS}, cut=CUT, training=TRAINING
    ).request
    with pytest.raises(HyperGPUError, match=rule):
        replace(request, **changes).check()
