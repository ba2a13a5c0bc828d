"""The public events of a journal: what the coordinator writes is what every reader has."""

import msgspec
import pytest
from msgspec.structs import fields

from coordinator.core.training.job.events import Event
from hypergpu.journal.events import (
    PRIVATE_FIELDS,
    event_kind,
    event_types,
    public_body,
    read_event,
)
from hypergpu.journal.sentences import FIGURE_KINDS, SENTENCES, event_sentence
from tests.unit.job_states import all_events


def kind_of(event: Event) -> str:
    return type(event).__name__


@pytest.mark.parametrize("event", all_events(), ids=kind_of)
def test_each_event_is_read_from_the_feed_and_has_a_sentence(event: Event) -> None:
    kind = kind_of(event)
    body = public_body(kind, msgspec.json.encode(event))
    content = read_event(kind, msgspec.json.decode(body))
    assert content is not None
    assert event_kind(content) == kind
    sentence = event_sentence(content, {})
    assert sentence
    assert "{" not in sentence


@pytest.mark.parametrize("event", all_events(), ids=kind_of)
def test_a_public_field_is_one_that_the_coordinator_writes(event: Event) -> None:
    public = event_types()[kind_of(event)].__struct_encode_fields__
    assert set(public) <= set(event.__struct_encode_fields__)


def test_a_draw_is_not_told() -> None:
    for kind, hidden_fields in PRIVATE_FIELDS.items():
        body = public_body(
            kind, msgspec.json.encode(dict.fromkeys(hidden_fields, "a secret") | {"n": 1})
        )
        assert msgspec.json.decode(body) == {**hidden_fields, "n": 1}
        # Of what is hidden, a reader that has no other rows sees as much as of an earlier version.
        public_fields = {field.name: field.default for field in fields(event_types()[kind])}
        for name in hidden_fields.keys() & public_fields:
            default = msgspec.json.decode(msgspec.json.encode(public_fields[name]))
            assert default == hidden_fields[name]


def test_every_kind_has_one_sentence() -> None:
    assert set(SENTENCES) == set(event_types())
    assert set(event_types()) >= FIGURE_KINDS


def test_kinds_and_fields_of_newer_versions_are_passed_over() -> None:
    assert read_event("NodeTeleported", {"node": "0xab"}) is None
    loss_event = read_event("NodeLost", {"node": "0xab", "reason": "silent", "new": [1]})
    assert loss_event is not None
    assert event_sentence(loss_event, {"0xab": "attic"}) == "attic was lost: silent"


def test_an_event_that_cannot_be_read_is_passed_over() -> None:
    assert read_event("RoundRecorded", {"round": "one"}) is None


def test_rounds_of_sentences_and_of_their_reasons_count_from_one() -> None:
    fields = {"node": "0xab", "round": 4, "reason": "its lease of round 4 is void"}
    rejection = read_event("UpdateRejected", fields)
    assert rejection is not None
    expected_sentence = "the update of attic for round 5 was rejected: its lease of round 5 is void"
    assert event_sentence(rejection, {"0xab": "attic"}) == expected_sentence
