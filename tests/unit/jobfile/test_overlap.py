"""Rounds overlap where that was seen to train; everything else is refused with its fix."""

import pytest

from hypergpu.jobfile import JobFileError, parse_job, with_strategy

HEAD = 'workload = "digits-softmax"\n'
EAGER = '[round]\noverlap = "eager"\n[outer]\nmomentum = 0.5\n'
PLANNED = 'strategy = "aware"\n[aware]\nsparsest = "int4"\n'


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        parse_job(HEAD + text, source="job.toml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_dense_codecs_with_half_the_momentum_may_overlap(codec: str) -> None:
    spec = parse_job(f'{HEAD}{EAGER}[codec]\nup = "{codec}"\n')
    assert (spec.round.overlap, spec.codec.up) == ("eager", codec)


def test_planned_rounds_may_overlap_where_plans_stay_dense() -> None:
    assert parse_job(HEAD + PLANNED + EAGER).round.overlap == "eager"


@pytest.mark.parametrize("key", ["up", "down"])
def test_sparse_codecs_are_refused_both_ways(key: str) -> None:
    problems = problems_of(f'[round]\noverlap = "eager"\n[codec]\n{key} = "topk64"\n')
    assert (
        f'job.toml:5 [codec] {key}: rounds that overlap are dense, and this is "topk64".'
        ' Fix: set it to "int4", or remove overlap = "eager"'
    ) in problems


def test_plans_that_may_choose_sparse_codecs_are_refused() -> None:
    (problem,) = problems_of(f'strategy = "aware"\n{EAGER}')
    assert problem == (
        'job.toml [aware] sparsest: rounds that overlap are dense, and this is "topk64".'
        ' Fix: set it to "int4", or remove overlap = "eager"'
    )


def test_much_momentum_is_refused_also_where_it_is_the_default() -> None:
    (problem,) = problems_of('[round]\noverlap = "eager"\n')
    assert problem == (
        "job.toml [outer] momentum: rounds that overlap bear at most 0.5, not 0.9."
        ' Fix: set it to at most 0.5, or remove overlap = "eager"'
    )


@pytest.mark.parametrize("strategy", ["sync", "fedavg"])
def test_strategies_that_wait_for_everybody_do_not_overlap(strategy: str) -> None:
    text = f'strategy = "{strategy}"\n[round]\noverlap = "eager"\n'
    (problem,) = problems_of(text)
    assert problem == (
        f'job.toml:4 [round] overlap: strategy "{strategy}" has none here, not eager.'
        ' Fix: remove it, or choose strategy = "diloco"'
    )


def test_a_job_that_overlaps_can_be_compared_under_each_strategy() -> None:
    spec = parse_job(HEAD + EAGER)
    overlaps = {
        strategy: with_strategy(spec, strategy).round.overlap
        for strategy in ("sync", "fedavg", "diloco", "aware")
    }
    assert overlaps == {"sync": "none", "fedavg": "none", "diloco": "eager", "aware": "eager"}
    assert with_strategy(spec, "aware").aware.sparsest == "int4"
