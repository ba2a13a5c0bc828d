"""A job as it is planned over a world's lines, trained in this process.

Virtual time gives the journal: plans, leases, shards, and which updates were in before their round
closed. Each of these updates is then trained by the product's worker, with its end states on disk,
and each round folded by the coordinator's fold. Only processes and bytes on lines are left out.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.ours.cluster import BenchmarkError
from coordinator.core.training.job import commands, events
from coordinator.core.training.job.state import Job
from coordinator.core.training.transition import transition
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.core.memory import TrainingStart
from gpu_node.shell.worker.protocol import TrainShard
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import ShardCallbacks
from gpu_node.shell.worker.training import train_shard
from hypergpu.assignment import Assignment
from hypergpu.digests import digest_of_file
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.networks.task import Device, TorchWorkload
from netsim.network.world import WorldDescription
from netsim.run.job import layout_sizes
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import described_world

CPU = Device("cpu", "CPU", Bytes(0), has_bf16=False)


class PlannedOutcome(NamedTuple):
    """What a planned job came to."""

    held_out: Sums
    samples: int
    bytes_both_ways: int
    steps: tuple[tuple[int, ...], ...]
    """Inner steps of each accepted update, by round."""


class PlannedTraining:
    """Trains a job's planned updates in this process.

    Args:
        workload: The job's.
        data_dir: Its folder of data.
        folder: Where models, updates and end states go; empty at first.
    """

    def __init__(self, workload: TorchWorkload, data_dir: str, folder: Path) -> None:
        self.evaluator = TorchEvaluator(workload, data_dir)
        self._trainer = TorchTrainer(workload, CPU, self.evaluator.dataset.train)
        self.layout: Layout = self._trainer.layout
        self._data_dir = data_dir
        self._folder = folder
        self._model = folder / "initial"
        self._outer_state: StoredBlob | None = None
        self._trained: dict[NodeId, int] = {}
        """Newest round of each node that it has an end state of."""
        self._models: dict[NodeId, int] = {}
        """Newest round of each node that it has the model of."""

    def run(self, world: WorldDescription) -> PlannedOutcome:
        """Plan the world's job over its lines, and train it.

        Raises:
            BenchmarkError: The world never finished.
        """
        spec = _job_of(world)
        first = self.evaluator.initial(spec.training.seed)
        self._model.write_bytes(b"".join(vector.tobytes() for vector in first))
        job: Job | None = None
        assignments: dict[int, Assignment] = {}
        steps: list[tuple[int, ...]] = []
        bytes_both_ways = 0
        for event in self._journal(world, spec):
            if isinstance(event, events.UpdateReceived):
                self._train(event.node, assignments[event.lease])
            job, todo = transition(job, event)
            for command in todo:
                if isinstance(command, commands.AssignShard):
                    assignments[command.assignment.lease.number] = command.assignment
                    bytes_both_ways += self._fetched_bytes(command)
                elif isinstance(command, commands.Aggregate):
                    steps.append(tuple(update.inner_steps for update in command.updates))
                    bytes_both_ways += sum(update.blob.size_bytes for update in command.updates)
                    self._fold(command)
        if job is None:
            raise BenchmarkError("the world has no job")
        model = Flat.view(self.layout, np.fromfile(self._model, np.uint8))
        held_out = self.evaluator.evaluate(model)
        return PlannedOutcome(held_out, job.tally.samples, bytes_both_ways, tuple(steps))

    def _journal(self, world: WorldDescription, spec: JobSpec) -> tuple[events.Event, ...]:
        sizes = layout_sizes(self.layout, spec.codec.up, spec.codec.down)
        simulation = Simulation(described_world(world, sizes))
        outcome = simulation.run()
        if outcome.violations:
            raise BenchmarkError("; ".join(outcome.violations))
        return tuple(simulation.journals[JobId("job-0")])

    def _train(self, node: NodeId, work: Assignment) -> None:
        task = msgspec.structs.replace(work.task, layout=self.layout.digest)
        request = TrainShard(
            assignment=msgspec.structs.replace(work, task=task),
            start=TrainingStart(self._trained.get(node)),
            model_path=str(self._model),
            data_dir=self._data_dir,
            state_dir=str(self._folder / node),
            update_path=str(self._update_path(node)),
        )
        train_shard(request, self._trainer, ShardCallbacks(_nothing, _nothing, _nothing))
        self._trained[node] = work.lease.round

    def _fetched_bytes(self, command: commands.AssignShard) -> int:
        """Bytes of the deltas that lead from the node's last model to this round's; it draws the
        first one.
        """
        work, before = command.assignment, self._models.get(command.node, 0)
        self._models[command.node] = work.lease.round
        behind = work.deltas[max(0, len(work.deltas) - (work.lease.round - before)) :]
        return sum(delta.blob.size_bytes for delta in behind)

    def _fold(self, command: commands.Aggregate) -> None:
        updates = []
        for each in command.updates:
            path = self._update_path(each.node)
            digest = digest_of_file(path)
            updates.append(StoredUpdate(path, digest, each.weight, each.codec, each.clip))
        fold_result = fold(
            FoldRequest(
                layout=self.layout,
                down=command.down,
                outer=command.outer,
                scale=command.scale,
                base_model=StoredBlob(self._model, digest_of_file(self._model)),
                outer_state=self._outer_state,
                updates=tuple(updates),
                output_dir=self._folder,
            )
        )
        state, self._model = fold_result.outer_state, fold_result.model.path
        self._outer_state = None if state is None else StoredBlob(state.path, state.digest)

    def _update_path(self, node: NodeId) -> Path:
        return self._folder / f"{node}.update"


def _job_of(world: WorldDescription) -> JobSpec:
    if world.job is None:
        raise BenchmarkError("the world has no job")
    return world.job


def _nothing(*_: Any) -> None:
    pass
