"""The router in a world that changes without telling it, beside the best static choices.

Virtual time: replicas work in turns, a token or a piece of a prompt each, as `ReplicaEngine` does.
Their paces and lines change at random times; the router has what the coordinator would have
measured of answers and round trips until then. A static choice sends each call to a replica by
fixed shares; the best of many, chosen with hindsight, is what the router is held against.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.ours.table import PartFigures
from coordinator.core.serving.routing import (
    ReplicaLoad,
    choose_replica,
    next_pace_ms,
    next_read_pace_ms,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

_REPLICAS = 4
_CALLS = 2_000
_BETWEEN_MS = 700.0
_CALLS_MOST = 8
_PIECE_TOKENS = 512
_CHANGE_MS = 30_000.0
_TRIP_SMOOTHING = 0.2
_HEARTBEAT_MS = 1_000.0
_STATIC_SPLITS = 40
_WANTED = 1.3


class _WorldCall(NamedTuple):
    at_ms: float
    prompt_tokens: int
    new_tokens: int


class _World(NamedTuple):
    """Paces and round trips of each replica, by the number of the interval."""

    pace_ms: Sequence[Sequence[float]]
    trip_ms: Sequence[Sequence[float]]
    calls: Sequence[_WorldCall]

    def interval(self, now_ms: float) -> int:
        """The interval of a time; the last one lasts."""
        return min(int(now_ms / _CHANGE_MS), len(self.pace_ms[0]) - 1)


class _Answer:
    """A call at its replica."""

    def __init__(self, call: _WorldCall, given_ms: float) -> None:
        self.call = call
        self.given_ms = given_ms
        self.unread_tokens = call.prompt_tokens
        self.tokens = 0
        self.heard_ms = given_ms


class _Replica:
    """A replica, and what the coordinator has measured of it."""

    def __init__(self) -> None:
        self.open: list[_Answer] = []
        self.waiting: list[_Answer] = []
        self.turn = 0
        self.is_at_work = False
        self.pace_ms = self.read_ms = 0.0
        self.trip_ms = 0.0

    def load(self, number: int, prompt_tokens: int) -> ReplicaLoad:
        """The replica as the router sees it."""
        answers = [*self.open, *self.waiting]
        return ReplicaLoad(
            NodeId(str(number)),
            Milliseconds(round(self.trip_ms)),
            len(answers),
            10**6,
            self.pace_ms,
            prompt_tokens=prompt_tokens,
            ms_per_read_token=self.read_ms,
            unread_tokens=sum(each.call.prompt_tokens for each in answers if not each.tokens),
        )


Choose = Callable[[Sequence[_Replica], _WorldCall], int]


def changing_world_figures() -> PartFigures:
    """Three seeds."""
    ratios, rows = [], []
    for seed in (1, 2, 3):
        world = _world(seed)
        routed_ms = _p99_first_ms(world, _by_router)
        static_ms = min(_p99_first_ms(world, _by_shares(shares, seed)) for shares in _splits(seed))
        ratios.append(routed_ms / static_ms)
        figures = f"{routed_ms:.0f} ms; {static_ms:.0f} ms; {ratios[-1]:.2f}x"
        rows.append((f"seed {seed}: router; best static choice; ratio", figures, f"{_WANTED}x"))
    return PartFigures(
        rows=[("p99 of the time to the first token, world that changes", "", ""), *rows],
        metrics={"ttft_over_best_static": max(ratios)},
        notes=[
            f"Virtual time, {_REPLICAS} replicas, {_CALLS} calls, a change each half minute.",
            f"The best of {_STATIC_SPLITS + _REPLICAS + 1} fixed shares, chosen with hindsight.",
        ],
    )


def _world(seed: int) -> _World:
    draws = random.Random(seed)
    count = int(_CALLS * _BETWEEN_MS / _CHANGE_MS) + 1
    usual_ms = [draws.choice((8.0, 15.0, 30.0, 60.0)) for _ in range(_REPLICAS)]
    trips_ms = [draws.choice((5.0, 20.0, 60.0, 120.0)) for _ in range(_REPLICAS)]
    paces = [[usual * draws.choice((1, 1, 1, 2, 5)) for _ in range(count)] for usual in usual_ms]
    trips = [[usual * draws.choice((1, 1, 1, 3)) for _ in range(count)] for usual in trips_ms]
    calls, at_ms = [], 0.0
    for _ in range(_CALLS):
        at_ms += draws.expovariate(1 / _BETWEEN_MS)
        calls.append(_WorldCall(at_ms, draws.choice((30, 100, 400)), draws.choice((8, 16, 32))))
    return _World(paces, trips, calls)


def _splits(seed: int) -> list[tuple[float, ...]]:
    """Shares of the replicas: one alone, all alike, and by chance."""
    draws = random.Random(seed)
    alone = [tuple(float(place == each) for place in range(_REPLICAS)) for each in range(_REPLICAS)]
    random_shares = [
        tuple(draws.gammavariate(0.7, 1.0) for _ in range(_REPLICAS)) for _ in range(_STATIC_SPLITS)
    ]
    return [*alone, (1.0,) * _REPLICAS, *random_shares]


def _by_router(replicas: Sequence[_Replica], call: _WorldCall) -> int:
    loads = [each.load(number, call.prompt_tokens) for number, each in enumerate(replicas)]
    return int(choose_replica(loads).node or 0)


def _by_shares(shares: Sequence[float], seed: int) -> Choose:
    draws = random.Random(seed)

    def choose(replicas: Sequence[_Replica], _: _WorldCall) -> int:
        return draws.choices(range(len(replicas)), shares)[0]

    return choose


class _WorldRun:
    """One choice in one world."""

    def __init__(self, world: _World, choose: Choose) -> None:
        self._world = world
        self._choose = choose
        self._replicas = [_Replica() for _ in range(_REPLICAS)]
        self._order = itertools.count()
        self._queue: list[tuple[float, int, str, int]] = []
        self.firsts_ms: list[float] = []
        """Times to the first token, at the caller."""

    def run(self) -> None:
        """Until each call has its first token."""
        for number, call in enumerate(self._world.calls):
            self._later(call.at_ms, "call", number)
        for number in range(_REPLICAS):
            self._later(0.0, "heartbeat", number)
        while len(self.firsts_ms) < len(self._world.calls):
            now_ms, _, kind, number = heapq.heappop(self._queue)
            if kind == "heartbeat":
                self._measure_trip(now_ms, number)
                continue
            if kind == "call":
                call = self._world.calls[number]
                number = self._choose(self._replicas, call)
                self._replicas[number].waiting.append(_Answer(call, now_ms))
            else:
                self._replicas[number].is_at_work = False
            self._work(now_ms, number)

    def _later(self, at_ms: float, kind: str, number: int) -> None:
        heapq.heappush(self._queue, (at_ms, next(self._order), kind, number))

    def _measure_trip(self, now_ms: float, number: int) -> None:
        replica = self._replicas[number]
        trip_ms = self._world.trip_ms[number][self._world.interval(now_ms)]
        change = _TRIP_SMOOTHING if replica.trip_ms else 1.0
        replica.trip_ms += change * (trip_ms - replica.trip_ms)
        self._later(now_ms + _HEARTBEAT_MS, "heartbeat", number)

    def _work(self, now_ms: float, number: int) -> None:
        replica, world = self._replicas[number], self._world
        if replica.is_at_work:
            return
        interval = world.interval(now_ms)
        pace_ms, trip_ms = world.pace_ms[number][interval], world.trip_ms[number][interval]
        turn = _take_turn(replica, now_ms, pace_ms, trip_ms)
        self.firsts_ms += turn.firsts_ms
        if turn.work_ms:
            replica.is_at_work = True
            self._later(now_ms + turn.work_ms, "turn", number)


def _p99_first_ms(world: _World, choose: Choose) -> float:
    """Time from a call to its first token at the caller, at p99."""
    run = _WorldRun(world, choose)
    run.run()
    return sorted(run.firsts_ms)[int(0.99 * len(run.firsts_ms))]


class _ReplicaTurn(NamedTuple):
    work_ms: float
    """0: there is nothing to do."""
    firsts_ms: list[float]


def _take_turn(replica: _Replica, now_ms: float, pace_ms: float, trip_ms: float) -> _ReplicaTurn:
    """A token, or a piece of a prompt, of the next open answer."""
    while replica.waiting and len(replica.open) < _CALLS_MOST:
        replica.open.append(replica.waiting.pop(0))
    if not replica.open:
        return _ReplicaTurn(0.0, [])
    replica.turn = (replica.turn + 1) % len(replica.open)
    answer = replica.open[replica.turn]
    if answer.unread_tokens > _PIECE_TOKENS:
        answer.unread_tokens -= _PIECE_TOKENS
        return _ReplicaTurn(_PIECE_TOKENS * pace_ms / 14, [])
    work_ms = pace_ms + answer.unread_tokens * pace_ms / 14
    answer.unread_tokens = 0
    answer.tokens += 1
    heard_ms, firsts_ms = now_ms + work_ms + trip_ms / 2, []
    calls = len(replica.open) + len(replica.waiting)
    if answer.tokens == 1:
        firsts_ms = [heard_ms + trip_ms / 2 - answer.call.at_ms]
        read_ms = heard_ms - answer.given_ms - replica.trip_ms
        tokens = answer.call.prompt_tokens
        replica.read_ms = next_read_pace_ms(replica.read_ms, read_ms, tokens, calls)
    else:
        gap_ms = heard_ms - answer.heard_ms
        replica.pace_ms = next_pace_ms(replica.pace_ms, gap_ms, calls)
    answer.heard_ms = heard_ms
    if answer.tokens == answer.call.new_tokens:
        replica.open.remove(answer)
    return _ReplicaTurn(work_ms, firsts_ms)
