from hypergpu.client import connect
from hypergpu.training.async_run import AsyncRun
from hypergpu.training.estimate import estimate
from hypergpu.training.finetune import finetune
from hypergpu.training.run import Run
from hypergpu.training.train import train, train_async

__all__ = ["AsyncRun", "Run", "connect", "estimate", "finetune", "train", "train_async"]
