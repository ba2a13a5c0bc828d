"""A worker whose stages give other numbers than their layers do.

`HYPERGPU_NODE_WORKER_MODULE=tests.lying_stage`.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from gpu_node.shell.worker.__main__ import serve
from gpu_node.shell.worker.performers import PERFORMERS, Perform, Performer
from hypergpu.rings.stage_work import STAGE_KIND
from hypergpu.serving.serve_request import STAGE_VERSION

if TYPE_CHECKING:
    import torch

MODULE = "tests.lying_stage"


def _load() -> Perform:
    from gpu_node.shell.worker.serving.stage_engine import perform
    from hypergpu.workloads.slices.layer_slice import LayerSlice

    class LyingSlice(LayerSlice):
        """Turns what it computed by one place."""

        def compute(self, *arguments: Any, **settings: Any) -> "torch.Tensor":
            """See `LayerSlice.compute`."""
            return super().compute(*arguments, **settings).roll(1, dims=-1)

    # The loader makes its slices by this name.
    sys.modules["gpu_node.shell.worker.serving.stage_layers"].LayerSlice = LyingSlice  # type: ignore[attr-defined]
    return perform


if __name__ == "__main__":
    STATUS = serve(
        performers=PERFORMERS.with_performer(Performer(STAGE_KIND, STAGE_VERSION, load=_load))
    )
    sys.stderr.flush()
    os._exit(STATUS)
