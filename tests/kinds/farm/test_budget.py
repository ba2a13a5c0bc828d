"""A budget is raised while its job runs: by its owner alone, and signed where the order was."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.farm.events import BudgetRaised
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.state import FarmJob, FarmPhase
from coordinator.core.work.work_events import FundingChanged, JobPaused
from coordinator.shell.kinds.farm.budget_raise import raised_budget
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError
from hypergpu.farm.map_request import MAP_KIND, MapRequest
from hypergpu.farm.spec_keys import read_spec
from hypergpu.farm.work_spec import work_spec
from hypergpu.ids import JobId
from hypergpu.journal.farm_events import BudgetRaisedEvent, FarmPay, MapCreatedEvent
from hypergpu.packed_work import unpack_work
from hypergpu.units import Milliseconds, Wei
from hypergpu.user.client import Coordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.client.spec_keys import OwnKey, fresh_key, keep_key, key_path
from hypergpu.v1 import job_pb2
from hypergpu.wire.credentials import Role, parse_token
from hypergpu.wire.work import work_value
from payments.core.ledger import NO_DIGEST, fold
from tests.kinds.farm.requests import farm_request
from tests.kinds.farm.stepped_farm import ANN, BEN, Farm
from tests.kinds.farm.walk import created_job, join_event
from tests.node_client import NOBODY_LOST
from tests.processes import Cluster

_NOW = Milliseconds(0)
PRICED = {"unit_price": Wei(1_000), "budget": Wei(3_000)}


def spent_farm() -> Farm:
    """A job that has paused, as its budget is spent."""
    farm = Farm(1_000, ANN, BEN, checked_permille=0, **PRICED)
    for node in itertools.cycle((ANN, BEN)):
        if not farm.is_in(FarmPhase.WORKING):
            return farm
        if node in farm.job.leases:
            farm.return_result(node)
    raise AssertionError


def raise_of(budget: int) -> BudgetRaised:
    """A raise that is not signed."""
    return BudgetRaised(at_ms=_NOW, budget=Wei(budget))


def test_a_job_that_spent_its_budget_goes_on_once_it_is_raised() -> None:
    farm = spent_farm()
    farm.happen(raise_of(6_000))
    assert farm.is_in(FarmPhase.WORKING)
    assert farm.job.leases
    assert farm.job.request.budget == 6_000


def test_a_job_that_its_user_paused_stays_so() -> None:
    farm = Farm(1_000, ANN, **PRICED)
    farm.happen(JobPaused(at_ms=_NOW))
    farm.happen(raise_of(6_000))
    assert farm.is_in(FarmPhase.PAUSED)


def test_an_escrow_that_covers_less_still_bounds_the_job() -> None:
    farm = spent_farm()
    farm.happen(FundingChanged(at_ms=_NOW, funded_units=300))
    farm.happen(raise_of(6_000))
    assert not farm.job.leases
    assert farm.job.reason.startswith("waits for money: its escrow covers 300 items")
    farm.happen(FundingChanged(at_ms=_NOW, funded_units=600))
    assert farm.job.leases


@pytest.mark.parametrize(
    ("budget", "price", "reason"),
    [
        (3_000, 1_000, "is 3000, and can only be raised"),
        (2_000, 1_000, "is 3000, and can only be raised"),
        (9_000, 0, "has no price, and so no budget"),
    ],
)
def test_a_budget_that_is_no_more_is_refused(budget: int, price: int, reason: str) -> None:
    first = created_job(10, unit_price=Wei(price), budget=Wei(3_000))
    job = FARM.transition(None, first).job
    assert reason in FARM.rejection(job, raise_of(budget))
    assert FARM.transition(job, raise_of(budget)).job is job


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"budget": "9000", "seed": "1"}, "the budget alone can be changed, not seed"),
        ({}, "the budget alone can be changed, not nothing"),
        ({"budget": "1.5"}, "the budget 1.5 is no whole number"),
        ({"budget": '"much"'}, "is no whole number"),
        ({"budget": "-1"}, "unit_price and budget"),
    ],
)
def test_other_settings_and_amounts_are_refused(parameters: dict[str, str], text: str) -> None:
    with pytest.raises(HyperGPUError, match=text):
        raised_budget(Farm(10, **PRICED).job, parameters, None, 0)


def test_payments_set_as_much_aside_as_is_stated_now() -> None:
    pay = FarmPay(
        unit_price=Wei(1_000),
        budget=Wei(3_000),
        bundles_per_epoch=1,
        request=NO_DIGEST,
        manifest=NO_DIGEST,
    )
    state = fold(None, MapCreatedEvent(JobId("job-f"), "checksum", 10, "items", pay=pay)).state
    assert state.escrow == 3_000
    assert fold(state, BudgetRaisedEvent(Wei(9_000))).state.escrow == 9_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("budgets"), *NOBODY_LOST) as cluster:
        yield cluster


def signed_job(own_key: OwnKey) -> tuple[FarmJob, MapRequest]:
    """A job with a price whose order is signed, at which a node works."""
    first = created_job(1_000, unit_price=Wei(1_000), budget=Wei(3_000))
    signed_spec = own_key.sign(first.request, first.owner)
    job = FARM.transition(None, replace(first, spec=signed_spec)).job
    return FARM.transition(job, join_event(ANN)).job, first.request


def test_a_signed_order_is_signed_again_with_the_new_budget() -> None:
    own_key = fresh_key()
    job, request = signed_job(own_key)
    assert job.spec is not None
    order = own_key.successor().with_budget(job.spec, Wei(9_000))
    event = raised_budget(job, {"budget": "9000"}, order, unix_s())
    assert "is signed" in FARM.rejection(job, replace(event, spec=None))
    assert not FARM.rejection(job, event)
    job = FARM.transition(job, event).job
    (pending_work,) = FARM.pending(job, ANN)
    sent_spec = read_spec(pending_work.command.assignment.spec)
    assert sent_spec == work_spec(
        replace(request, budget=Wei(9_000)), job.owner, sent_spec.ends_at_s
    )
    with pytest.raises(HyperGPUError, match="another budget than the request"):
        raised_budget(job, {"budget": "10000"}, order, unix_s())
    with pytest.raises(HyperGPUError, match="was signed by another key"):
        fresh_key().with_budget(order, Wei(10_000))


def test_its_owner_alone_raises_a_budget_with_the_key_that_signed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a chain no job has a price: what is asked is refused at the very end.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with user_of(cluster) as user, user_of(cluster) as other:
        own_key = fresh_key()
        user.register_spec_key(own_key)
        keep_key(user.token_id, own_key)
        request = wait_for(farm_request(user.asynchronous, ["one", "two"]))
        job_id = user.create_map(unpack_work(work_value(request.work), MAP_KIND, MapRequest))
        with pytest.raises(HyperGPUError, match="has no price, and so no budget"):
            user.raise_budget(job_id, 9_000)
        with pytest.raises(HyperGPUError, match="belongs to token"):
            other.raise_budget(job_id, 9_000)
        assert details(user, job_id).HasField("signed_spec")
        assert not details(other, job_id).HasField("signed_spec")
        key_path(user.token_id).unlink()
        with pytest.raises(HyperGPUError, match=r"is signed, and .* is not there"):
            user.raise_budget(job_id, 9_000)
        user.stop(job_id)


@contextmanager
def user_of(cluster: Cluster) -> Iterator[Coordinator]:
    """A user with a token of its own."""
    with cluster.client() as operator:
        token = parse_token(operator.create_token(Role.USER, ttl_s=600, label="user").token)
    with Coordinator(ConnectionTarget(cluster.coordinator.address, token, 60.0)) as coordinator:
        yield coordinator


def details(user: Coordinator, job_id: str) -> job_pb2.GetJobResponse:
    """The job as its coordinator answers."""
    calls = user.asynchronous
    answer = wait_for(calls._call(calls._jobs.GetJob, job_pb2.GetJobRequest(job_id=job_id)))
    assert isinstance(answer, job_pb2.GetJobResponse)
    return answer
