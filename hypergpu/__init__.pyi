from hypergpu.client import connect
from hypergpu.training.async_run import AsyncRun
from hypergpu.training.finetune import finetune
from hypergpu.training.run import Run
from hypergpu.training.train import train, train_async

__all__ = ["AsyncRun", "Run", "connect", "finetune", "train", "train_async"]
