"""Changes of a running job obey the rules of a job file."""

import pytest

from hypergpu.jobfile import JobFileError, parameter_words, parse_job, with_parameters
from hypergpu.jobfile.spec import SETTABLE

SPEC = parse_job('workload = "digits-softmax"\n[training]\nrounds = 10\n')


def problem_of(changes: dict[str, str]) -> str:
    with pytest.raises(JobFileError) as caught:
        with_parameters(SPEC, changes)
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


def test_short_names_become_dotted_keys_with_json_values() -> None:
    assert parameter_words(["lr=0.001", "deadline=60s", "outer.momentum = 0.8"]) == {
        "inner.learning_rate": "0.001",
        "round.deadline": '"60s"',
        "outer.momentum": "0.8",
    }


@pytest.mark.parametrize("word", ["lr", "lr=", "=1", ""])
def test_word_without_key_or_value_is_refused(word: str) -> None:
    with pytest.raises(JobFileError, match="not KEY=VALUE"):
        parameter_words([word])


def test_a_word_that_is_nested_without_end_is_text() -> None:
    deep = "[" * 100_000
    assert parameter_words([f"name={deep}"]) == {"name": f'"{deep}"'}


def test_a_word_that_is_no_text_is_refused_as_a_value() -> None:
    words = parameter_words(["lr=\udcff"])
    assert words == {"inner.learning_rate": '"\\udcff"'}
    assert "is not the JSON of a value" in problem_of(words)


def test_changes_reach_the_spec_and_nothing_else_moves() -> None:
    changed = with_parameters(SPEC, {"lr": "0.5", "round.deadline": '"90s"', "rounds": "12"})
    assert changed.inner.learning_rate == 0.5
    assert changed.round.deadline_ms == 90_000
    assert changed.training.rounds == 12
    assert changed.outer == SPEC.outer


@pytest.mark.parametrize("key", SETTABLE)
def test_every_settable_key_can_be_set_to_what_it_is(key: str) -> None:
    table, _, name = key.partition(".")
    value = getattr(getattr(SPEC, table), name)
    assert with_parameters(SPEC, {key: str(value)}) == SPEC


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("codec.up", '"int8"', "codec.up: it is fixed once the job exists. Fix: submit a new job"),
        ("inner.learning_rat", "1", "there is no such parameter. Fix: did you mean inner.learning"),
        ("zzz", "1", "Fix: a running job takes training.rounds"),
        ("lr", "0", "inner.learning_rate: 0.0 is outside (0, 100]"),
        ("lr", '"a"', "give a number, for example 0.001"),
        ("lr", "{", "is not the JSON of a value"),
        ("lr", "[" * 100_000, "is not the JSON of a value"),
        ("lr", '{"a":' * 100_000, "is not the JSON of a value"),
        ("deadline", "60", 'say the unit, for example "60s"'),
        ("quorum", "2", "round.quorum: 2.0 is outside (0, 1]"),
    ],
)
def test_bad_change_is_refused_with_its_fix(key: str, value: str, expected: str) -> None:
    assert expected in problem_of({key: value})


def test_all_bad_changes_are_said_at_once() -> None:
    with pytest.raises(JobFileError) as caught:
        with_parameters(SPEC, {"lr": "0", "codec.up": '"int8"', "zzz": "1"})
    assert len(caught.value.problems) == 3
