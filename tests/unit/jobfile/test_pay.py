"""What accepted work earns, as a job file says it."""

import pytest

from hypergpu.jobfile import JobFileError, covering, parse_job, with_parameters
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.statements.domain import AMOUNT_MOST

HEAD = 'workload = "digits-softmax"\n[training]\nrounds = 4\ninner_steps = 5\nbatch_size = 10\n'


def only_problem_of(text: str) -> str:
    with pytest.raises(JobFileError) as caught:
        parse_job(text, source="job.toml")
    (problem,) = caught.value.problems
    return str(problem)


def test_the_escrow_is_what_the_stated_work_costs_at_most() -> None:
    spec = parse_job(f"{HEAD}nodes = 3\n[pay]\nunit_price = 7\n")
    assert spec.stated_samples == 600
    assert spec.escrow == 42


def test_the_escrow_covers_every_node_that_is_there_as_the_job_is_made() -> None:
    spec = parse_job(f"{HEAD}nodes = 3\n[pay]\nunit_price = 7\n")
    assert [covering(spec, nodes).escrow for nodes in (0, 3, 4, 6)] == [42, 42, 56, 84]
    named = parse_job(f"{HEAD}[pay]\nunit_price = 7\nescrow = 60\n")
    assert covering(named, 6) == named
    # A plan divides the same work among more nodes.
    planned = parse_job(f'strategy = "aware"\n{HEAD}[pay]\nunit_price = 7\n')
    assert covering(planned, 6) == planned
    assert covering(parse_job(HEAD), 6).escrow == 0


def test_a_part_of_a_unit_counts_as_one_in_what_work_may_cost() -> None:
    assert [Pay(unit_price=7).most_for(samples) for samples in (0, 1, 14, 15, 100)] == [
        0,
        1,
        1,
        2,
        7,
    ]


@pytest.mark.parametrize("key", ["escrow = 5", "judged = 2"])
def test_pay_settings_without_a_price_are_refused(key: str) -> None:
    name = key.split(maxsplit=1)[0]
    assert only_problem_of(f"{HEAD}[pay]\n{key}\n") == (
        f"job.toml:7 [pay] {name}: {name} does nothing where nothing is paid."
        f" Fix: set unit_price in [pay], or remove {name}"
    )


def test_an_escrow_below_the_first_round_is_refused() -> None:
    assert only_problem_of(f"{HEAD}[pay]\nunit_price = 1000\nescrow = 499\n") == (
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

    samples = 640_000_000 if strategy == "diloco" else 800_000_000
    most = AMOUNT_MOST * 100 // samples
    assert parse_job(job_text(most)).escrow <= AMOUNT_MOST
    assert only_problem_of(job_text(most + 1)) == (
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
