"""Other strategies over the demo's own lines: short jobs on the nodes that are there anyway."""

from collections.abc import Callable

from msgspec.structs import replace

from hypergpu.cli.demo.job import Plan
from hypergpu.cli.demo.race import Race, Runner, extrapolated_sync, measured, unknown_sync
from hypergpu.client.history import History
from hypergpu.jobfile import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay

SYNC_ROUNDS = 4
SYNC_ROUNDS_SHORT = 2
Train = Callable[[JobSpec, str], History]
"""Train a job to its end under a title; what its journal told."""


def raced(chosen: Plan, history: History, train: Train, *, is_short: bool) -> Race:
    """The demo's own job, and what others would have needed.

    Args:
        chosen: The demo's job.
        history: Of that job.
        train: Trains on the same nodes over the same lines.
        is_short: Fewer steps of `sync`.
    """
    own = measured(chosen.spec.strategy, history, chosen.target)
    # They show how long it takes: the demo's own job shows how it is paid.
    chosen = chosen._replace(spec=replace(chosen.spec, pay=Pay()))
    others = []
    if chosen.spec.strategy != "diloco":
        others.append(_fixed(chosen, train))
    others.append(_every_step(chosen, train, is_short=is_short))
    return Race((own, *others))


def _fixed(chosen: Plan, train: Train) -> Runner:
    spec = with_strategy(chosen.spec, "diloco")
    until = replace(spec.evaluation, target=chosen.target)
    spec = replace(spec, name="demo, diloco", evaluation=until)
    title = "the same job with fixed steps and codec (diloco), until it is at the target"
    return measured("diloco", train(spec, title), chosen.target)


def _every_step(chosen: Plan, train: Train, *, is_short: bool) -> Runner:
    if not chosen.sync_steps:
        return unknown_sync()
    rounds = SYNC_ROUNDS_SHORT if is_short else SYNC_ROUNDS
    spec = with_strategy(chosen.spec, "sync")
    training = replace(spec.training, rounds=rounds)
    spec = replace(spec, name="demo, sync", training=training, evaluation=Evaluation(every=rounds))
    title = f"{rounds} steps with every step synchronised (sync), for the time that one takes"
    return extrapolated_sync(train(spec, title).rounds, chosen.sync_steps)
