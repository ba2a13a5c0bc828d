"""What it takes to go past one machine: takeover, streams through gateways, folds in shards."""

from functools import partial

from benchmarks.ours.scale.fold import fold_figures
from benchmarks.ours.scale.gateways import GatewayLoad, gateways
from benchmarks.ours.scale.takeover import takeover_figures
from benchmarks.ours.table import BenchmarkParts


def parts(is_quick: bool) -> BenchmarkParts:
    """Return the parts. Quick: one takeover, two hundred sessions, 16M parameters."""
    load = GatewayLoad(200, 10.0, 10.0) if is_quick else GatewayLoad(10_000, 400.0, 40.0)
    return BenchmarkParts(
        title="Past one machine",
        columns=("", "measured", "longest"),
        parts={
            "takeover": partial(takeover_figures, 1 if is_quick else 3),
            "gateways": partial(gateways, load),
            "fold": partial(fold_figures, 1 << 24 if is_quick else 1_000_000_000),
        },
    )
