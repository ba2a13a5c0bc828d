"""A strategy fixes settings: a file may leave them out or repeat them, and nothing else."""

import pytest

from hypergpu.jobfile import JobFileError, checked_spec, parse_job, with_parameters, with_strategy
from hypergpu.jobfile.spec import STRATEGIES
from hypergpu.workloads.entry import has_reached

HEAD = 'workload = "digits-softmax"\n'


def only_problem_of(text: str) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(HEAD + text, source="job.toml")
    assert len(caught.value.problems) == 1, caught.value.problems
    return str(caught.value.problems[0])


def test_sync_exchanges_everything_whole_after_every_inner_step() -> None:
    spec = parse_job(f'{HEAD}strategy = "sync"\n')
    assert spec.training.inner_steps == 1
    assert (spec.codec.up, spec.codec.down) == ("fp32", "fp32")
    assert (spec.outer.learning_rate, spec.outer.momentum) == (1.0, 0.0)
    assert spec.round.deadline_ms == 0


def test_what_a_strategy_fixes_may_be_repeated() -> None:
    text = 'strategy = "sync"\n[training]\ninner_steps = 1\n[codec]\nup = "fp32"\n'
    assert parse_job(HEAD + text) == parse_job(f'{HEAD}strategy = "sync"\n')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'strategy = "sync"\n[training]\ninner_steps = 5\n',
            (
                'job.toml:4 [training] inner_steps: strategy "sync" has 1 here, not 5.'
                ' Fix: remove it, or choose strategy = "diloco"'
            ),
        ),
        (
            'strategy = "fedavg"\n[codec]\nup = "int8"\n',
            (
                'job.toml:4 [codec] up: strategy "fedavg" has fp32 here, not int8.'
                ' Fix: remove it, or choose strategy = "diloco"'
            ),
        ),
        (
            'strategy = "aware"\n[round]\ndeadline = "60s"\n',
            (
                'job.toml:3 [round] deadline_ms: strategy "aware" plans the deadline of each round;'
                ' 60000 ms contradicts it. Fix: remove it, or choose strategy = "diloco"'
            ),
        ),
        (
            'strategy = "aware"\n[codec]\ndown = "int4"\n',
            (
                'job.toml:4 [codec] down: down does nothing with strategy "aware", which plans it'
                " for each node. Fix: remove down; the lightest codec allowed is sparsest in"
                " [aware]"
            ),
        ),
        (
            'strategy = "aware"\n[round]\nconnections = 4\n',
            (
                'job.toml:4 [round] connections: connections does nothing with strategy "aware",'
                " which plans it for each node. Fix: remove connections"
            ),
        ),
        (
            "[aware]\nutilisation = 0.85\n",
            (
                'job.toml:2 aware: it does nothing with strategy "diloco".'
                ' Fix: set strategy = "aware" on top, or remove [aware]'
            ),
        ),
        (
            'strategy = "sync"\n[round]\nquorum = 0.5\n',
            "job.toml:4 [round] quorum: quorum does nothing without a deadline. Fix: remove quorum",
        ),
        (
            'strategy = "awar"\n',
            'job.toml:2 strategy: "awar" is unknown. Fix: did you mean "aware"?',
        ),
        (
            'strategy = "aware"\n[aware]\nsparsest = "int8"\n',
            'job.toml:4 [aware] sparsest: "int8" is unknown. Fix: did you mean "int4"?',
        ),
        (
            "[evaluation]\ntarget = 97\n",
            (
                "job.toml:3 [evaluation] target: an accuracy is never above 1, so 97 is never"
                " reached. Fix: write 0.97 for 97 %"
            ),
        ),
    ],
)
def test_a_contradiction_says_where_it_is_and_how_to_mend_it(text: str, expected: str) -> None:
    assert only_problem_of(text) == expected


def test_outer_settings_beside_a_sparse_codec_are_refused() -> None:
    assert only_problem_of('[codec]\nup = "topk64"\n[outer]\nmomentum = 0.5\n') == (
        "job.toml:5 [outer] momentum: the sparse codec topk64 takes plain outer steps: momentum"
        " does nothing. Fix: remove momentum, or use a dense codec"
    )


def test_aware_takes_a_quorum_without_a_deadline_of_the_file() -> None:
    assert parse_job(f'{HEAD}strategy = "aware"\n[round]\nquorum = 0.5\n').round.quorum == 0.5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_job_can_be_put_under_any_strategy(strategy: str) -> None:
    spec = parse_job(f'{HEAD}[round]\ndeadline = "60s"\n[codec]\nup = "int8"\n')
    assert checked_spec(with_strategy(spec, strategy)).strategy == strategy


def test_a_change_of_a_running_job_cannot_contradict_its_strategy() -> None:
    spec = parse_job(f'{HEAD}strategy = "sync"\n')
    with pytest.raises(JobFileError, match='strategy "sync" has 1 here, not 3'):
        with_parameters(spec, {"inner_steps": "3"})


def test_a_target_is_reached_from_the_side_that_its_metric_comes_from() -> None:
    assert has_reached(0.9, 0.91, name="accuracy")
    assert not has_reached(0.9, 0.89, name="accuracy")
    assert has_reached(20.0, 19.0, name="perplexity")
    assert not has_reached(20.0, 21.0, name="perplexity")
    assert not has_reached(0.0, 0.0, name="accuracy")
