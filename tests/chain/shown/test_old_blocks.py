"""Histories on chains with far more blocks than a job has: what reading one takes, and of whom."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from hypergpu.chain.reading.history import JobReader
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import LOGS, HttpRpc, Pace
from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobKey
from hypergpu.ledger.audit.facts import JobFact
from tests.chain.ground import JOB, Ground, hand_made
from tests.chain.misbehaving_rpc import Answer, MisbehavingRpc, misbehaving, with_results

WHOLE = Pace(log_blocks_max=10**6)
"""Everything in one range."""
NARROW = Pace(batch_max=5, log_blocks_max=20)
OLD = 2_000
AT_ONCE = 250


class History:
    """A job that has been paid, behind many blocks, through an RPC that a test scripts."""

    def __init__(self, ground: Ground, rpc: MisbehavingRpc) -> None:
        self.ground = ground
        self.rpc = rpc
        self.job = ground.settler.site.job_key(JOB)

    def reader(self, pace: Pace, job: JobKey | None = None) -> JobReader:
        chain = EvmChain(HttpRpc(HttpTransport(self.rpc.url), pace))
        return JobReader(chain, self.ground.settler.site.domain, job or self.job)

    def fact(self, pace: Pace, at: Block | None = None) -> JobFact:
        return self.reader(pace).fact(at)

    @property
    def logs_asked(self) -> int:
        return sum(methods.count(LOGS) for methods in self.rpc.asked)


def empty(ground: Ground, blocks: int) -> None:
    """Make empty blocks, a second apart."""
    ground.ask("anvil_setBlockTimestampInterval", 1)
    for _ in range(0, blocks, AT_ONCE):
        ground.ask("anvil_mine", hex(AT_ONCE))
    ground.ask("anvil_setBlockTimestampInterval", 0)


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Far more blocks before the job than it has, and many between its epochs."""
    with hand_made(tmp_path_factory.mktemp("aged")) as ground:
        empty(ground, OLD)
        ground.opened()
        for epoch in (0, 1):
            empty(ground, AT_ONCE)
            ground.earn(epoch, range(epoch, epoch + 1))
            ground.end(epoch, is_last=epoch == 1)
            ground.rest()
        ground.settle()
        yield ground


@pytest.fixture
def old(aged: Ground) -> Iterator[History]:
    with misbehaving(aged.url) as rpc:
        yield History(aged, rpc)


def ranges(calls: list[dict[str, Any]]) -> list[range]:
    asked = [call["params"][0] for call in calls if call["method"] == LOGS]
    return [range(int(one["fromBlock"], 16), int(one["toBlock"], 16) + 1) for one in asked]


def test_a_jobs_age_makes_the_cost_and_the_chains_height_does_not(old: History) -> None:
    whole = old.fact(WHOLE)
    assert [batch.epoch for batch in whole.batches] == [0, 1]
    assert len(whole.epochs) == 2
    assert len(whole.accounts) == 4
    old.rpc.asked.clear()
    assert old.fact(NARROW) == whole
    height = old.ground.chain.head().number
    age = height - OLD
    assert height > 3 * age
    assert age // 20 <= old.logs_asked <= age // 20 + 2
    # Beside those, of which five are a request: where to begin, the head twice, and its answers.
    assert len(old.rpc.asked) <= old.logs_asked // 5 + 25


def test_a_young_job_takes_one_range(ground: Ground) -> None:
    empty(ground, AT_ONCE)
    ground.opened()
    with misbehaving(ground.url) as rpc:
        history = History(ground, rpc)
        assert history.fact(NARROW).deposited > 0
        assert history.logs_asked == 1
        # And one to find that it is enough, the head twice, and its answers.
        assert len(rpc.asked) <= 9


@pytest.mark.parametrize("most", [7, 1])
def test_an_rpc_that_gives_fewer_blocks_is_asked_for_fewer(old: History, most: int) -> None:
    def refuses(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        if all(len(each) <= most for each in ranges(calls)):
            return None
        error = {"code": -32602, "message": f"range exceeds limit of {most}"}
        answers = json.loads(truth)
        for answer, each in zip(answers, ranges(calls), strict=True):
            if len(each) > most:
                del answer["result"]
                answer["error"] = error
        return Answer(json.dumps(answers).encode())

    whole = old.fact(WHOLE)
    old.rpc.script = refuses
    assert old.fact(NARROW) == whole


def test_each_block_is_read_once_for_then_and_now(old: History) -> None:
    seen: list[range] = []
    old.rpc.script = lambda calls, _truth: seen.extend(ranges(calls))
    (then,) = old.ground.chain.blocks([old.ground.chain.head().number - 200])
    assert then is not None
    reader = old.reader(NARROW)
    first, second = reader.fact(then), reader.fact()
    assert (first.block, len(first.batches), len(second.batches)) == (then.number, 1, 2)
    numbers = [number for each in seen for number in each]
    assert sorted(set(numbers)) == numbers
    old.rpc.script = lambda _calls, _truth: None
    assert first == old.fact(WHOLE, then)
    assert second == old.fact(WHOLE)


def test_what_happens_while_it_is_read_belongs_to_it(old: History) -> None:
    def goes_on(calls: list[dict[str, Any]], _truth: bytes) -> Answer | None:
        if calls[0]["method"] == LOGS:
            old.rpc.script = lambda _calls, _truth: None
            old.ground.mine(150)
        return None

    before = old.ground.chain.head().number
    old.rpc.script = goes_on
    fact = old.fact(NARROW)
    assert fact.block == before + 150
    assert fact == old.fact(WHOLE)


def test_an_unknown_job_is_refused_before_anything_is_read(old: History) -> None:
    with pytest.raises(HyperGPUError) as refused:
        old.reader(NARROW, JobKey("ab" * 32)).fact()
    assert refused.value.reason is Reason.JOB_UNKNOWN
    assert old.logs_asked == 0


def test_an_rpc_that_hides_the_opening_is_not_believed(old: History) -> None:
    old.rpc.script = lambda calls, truth: (
        with_results(truth, lambda _logs: []) if calls[0]["method"] == LOGS else None
    )
    with pytest.raises(RpcGarbledError, match="no block with the opening of the job"):
        old.fact(NARROW)
    assert old.logs_asked < 100


def test_a_batch_whose_block_is_forgotten_is_no_silence_since_the_opening(old: History) -> None:
    whole = old.fact(WHOLE)
    block = hex(whole.batches[-1].block)

    def forgets(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        asked = [(call["method"], call["params"][0]) for call in calls if call["params"]]
        is_asked = ("eth_getBlockByNumber", block) in asked
        return with_results(truth, lambda _block: None) if is_asked else None

    old.rpc.script = forgets
    fact = old.fact(WHOLE)
    assert (fact.batches, fact.recorded_at_s) == (whole.batches, 0)
    assert not replace(fact, epochs=(), time_s=fact.time_s + 10 * fact.window_s).leaves_out(1)


def test_how_far_the_reading_is_is_told(old: History) -> None:
    told: list[tuple[int, int]] = []
    domain = old.ground.settler.site.domain
    paced = EvmChain(HttpRpc(HttpTransport(old.ground.url), NARROW))
    JobReader(paced, domain, old.job, lambda *blocks: told.append(blocks)).fact()
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
