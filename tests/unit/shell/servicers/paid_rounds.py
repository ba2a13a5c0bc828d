"""A job that pays, with one node, in a coordinator that runs nowhere: round by round."""

from coordinator.core.job.events import (
    AggregateReady,
    JobCreated,
    JobStopped,
    ModelInitialised,
    NodeJoined,
    UpdateReceived,
    UpdatesJudged,
)
from coordinator.core.job.state import AcceptedUpdate, Funding, Model
from coordinator.shell.runtime.services import Services
from hypergpu.digest import digest_of
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes, Milliseconds, Samples
from tests.unit.shell.whole_shell import JOB, NODE

NOW = Milliseconds(0)
PAYS = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=5, inner_steps=1, batch_size=100, nodes=1),
    pay=Pay(unit_price=1_000_000, escrow=10**12, rounds_per_epoch=5, judged=1),
)


def model(rounds: int) -> Model:
    return Model(rounds, BlobRef(digest_of(b"model %d" % rounds), Bytes(8)))


async def finish_round(services: Services, number: int) -> None:
    """An update comes in and is folded; what a judge finds of it is still to come."""
    round_ = services.driver.runtimes[JOB].job.round
    assert round_ is not None
    update = AcceptedUpdate(
        BlobRef(digest_of(b"%d" % number), Bytes(4)),
        samples=Samples(0),
        inner_steps=0,
        nonce=1 + number,
        signature=bytes(65),
    )
    lease = round_.participants[NODE].lease
    for event in (
        UpdateReceived(at_ms=NOW, node=NODE, round=number, lease=lease, update=update),
        AggregateReady(at_ms=NOW, round=number, model=model(number + 1), agreements={NODE: 0.5}),
    ):
        assert await services.driver.submit(JOB, event) == ""


async def judge_round(services: Services, number: int) -> None:
    """The judge answers: the round is measured."""
    event = UpdatesJudged(at_ms=NOW, round=number, base_loss=1.0, made_loss=0.5, losses={NODE: 0.5})
    assert await services.driver.submit(JOB, event) == ""


async def begin_job(services: Services, funding: Funding | None = None) -> None:
    """A job in round 0."""
    terms = services.job_terms.terms(JOB, PAYS.pay)
    created = JobCreated(at_ms=NOW, job_id=JOB, spec=PAYS, terms=terms, funding=funding)
    first = ModelInitialised(at_ms=NOW, model=model(0), partition_sizes=(Samples(1000),))
    for event in (created, first, NodeJoined(at_ms=NOW, node=NODE)):
        assert await services.driver.submit(JOB, event) == ""


async def stop_before_judgement(services: Services) -> None:
    """A job of two rounds whose second is not measured."""
    await begin_job(services)
    await finish_round(services, 0)
    await judge_round(services, 0)
    await finish_round(services, 1)
    assert await services.driver.submit(JOB, JobStopped(at_ms=NOW)) == ""
