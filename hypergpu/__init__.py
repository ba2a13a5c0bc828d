"""One model, trained together by many machines over links nobody controls.

`train` sends a model of one's own to a coordinator, `finetune` one of Hugging Face, and `estimate`
says beforehand what `train` would take; `finetune_ring` fine-tunes a model of Hugging Face that no
machine holds by several; `map` has each item of some data done, `evaluate` measures
a model so, `sweep` trains each point of a grid, `serve` has a model answer and `predict` a
classifier or a model of one's own say something of a few rows. `connect` opens a
connection, `Run` and `AsyncRun` find a job again. Each is imported when it is first used; the stub
beside this file has their types.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "AsyncRun": "hypergpu.user.training.async_run",
    "Run": "hypergpu.user.training.run",
    "connect": "hypergpu.user.client",
    "estimate": "hypergpu.user.training.estimate",
    "evaluate": "hypergpu.user.farm.evaluating",
    "finetune": "hypergpu.user.training.finetune",
    "finetune_ring": "hypergpu.user.serving.ring_model",
    "MapRun": "hypergpu.user.farm.map_run",
    "map": "hypergpu.user.farm.mapping",
    "predict": "hypergpu.user.farm.predicting",
    "serve": "hypergpu.user.serving.model",
    "SweepRun": "hypergpu.user.farm.sweep_run",
    "sweep": "hypergpu.user.farm.sweeping",
    "train": "hypergpu.user.training.train",
    "train_async": "hypergpu.user.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_HOMES[name]), name)
