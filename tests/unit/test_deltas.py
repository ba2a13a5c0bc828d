"""Which deltas a model is offered with, and that none of them is collected."""

from coordinator.core.job.deltas import DELTAS_MOST, extend_chain, initial_of
from coordinator.core.job.live_blobs import live_blobs
from coordinator.core.job.state import Model
from hypergpu.ids import Digest
from hypergpu.statements.assignment import BlobRef, Delta
from hypergpu.units import Bytes
from hypergpu.wire.assignment import blob_value, model_message
from tests.unit.job_states import training

MODEL_BYTES = Bytes(1000)


def digest_named(kind: str, number: int) -> Digest:
    return Digest(f"{kind}{number:0{64 - len(kind)}}")


def after(rounds: int, delta_bytes: int) -> Model:
    """A model after so many rounds, each of which left a delta of that size."""
    model = Model(0, BlobRef(digest_named("a", 0), MODEL_BYTES))
    for number in range(1, rounds + 1):
        blob = BlobRef(digest_named("b", number), Bytes(delta_bytes))
        deltas = extend_chain(model, Delta(model.blob.digest, blob, "int4"), MODEL_BYTES)
        model = Model(number, BlobRef(digest_named("a", number), MODEL_BYTES), deltas=deltas)
    return model


def test_each_delta_leads_to_the_base_of_the_next() -> None:
    bases = [delta.base for delta in after(3, 10).deltas]
    assert bases == [digest_named("a", 0), digest_named("a", 1), digest_named("a", 2)]


def test_all_deltas_together_are_less_than_half_a_model() -> None:
    assert len(after(20, 100).deltas) == 4
    assert len(after(20, 99).deltas) == 5


def test_the_newest_delta_is_kept_however_large() -> None:
    deltas = after(5, 700).deltas
    assert [delta.base for delta in deltas] == [digest_named("a", 4)]


def test_no_more_deltas_are_kept_than_are_worth_applying() -> None:
    deltas = after(40, 1).deltas
    assert len(deltas) == DELTAS_MOST
    assert deltas[-1].base == digest_named("a", 39)


def test_no_delta_that_a_node_may_be_told_of_is_collected() -> None:
    job = training()
    model = after(3, 10)
    live = live_blobs(type(job)(job.job_id, job.spec, model=model))
    assert {delta.blob.digest for delta in model.deltas} <= live


def test_nodes_are_told_of_all_deltas_in_order() -> None:
    model = after(3, 10)
    message = model_message(model.blob, model.deltas, digest_named("c", 0))
    told = [blob_value(delta.blob).digest for delta in message.deltas]
    assert told == [digest_named("b", 1), digest_named("b", 2), digest_named("b", 3)]


def test_nodes_can_draw_the_first_model_as_long_as_deltas_lead_on_from_it() -> None:
    drawable = [initial_of(after(rounds, 100)) for rounds in range(7)]
    assert drawable == [digest_named("a", 0)] * 5 + [None] * 2


def test_a_model_without_deltas_is_only_drawn_before_the_first_round() -> None:
    whole = Model(2, BlobRef(digest_named("a", 2), MODEL_BYTES))
    assert initial_of(whole) is None


def test_a_chain_that_a_round_without_an_update_or_a_delta_broke_leads_on_from_nothing() -> None:
    base = after(2, 10)
    unchanged = Model(3, base.blob, deltas=base.deltas)
    assert initial_of(unchanged) is None
    begun_anew = Model(2, BlobRef(digest_named("a", 2), MODEL_BYTES), deltas=after(1, 10).deltas)
    assert initial_of(begun_anew) is None
