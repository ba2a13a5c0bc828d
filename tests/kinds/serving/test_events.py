"""What readers of a journal see of a served model."""

import msgspec

from coordinator.core.serving.events import VersionPublished
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.state import FeedState
from hypergpu.journal.events import public_body, read_event
from hypergpu.journal.sentences import event_sentence
from hypergpu.journal.serving_events import WindowAcceptedEvent, WindowCountedEvent
from hypergpu.token_counts import TokenCount
from hypergpu.units import Milliseconds
from hypergpu.user.client import JobEvent
from tests.kinds.serving.walk import BASE, TUNING, created_model, walk_by_seed

BEGUN_MS = 1_700_000_000_000


def test_each_event_has_a_sentence_of_what_happened() -> None:
    sentences: dict[str, str] = {}
    for event in (event for seed in range(5) for event in walk_by_seed(seed).journal):
        kind = type(event).__name__
        body = public_body(kind, msgspec.json.encode(event))
        content = read_event(kind, msgspec.json.decode(body))
        assert content is not None, kind
        sentences[kind] = event_sentence(content, {getattr(event, "node", ""): "anna"})
    assert sentences["ServeCreated"] == "a job that serves tiny was created"
    assert sentences["ReplicaHandedBack"] == "anna does not hold the model: no memory"


def test_sentences_say_what_was_counted() -> None:
    names = {"n": "anna"}
    tokens = WindowCountedEvent("n", TokenCount(0, 1_200, 1))
    assert event_sentence(tokens, names) == "1200 tokens of anna were counted"
    layers = WindowCountedEvent("n", TokenCount(0, 1_200, 1, 3))
    assert event_sentence(layers, names) == "3600 layer-tokens of anna were counted"
    acceptance = WindowAcceptedEvent("n", 1, 1, unit="layer-tokens")
    assert event_sentence(acceptance, names) == "1 layer-token of anna count"


def test_readers_are_not_told_the_files_of_the_model() -> None:
    body = msgspec.json.encode(created_model())
    (base,) = BASE.values()
    assert base.digest.encode() in body
    assert base.digest.encode() not in public_body("ServeCreated", body)


def test_readers_are_told_rounds_and_no_file_of_a_training_s_model() -> None:
    projection = FeedProjection("somewhere:7700")
    begin_event = created_model(follows=True)
    version_event = VersionPublished(at_ms=Milliseconds(5), rounds=7, blob=TUNING.version.blob)
    for place, event in enumerate((begin_event, version_event)):
        kind = type(event).__name__
        body = public_body(kind, msgspec.json.encode(event))
        for blob in (*BASE.values(), *TUNING.blobs):
            assert blob.digest.encode() not in body
        content = msgspec.json.decode(body)
        projection.take_event(begin_event.job_id, JobEvent(place, 0, kind, content), BEGUN_MS)
    job = msgspec.convert(projection.state, FeedState).jobs[begin_event.job_id]
    assert (job.training, job.round) == (TUNING.job, 7)


def test_the_page_has_its_name_and_when_it_began() -> None:
    projection = FeedProjection("somewhere:7700")
    event = created_model()
    body = msgspec.json.decode(public_body("ServeCreated", msgspec.json.encode(event)))
    projection.take_event(event.job_id, JobEvent(0, 0, "ServeCreated", body), BEGUN_MS)
    job = msgspec.convert(projection.state, FeedState).jobs[event.job_id]
    assert (job.name, job.workload, job.created_at_ms) == ("tiny", "serve", BEGUN_MS)
