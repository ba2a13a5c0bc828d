from hypergpu.user.client import connect
from hypergpu.user.training.async_run import AsyncRun
from hypergpu.user.training.estimate import estimate
from hypergpu.user.training.finetune import finetune
from hypergpu.user.training.run import Run
from hypergpu.user.training.train import train, train_async

__all__ = ["AsyncRun", "Run", "connect", "estimate", "finetune", "train", "train_async"]
