from hypergpu.user.client import connect
from hypergpu.user.farm.evaluating import evaluate
from hypergpu.user.farm.map_run import MapRun
from hypergpu.user.farm.mapping import map
from hypergpu.user.farm.predicting import predict
from hypergpu.user.farm.sweep_run import SweepRun
from hypergpu.user.farm.sweeping import sweep
from hypergpu.user.serving.model import serve
from hypergpu.user.serving.ring_model import finetune_ring
from hypergpu.user.training.async_run import AsyncRun
from hypergpu.user.training.estimate import estimate
from hypergpu.user.training.finetune import finetune
from hypergpu.user.training.run import Run
from hypergpu.user.training.train import train, train_async

__all__ = [
    "AsyncRun",
    "MapRun",
    "Run",
    "SweepRun",
    "connect",
    "estimate",
    "evaluate",
    "finetune",
    "finetune_ring",
    "map",
    "predict",
    "serve",
    "sweep",
    "train",
    "train_async",
]
