"""Trains shards with a trainer, slowed down where this device plays a slower one."""

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.worker.prefetch import PrefetchRun
from gpu_node.shell.worker.protocol import TrainShard
from gpu_node.shell.worker.slowed_trainer import SlowedTrainer, StepFloor
from gpu_node.shell.worker.trainer import ShardCallbacks, Trainer
from gpu_node.shell.worker.training import begin_prefetch, train_shard


class TrainedShards:
    """Trains with a trainer, slowed down where this device plays a slower one."""

    def __init__(self, trainer: Trainer, floor: StepFloor) -> None:
        self.layout = trainer.layout
        self._trainer = trainer
        self._floor = floor

    def train(
        self, request: TrainShard, callbacks: ShardCallbacks, early: PrefetchRun | None
    ) -> TrainedUpdate:
        """Train a shard; ``early`` is its own prefetch as far as it was taken, else None."""
        return train_shard(request, self._trainer_for(request), callbacks, early)

    def begin_prefetch(self, request: TrainShard) -> PrefetchRun | None:
        """Begin the round after a request's, as far as the request allows it."""
        return begin_prefetch(request, self._trainer_for(request))

    def _trainer_for(self, request: TrainShard) -> Trainer:
        if not self._floor.floor_s:
            return self._trainer
        return SlowedTrainer(self._trainer, self._floor, request.task.usual_batch_size)
