"""What strategies, overlap and pay allow in a job file; all else is refused with its fix."""

import pytest

from hypergpu.jobfile.reading import parse_job, with_parameters
from hypergpu.jobfile.rules import checked_spec, covering, with_strategy
from hypergpu.jobfile.spec import (
    STRATEGIES,
    Aware,
    JobSpec,
    OuterSettings,
    Pay,
    RoundRule,
    TrainingSettings,
)
from hypergpu.jobfile.toml import JobFileError
from hypergpu.ledger_terms import AMOUNT_MOST
from hypergpu.workloads.metrics import has_reached

HEAD = 'workload = "digits-softmax"\n'


def only_problem_of(text: str) -> str:
    with pytest.raises(JobFileError) as failure:
        parse_job(HEAD + text, source="job.toml")
    assert len(failure.value.problems) == 1, failure.value.problems
    return str(failure.value.problems[0])


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
            'strategy = "diloco"\n[aware]\nutilisation = 0.85\n',
            (
                'job.toml:3 aware: it does nothing with strategy "diloco".'
                ' Fix: set strategy = "aware" on top, or remove [aware]'
            ),
        ),
        (
            'strategy = "awar"\n',
            'job.toml:2 strategy: "awar" is unknown. Fix: did you mean "aware"?',
        ),
        (
            '[aware]\nstated_keys = ["round.quorum"]\n',
            (
                'job.toml:3 [aware] stated_keys: "round.quorum" is no key that a plan decides.'
                " Fix: remove stated_keys, and state the keys"
            ),
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_takes_a_quorum_without_a_deadline_of_the_file(strategy: str) -> None:
    text = f'{HEAD}strategy = "{strategy}"\n[round]\nquorum = 0.5\n'
    assert parse_job(text).round.quorum == 0.5


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


EAGER = '[round]\noverlap = "eager"\n[outer]\nmomentum = 0.5\n'
PLANNED = 'strategy = "aware"\n[aware]\nsparsest = "int4"\n'


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobFileError) as failure:
        parse_job(HEAD + text, source="job.toml")
    return [str(problem) for problem in failure.value.problems]


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


def test_plans_of_rounds_that_overlap_are_dense_unless_a_sparse_codec_is_stated() -> None:
    assert parse_job(HEAD + EAGER).aware.sparsest == "int4"
    assert parse_job(f'{HEAD}strategy = "aware"\n{EAGER}').aware.sparsest == "int4"
    (problem,) = problems_of(f'{EAGER}[aware]\nsparsest = "topk64"\n')
    assert problem == (
        'job.toml:7 [aware] sparsest: rounds that overlap are dense, and this is "topk64".'
        ' Fix: set it to "int4", or remove overlap = "eager"'
    )


def test_much_momentum_is_refused_also_where_it_goes_with_a_stated_learning_rate() -> None:
    assert parse_job(f'{HEAD}[round]\noverlap = "eager"\n').outer == OuterSettings()
    (problem,) = problems_of('[round]\noverlap = "eager"\n[outer]\nlearning_rate = 0.7\n')
    assert problem == (
        "job.toml:4 [outer] momentum: rounds that overlap bear at most 0.5, not 0.9."
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
    fixed_job = with_strategy(spec, "diloco")
    assert with_strategy(fixed_job, "aware").aware.sparsest == "int4"


def test_plans_take_what_a_file_states_and_decide_the_rest() -> None:
    spec = parse_job(f'{HEAD}[codec]\nup = "int8"\n[round]\nconnections = 1\ndeadline = "60s"\n')
    assert spec.strategy == "aware"
    assert spec.aware.stated_keys == ("codec.up", "round.connections")
    assert spec.round.deadline_ms == 60_000
    assert parse_job(HEAD).aware.stated_keys == ()
    assert parse_job(f'{HEAD}strategy = "diloco"\n[codec]\nup = "int8"\n').aware == Aware()


def test_steps_that_were_fixed_say_nothing_of_plans() -> None:
    fixed_job = parse_job(
        f'{HEAD}strategy = "diloco"\n[codec]\nup = "int8"\n[round]\ndeadline = "60s"\n'
    )
    planned_job = with_strategy(fixed_job, "aware")
    assert (planned_job.aware, planned_job.round.deadline_ms) == (Aware(), 0)
    stated_job = parse_job(f'{HEAD}[codec]\nup = "int8"\n[round]\ndeadline = "60s"\n')
    assert with_strategy(stated_job, "aware") == stated_job
    assert with_strategy(stated_job, "diloco") == fixed_job


def test_the_deadline_of_a_planned_job_changes_while_it_runs() -> None:
    assert with_parameters(parse_job(HEAD), {"deadline": '"60s"'}).round.deadline_ms == 60_000


PAY_HEAD = 'workload = "digits-softmax"\n[training]\nrounds = 4\ninner_steps = 5\nbatch_size = 10\n'


def only_problem_of_pay(text: str) -> str:
    with pytest.raises(JobFileError) as failure:
        parse_job(text, source="job.toml")
    (problem,) = failure.value.problems
    return str(problem)


def test_the_escrow_is_what_the_stated_work_costs_at_most() -> None:
    text = f"{PAY_HEAD}nodes = 3\n[pay]\nunit_price = 7\n"
    fixed_job, planned_job = parse_job(f'strategy = "diloco"\n{text}'), parse_job(text)
    assert (fixed_job.stated_samples, planned_job.stated_samples) == (600, 600)
    # The last planned round may exceed what is left by a quarter of all.
    assert (fixed_job.escrow, planned_job.escrow) == (42, 53)


def test_the_escrow_covers_every_node_that_is_there_as_the_job_is_made() -> None:
    head = f'strategy = "diloco"\n{PAY_HEAD}'
    spec = parse_job(f"{head}nodes = 3\n[pay]\nunit_price = 7\n")
    assert [covering(spec, nodes).escrow for nodes in (0, 3, 4, 6)] == [42, 42, 56, 84]
    named_job = parse_job(f"{head}[pay]\nunit_price = 7\nescrow = 60\n")
    assert covering(named_job, 6) == named_job
    limited_job = parse_job(f"{head}nodes = 3\n[pay]\nunit_price = 7\n[nodes]\nmax = 4\n")
    assert covering(limited_job, 6).escrow == 56
    # A plan divides the same work among more nodes.
    planned_job = parse_job(f'strategy = "aware"\n{PAY_HEAD}[pay]\nunit_price = 7\n')
    assert covering(planned_job, 6) == planned_job
    assert covering(parse_job(PAY_HEAD), 6).escrow == 0


def test_a_part_of_a_unit_counts_as_one_in_what_work_may_cost() -> None:
    assert [Pay(unit_price=7).most_for(samples) for samples in (0, 1, 14, 15, 100)] == [
        0,
        1,
        1,
        2,
        7,
    ]


def test_an_escrow_without_a_price_is_refused() -> None:
    assert only_problem_of_pay(f"{PAY_HEAD}[pay]\nescrow = 5\n") == (
        "job.toml:7 [pay] escrow: escrow does nothing where nothing is paid."
        " Fix: set unit_price in [pay], or remove escrow"
    )


def test_updates_are_weighed_by_default_and_counted_in_full_where_a_job_says_so() -> None:
    assert parse_job(PAY_HEAD).trust.rule == "robust"
    assert parse_job(f'{PAY_HEAD}[trust]\nrule = "mean"\n').trust.rule == "mean"


def test_an_unknown_rule_of_trust_is_refused() -> None:
    problem = only_problem_of_pay(f'{PAY_HEAD}[trust]\nrule = "blind"\n')
    assert problem.startswith("job.toml:7 [trust] rule: ")
    assert "robust" in problem


def test_an_escrow_below_the_first_round_is_refused() -> None:
    assert only_problem_of_pay(f"{PAY_HEAD}[pay]\nunit_price = 1000\nescrow = 499\n") == (
        "job.toml:8 [pay] escrow: 499 does not cover the first round, which may cost 500."
        " Fix: set at least 500, or 0 for what the whole job may cost; or lower unit_price"
    )


@pytest.mark.parametrize("strategy", ["diloco", "aware"])
def test_a_job_that_may_cost_more_than_an_escrow_holds_is_refused_with_the_price_that_fits(
    strategy: str,
) -> None:
    def job_text(price: int, escrow: int = 0) -> str:
        rounds = "rounds = 1000000\ninner_steps = 20\n"
        head = f'workload = "digits-softmax"\nstrategy = "{strategy}"\n[training]\n{rounds}'
        return f"{head}[pay]\nunit_price = {price}\nescrow = {escrow}\n"

    samples = 640_000_000
    most = AMOUNT_MOST * 100 // samples
    assert parse_job(job_text(most)).escrow <= AMOUNT_MOST
    assert only_problem_of_pay(job_text(most + 1)) == (
        f"job.toml:7 [pay] unit_price: the whole job may cost {-(-(most + 1) * samples // 100)},"
        f" and the ledger holds an escrow of at most {AMOUNT_MOST}."
        f" Fix: set unit_price to at most {most}; or fewer rounds; or name an escrow in [pay]"
    )
    assert parse_job(job_text(most + 1, 10**27)).escrow == 10**27


def test_a_running_job_takes_no_more_rounds_than_an_escrow_can_pay_for() -> None:
    training = TrainingSettings(rounds=100, inner_steps=1_000, batch_size=100)
    spec = JobSpec(workload="digits-softmax", training=training, pay=Pay(unit_price=10**24))
    with pytest.raises(JobFileError, match=f"an escrow of at most {AMOUNT_MOST}"):
        with_parameters(spec, {"training.rounds": "100000"})


@pytest.mark.parametrize(
    ("share", "updates", "needed"),
    [(0.6, 5, 3), (0.6, 6, 4), (0.55, 20, 11), (1.0, 7, 7), (0.01, 3, 1), (0.6, 0, 1)],
)
def test_a_quorum_is_a_share_of_whole_updates(share: float, updates: int, needed: int) -> None:
    assert RoundRule(quorum=share).updates_needed(updates) == needed
