"""What the payments package gets of the coordinator, and a coordinator without it."""

from pathlib import Path
from typing import get_args

import pytest

from coordinator.core.farm.kind import FARM
from coordinator.core.serving.kind import SERVING
from coordinator.core.training.job.events import PaymentEvent
from coordinator.core.training.job.state import Phase
from coordinator.core.work.funding import Funding
from coordinator.shell.app.payments_host import PaymentsHost, load_payments
from coordinator.shell.service.job_terms import NewJobTerms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger_terms import Domain, terms_of
from payments.core.ledger import FACT_KINDS
from tests.properties.statements import Work, node_key, signed_receipt
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    WholeShell,
    begin_job,
    connect_node,
    driving,
    finish_round,
    payments_of,
    prepared_job,
    services_in,
)

OWNER = Address("0x" + "c0" * 20)


def host_of(services: WholeShell) -> PaymentsHost:
    host = payments_of(services).host
    assert isinstance(host, PaymentsHost)
    return host


async def test_the_host_gives_the_durable_rows_of_every_job(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await begin_job(services)
        await finish_round(services, 0)
        host = host_of(services)
        assert host.jobs() == (JOB,)
        rows = host.rows(JOB, 0, 100)
    assert [row.sequence for row in rows] == list(range(len(rows)))
    assert rows[0].kind == "JobCreated"
    assert b'"kind":"JobCreated"' in rows[0].body
    assert host.rows(JOB, 2, 1) == rows[2:3]


async def test_a_change_of_funding_opens_the_round_that_waited_for_it(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        runtime = await prepared_job(services)
        host = host_of(services)
        assert await host.change_funding(JOB, 7, "the escrow pays for 7 samples") == ""
        assert runtime.job.funding == Funding(7, "the escrow pays for 7 samples")
        refusal = await host.change_funding(JobId("job-none"), 7, "")
    assert refusal == "there is no job job-none"


async def test_a_paid_job_waits_for_its_first_funding(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    async with driving(services):
        await begin_job(services, funding=services.job_terms.funding(Pay(unit_price=1)))
        waiting_job = services.jobs[JOB].job
        assert await host_of(services).change_funding(JOB, None, "") == ""
        funded_job = services.jobs[JOB].job
    assert "the escrow is not on the ledger yet" in waiting_job.reason
    assert (waiting_job.phase, funded_job.phase) == (Phase.WAITING, Phase.TRAINING)


async def test_receipts_reach_a_connected_node_with_the_jobs_terms_once(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    receipts = [signed_receipt(node_key(1), Work(round=each), sequence=each) for each in range(150)]
    async with driving(services):
        await prepared_job(services)
        host = host_of(services)
        assert not host.send_receipts(NODE, JOB, receipts)
        session = connect_node(services)
        assert host.send_receipts(NODE, JOB, receipts)
        sent_messages = [session.outbox.get_nowait() for _ in range(session.outbox.messages)]
    messages = [
        each.message.receipts
        for each in sent_messages
        if each and each.message.HasField("receipts")
    ]
    assert [len(message.receipts) for message in messages] == [100, 50]
    assert [message.HasField("terms") for message in messages] == [True, False]


async def test_a_node_that_reads_nothing_gets_no_receipts(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    session = connect_node(services)
    one = [signed_receipt(node_key(1), Work())]
    while not session.is_crowded:
        assert host_of(services).send_receipts(NODE, JOB, one)
    assert not host_of(services).send_receipts(NODE, JOB, one)
    assert not host_of(services).send_receipts(NodeId("0x" + "b2" * 20), JOB, one)


def test_without_payments_work_is_signed_for_no_chain_and_pays_nothing() -> None:
    job_terms = NewJobTerms(OWNER, None)
    assert job_terms.terms(JOB, Pay()) == terms_of(OWNER, JOB, Domain())
    assert job_terms.funding(Pay(unit_price=1)) is None
    with pytest.raises(HyperGPUError, match="no payments package") as failure:
        job_terms.terms(JOB, Pay(unit_price=1))
    assert failure.value.reason is Reason.MACHINE_UNFIT


def test_an_absent_package_is_no_payments(tmp_path: Path) -> None:
    assert load_payments(host_of(services_in(tmp_path)), "none-of-this-name") is None


def test_every_event_that_payments_fold_wakes_them() -> None:
    """One that does not is folded with the next that does, and a job may wait for it for ever."""
    unions = (PaymentEvent, FARM.paid_by, SERVING.paid_by)
    kinds = {kind for union in unions for kind in get_args(union)}
    assert {kind.__name__ for kind in kinds} == FACT_KINDS
