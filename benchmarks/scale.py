"""What it takes to go past one machine: takeovers, gateways, folds in shards, large worlds."""

from functools import partial

from benchmarks.ours.scale.control_bytes import ControlLoad, control_bytes
from benchmarks.ours.scale.engine_tasks import engine_task_figures
from benchmarks.ours.scale.fold import disk_fold_figures, fold_figures
from benchmarks.ours.scale.gateways import GatewayLoad, gateways
from benchmarks.ours.scale.million import million_figures
from benchmarks.ours.scale.takeover import takeover_figures
from benchmarks.ours.scale.updates import UpdateLoad, update_figures
from benchmarks.ours.scale.world import world_figures
from benchmarks.ours.table import BenchmarkParts


def parts(is_quick: bool) -> BenchmarkParts:
    """Return the parts. Quick: one takeover, 200 sessions, 16M parameters, 2,000 virtual nodes."""
    control = ControlLoad(4, 10, 10.0) if is_quick else ControlLoad(6, 100, 60.0)
    world = (2_000, 500, 5) if is_quick else (10_000, 1_000, 20)
    load = GatewayLoad(200, 10.0, 10.0) if is_quick else GatewayLoad(10_000, 750.0, 60.0)
    return BenchmarkParts(
        title="Past one machine",
        columns=("", "measured", "longest"),
        parts={
            "takeover": partial(takeover_figures, 1 if is_quick else 3),
            "gateways": partial(gateways, load),
            "bytes": partial(control_bytes, control),
            "updates": partial(
                update_figures, UpdateLoad(6, 10, 5.0) if is_quick else UpdateLoad(6, 100, 20.0)
            ),
            "world": partial(world_figures, *world),
            "fold": partial(fold_figures, 1 << 24 if is_quick else 300_000_000),
            "fold-disk": partial(disk_fold_figures, 1 << 24 if is_quick else 1_000_000_000),
            "tasks": partial(engine_task_figures, *((4_000, 2) if is_quick else (20_000, 6))),
            "million": million_figures,
        },
    )
