"""Which job's request an evaluator answers next, where several jobs ask at the same time.

One process serves one job. A request of a job that has a process goes there; else a free place, or
that of a process which rests, is taken: so many work at once, and more may rest that take little.
Turns go round among owners first, then among the jobs of one owner: who asks more often, or has
more jobs, gets no more turns. One place is kept out of the reach of any single owner, so that an
owner whose jobs compute for as long as they may delays its own jobs alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from hypergpu.ids import JobId, TokenId
from hypergpu.units import several


class EvaluatorJob(msgspec.Struct, frozen=True):
    """A job with the token that owns it."""

    job_id: JobId
    owner: TokenId


class OpenEvaluator(msgspec.Struct, frozen=True):
    """A process that serves a job, or rests after it did."""

    job: EvaluatorJob
    is_busy: bool
    used: int
    """Number of its newest turn: the least one has rested longest."""
    is_light: bool = True
    """Whether it takes so little memory that it may rest beside those that work."""


class EvaluatorPlaces(msgspec.Struct, frozen=True):
    """How many processes there may be."""

    at_work: int
    """At work, those included that rest and take much memory."""
    in_all: int


class EvaluatorTurn(msgspec.Struct, frozen=True):
    """A job whose request is answered now."""

    job: EvaluatorJob
    ended: JobId | None = None
    """Job whose resting process makes place; None: nobody's."""


def next_turn(
    waiting: Sequence[EvaluatorJob],
    processes: Sequence[OpenEvaluator],
    turns: Mapping[str, int],
    places: EvaluatorPlaces,
) -> EvaluatorTurn | None:
    """Choose whose request is answered next; None: nobody's can be now.

    Args:
        waiting: Jobs with a request that nobody answers yet, in order of asking.
        processes: Those that there are; a job has one at most.
        turns: Number of the newest turn of each owner and of each job; missing: it had none.
        places: How many processes there may be.
    """
    busy = Counter(each.job.owner for each in processes if each.is_busy)
    at_work = {each.job.job_id for each in processes if each.is_busy}
    able = [
        job
        for job in waiting
        if busy[job.owner] < owner_places(places.at_work) and job.job_id not in at_work
    ]
    able.sort(key=lambda job: (turns.get(job.owner, 0), turns.get(job.job_id, 0)))
    turns_of_jobs = (_turn_of(job, processes, places) for job in able)
    return next((turn for turn in turns_of_jobs if turn is not None), None)


def _turn_of(
    job: EvaluatorJob, processes: Sequence[OpenEvaluator], places: EvaluatorPlaces
) -> EvaluatorTurn | None:
    """The job's turn, if there is place for its process."""
    others = [each for each in processes if each.job.job_id != job.job_id]
    heavy = [each for each in others if each.is_busy or not each.is_light]
    if len(heavy) >= places.at_work:
        idle_processes = [each for each in heavy if not each.is_busy]
    elif len(others) >= places.in_all and len(others) == len(processes):
        idle_processes = [each for each in others if not each.is_busy]
    else:
        return EvaluatorTurn(job)
    longest = min(idle_processes, key=lambda each: each.used, default=None)
    return None if longest is None else EvaluatorTurn(job, longest.job.job_id)


def owner_places(at_work: int) -> int:
    """How many processes may work for one owner at the same time."""
    return max(1, at_work - 1)


def turn_reason(
    job: EvaluatorJob,
    waiting: Sequence[EvaluatorJob],
    processes: Sequence[OpenEvaluator],
    places: EvaluatorPlaces,
) -> str:
    """Why a waiting job has no turn yet, for its owner; empty: it waits for no other job.

    It names no job of another owner.
    """
    is_served = any(each.is_busy and each.job.job_id == job.job_id for each in processes)
    if is_served or all(each.job_id != job.job_id for each in waiting):
        return ""
    own = [each for each in processes if each.is_busy and each.job.owner == job.owner]
    most = owner_places(places.at_work)
    if len(own) >= most:
        job_ids = " and ".join(sorted(each.job.job_id for each in own))
        at_once = f"{several(most, 'evaluator')} at once, of {places.at_work}"
        return f"it waits for {job_ids}: the jobs of one owner get {at_once}"
    busy = sum(each.is_busy for each in processes)
    return (
        f"it waits for an evaluator: {busy} of {places.at_work} are at work, and owners take turns"
    )
