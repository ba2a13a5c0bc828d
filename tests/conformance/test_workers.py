"""What every kind of worker does alike, in real processes."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.shell.evaluator.answer import Evaluator
from coordinator.shell.evaluator.process import Initialise, Initialised
from gpu_node.shell.worker import protocol
from hypergpu.assignment import FailureCause, SampleRange
from hypergpu.digests import digest_of
from hypergpu.ids import Digest
from hypergpu.tensors.codec import IncrementalCheck, codec_named
from hypergpu.tensors.layout import Layout
from hypergpu.units import Samples
from hypergpu.workloads.registry import find
from tests.conformance.worker_process import (
    SUBJECTS,
    ShardKit,
    Subject,
    Worker,
    change,
    pseudo_gradient,
    spawn_worker,
)

LEARNERS = tuple(subject for subject in SUBJECTS if subject.kind != "null")


def subject_id(subject: Subject) -> str:
    return f"{subject.kind}:{subject.workload}:{subject.optimizer}"


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """One worker of each kind for the whole suite: a request must not depend on those before it."""
    with (
        spawn_worker("torch", {"HYPERGPU_WORKER_THREADS": "1"}) as torch,
        spawn_worker("numpy") as numpy,
        spawn_worker("null") as null,
    ):
        yield {"torch": torch, "numpy": numpy, "null": null}


@pytest.fixture
def worker(workers: dict[str, Worker], subject: Subject) -> Worker:
    return workers[subject.kind]


every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=subject_id)
every_learner = pytest.mark.parametrize("subject", LEARNERS, ids=subject_id)
every_codec = pytest.mark.parametrize("codec", ["int4", "topk64"])


@every_subject
def test_a_ready_worker_names_its_device_and_its_workloads(
    worker: Worker, subject: Subject
) -> None:
    assert worker.capabilities.kind == subject.kind
    assert worker.capabilities.device in {"cpu", "cuda", "mps"}
    assert worker.capabilities.memory_bytes > 0
    assert subject.workload in worker.capabilities.workloads


def refuse_malformed(layout: Layout, codec: str, update: bytes) -> None:
    """Judge an update as the coordinator does."""
    check = IncrementalCheck(layout, codec)
    check.feed(update)
    check.finish()


@every_subject
def test_the_update_is_what_the_reply_says_and_what_the_codec_wants(
    worker: Worker, kit: ShardKit
) -> None:
    request = kit.request(0)
    reply = worker.train(request)
    payload = Path(request.update_path).read_bytes()
    refuse_malformed(kit.layout, request.task.codec, payload)
    assert reply.digest == digest_of(payload)
    assert (reply.size_bytes, reply.samples, reply.inner_steps) == (len(payload), 64, 4)
    assert reply.loss_last is not None


@every_subject
def test_the_same_request_gives_the_same_bytes(worker: Worker, kit: ShardKit) -> None:
    again = change(kit.request(0, state="again"), update_path=str(kit.folder / "update-again"))
    assert kit.update(worker, kit.request(0)) == kit.update(worker, again)


@pytest.mark.parametrize("kind", ["torch", "numpy", "null"])
def test_a_new_and_slow_process_goes_on_as_if_the_first_had_never_stopped_and_ends_when_told(
    workers: dict[str, Worker], tmp_path: Path, kind: str
) -> None:
    settings = {"HYPERGPU_WORKER_STEP_FLOOR_MS": "50", "HYPERGPU_WORKER_THREADS": "1"}
    with spawn_worker(kind, settings) as fresh:
        for subject in (each for each in SUBJECTS if each.kind == kind):
            kit = ShardKit(tmp_path / f"{subject.workload}-{subject.optimizer}", subject)
            uninterrupted_updates = [
                kit.update(workers[kind], kit.request(round)) for round in range(3)
            ]
            resumed_updates = [
                kit.update(workers[kind], kit.request(round, state="resumed")) for round in range(2)
            ]
            began_s = time.monotonic()
            resumed_updates.append(kit.update(fresh, kit.request(2, state="resumed")))
            assert time.monotonic() - began_s >= 0.05 * kit.request(2).task.inner_steps
            assert resumed_updates == uninterrupted_updates
        fresh.send(protocol.StopWorker())
        assert fresh.process.wait(timeout=240) == 0


@every_subject
def test_a_round_that_is_assigned_again_starts_where_it_did(worker: Worker, kit: ShardKit) -> None:
    kit.update(worker, kit.request(0))
    first = kit.update(worker, kit.request(1))
    assert kit.update(worker, kit.request(1)) == first


@every_learner
def test_two_generations_of_end_states_are_kept(worker: Worker, kit: ShardKit) -> None:
    for round in range(4):
        kit.update(worker, kit.request(round))
    kept_names = sorted(path.name for path in (kit.folder / "state").iterdir())
    assert kept_names == ["end-2.safetensors", "end-3.safetensors"]


@every_learner
@every_codec
def test_a_refused_update_goes_back_into_the_error_feedback(
    worker: Worker, kit: ShardKit, codec: str
) -> None:
    refused_update = kit.update(worker, change(kit.request(0), codec=codec))
    accepted_request = change(kit.request(1), codec=codec)
    sent_values = pseudo_gradient(kit, kit.update(worker, accepted_request), codec) + residual(
        kit, 1
    )
    returned_update = kit.update(worker, change(accepted_request, returns_update=True))
    said_with_return = pseudo_gradient(kit, returned_update, codec) + residual(kit, 1)
    # Decoded plus residual is all there was to say, so the difference is what was returned. A
    # sparse codec lets it decay once.
    expected_values = pseudo_gradient(kit, refused_update, codec)
    expected_values[: kit.layout.large_count] *= codec_named(codec).residual_decay
    np.testing.assert_allclose(said_with_return - sent_values, expected_values, atol=1e-6)


@every_learner
@every_codec
def test_what_is_not_finite_in_a_refused_update_is_dropped(
    worker: Worker, kit: ShardKit, codec: str
) -> None:
    kit.update(worker, change(kit.request(0), codec=codec))
    path = kit.folder / "state" / "end-0.safetensors"
    poison(path)
    reply = worker.train(change(kit.request(1), codec=codec, returns_update=True))
    assert reply.loss_last is not None
    refuse_malformed(kit.layout, codec, (kit.folder / "update-1").read_bytes())


@every_learner
def test_without_its_end_state_a_round_starts_fresh(worker: Worker, kit: ShardKit) -> None:
    fresh = kit.update(worker, change(kit.request(1), resume_from=None))
    request_without_state = kit.request(1, state="nowhere")
    assert kit.update(worker, request_without_state) == fresh


@every_learner
def test_a_damaged_end_state_counts_as_missing(worker: Worker, kit: ShardKit) -> None:
    fresh = kit.update(worker, change(kit.request(1), resume_from=None))
    kit.update(worker, kit.request(0))
    path = kit.folder / "state" / "end-0.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert kit.update(worker, kit.request(1)) == fresh


@every_learner
@every_codec
def test_the_codec_may_change_between_rounds(worker: Worker, kit: ShardKit, codec: str) -> None:
    worker.train(change(kit.request(0), codec=codec))
    reply = worker.train(change(kit.request(1), codec="fp32", returns_update=True))
    assert reply.size_bytes == 4 * kit.layout.parameters_count


@every_learner
def test_an_abort_is_answered_and_leaves_nothing(worker: Worker, kit: ShardKit) -> None:
    long = change(kit.request(0), ranges=(SampleRange(0, Samples(400_000)),), batch_size=1)
    worker.send(kit.request(1, state="first"))
    worker.send(long)
    worker.send(protocol.AbortShard(long.lease))
    assert not isinstance(worker.answer(), protocol.ShardAborted)
    assert worker.answer() == protocol.ShardAborted(long.lease)
    assert not Path(long.update_path).exists()


@every_subject
def test_an_abort_of_another_lease_changes_nothing(worker: Worker, kit: ShardKit) -> None:
    request = kit.request(0)
    worker.send(protocol.AbortShard(request.lease))
    worker.train(request)


UNFIT = [
    ({"workload": "sorcery"}, "no workload 'sorcery'"),
    ({"workload_version": 99}, "and 99 in the job. Fix: upgrade the node"),
    ({"workload_version": 0}, "and 0 in the job. Fix: hypergpu job continue JOB --rounds N"),
    ({"options": {"sorcery": 1}}, "has no such option"),
]


def reason_id(value: object) -> str:
    return value if isinstance(value, str) else ""


def reject_shard(worker: Worker, request: protocol.TrainShard, reason: str) -> None:
    worker.send(request)
    reply = worker.answer()
    assert isinstance(reply, protocol.ShardFailed)
    assert reason in reply.reason
    assert not reply.is_fatal


@every_subject
@pytest.mark.parametrize(
    ("fields", "reason"), [({"layout": Digest("0" * 64)}, "layout"), *UNFIT], ids=reason_id
)
def test_a_request_that_does_not_fit_fails_and_the_worker_lives(
    worker: Worker, kit: ShardKit, fields: dict[str, object], reason: str
) -> None:
    reject_shard(worker, change(kit.request(0), **fields), reason)
    worker.train(kit.request(0))


BAD_SHARDS = [
    ({"ranges": ()}, "the shard is empty"),
    ({"ranges": (SampleRange(5, Samples(0)),)}, "empty batch or range"),
    ({"partition": 3}, "partition 3 of 1 does not exist"),
    ({"model_path": "/nowhere/model"}, "the model cannot be read"),
    ({"learning_rate": 1e30}, "lower inner.learning_rate"),
    ({"skew_alpha": 0.5, "partitions": 10**6}, "cannot make 1000000 partitions"),
]


@every_learner
@pytest.mark.parametrize(("fields", "reason"), BAD_SHARDS, ids=reason_id)
def test_a_bad_shard_fails_with_its_reason(
    worker: Worker, kit: ShardKit, fields: dict[str, object], reason: str
) -> None:
    reject_shard(worker, change(kit.request(0), **fields), reason)


@every_subject
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_a_first_model_is_drawn_as_the_coordinator_draws_it(
    worker: Worker, kit: ShardKit, seed: int
) -> None:
    request = Initialise(
        workload=kit.subject.workload,
        options=kit.subject.options,
        seed=seed,
        model_path=str(kit.folder / "first"),
        layout_path=str(kit.folder / "layout"),
    )
    answer = Evaluator().answer(request)
    assert isinstance(answer, Initialised)
    assert digest_of(kit.initial_model(worker, seed)) == answer.digest


def test_a_first_model_does_not_depend_on_how_many_threads_draw_it(
    tmp_path: Path, workers: dict[str, Worker]
) -> None:
    with spawn_worker("torch", {"HYPERGPU_WORKER_THREADS": "3"}) as three:
        for workload in ("digits-cnn", "text-gpt", "cifar10-resnet18"):
            subject = Subject("torch", workload, {})
            kits = [ShardKit(tmp_path / f"{workload}-{number}", subject) for number in range(2)]
            first = kits[0].initial_model(workers["torch"], 5)
            assert kits[1].initial_model(three, 5) == first
            assert kits[1].initial_model(three, 6) != first


@every_subject
def test_a_training_does_not_depend_on_what_was_drawn_before(worker: Worker, kit: ShardKit) -> None:
    plain = kit.update(worker, kit.request(0, state="plain"))
    kit.initial_model(worker, 9)
    assert kit.update(worker, kit.request(0)) == plain


@every_subject
@pytest.mark.parametrize(
    ("fields", "reason"),
    [*UNFIT, ({"model_path": "/nowhere/model"}, "FileNotFoundError")],
    ids=reason_id,
)
def test_what_cannot_be_drawn_is_said_and_the_worker_lives(
    worker: Worker, kit: ShardKit, fields: dict[str, object], reason: str
) -> None:
    worker.send(msgspec.structs.replace(kit.initial_request(3), **fields))
    reply = worker.answer()
    assert isinstance(reply, protocol.InitialModelFailed)
    assert (reply.number, reply.is_fatal) == (3, False)
    assert reason in reply.reason
    worker.train(kit.request(0))


@every_learner
def test_progress_comes_at_most_four_times_a_second(worker: Worker, kit: ShardKit) -> None:
    worker.progress.clear()
    ranges = (SampleRange(0, Samples(3000)),)
    reply = worker.train(change(kit.request(0), ranges=ranges, batch_size=2))
    assert len(worker.progress) <= reply.compute_ms / 250 + 1
    assert all(step.steps_total == 1500 for step in worker.progress)


@every_learner
def test_a_node_with_a_batch_of_its_own_takes_one_step_at_the_jobs_learning_rate(
    worker: Worker, kit: ShardKit
) -> None:
    ranges = (SampleRange(64, Samples(10)), SampleRange(9000, Samples(14)))
    request = change(kit.request(0), inner_steps=1, ranges=ranges, batch_size=24)
    reply = worker.train(change(request, stated_batch_size=32))
    assert (reply.inner_steps, reply.samples) == (1, 24)
    whole = Path(request.update_path).read_bytes()
    # Warm-up is counted in the job's batches: 24 samples are three quarters of its first step.
    warm = {"warmup_steps": 3, "learning_rate": 4e-3}
    assert kit.update(worker, change(request, stated_batch_size=32, **warm)) == whole
    assert kit.update(worker, change(request, **warm)) != whole


@every_learner
def test_partitions_of_a_skewed_split_train_different_samples(
    worker: Worker, kit: ShardKit
) -> None:
    requests = [
        change(kit.request(0), partitions=2, partition=partition, skew_alpha=0.3)
        for partition in (0, 1)
    ]
    assert kit.update(worker, requests[0]) != kit.update(worker, requests[1])


@pytest.mark.parametrize("kind", ["numpy", "null"])
def test_a_closed_pipe_ends_the_process(kind: str) -> None:
    with spawn_worker(kind) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.process.wait(timeout=240) == 0


def residual(kit: ShardKit, round: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    kept_residual = load_file(kit.folder / "state" / f"end-{round}.safetensors")["residual"]
    return np.asarray(kept_residual, np.float32)


def poison(path: Path) -> None:
    """Make every byte of the kept update 0xFF: NaN scales in every codec."""
    octets = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(octets[:8], "little")
    header = msgspec.json.decode(octets[8 : 8 + header_bytes])
    start, end = header["update"]["data_offsets"]
    begin = 8 + header_bytes
    octets[begin + start : begin + end] = b"\xff" * (end - start)
    path.write_bytes(bytes(octets))


@pytest.mark.parametrize(
    ("subject", "cap_bytes", "is_training"),
    [
        (Subject("torch", "text-gpt", {"width": 4096, "layers": 64}), 1200 << 20, True),
        (Subject("numpy", "null", {"parameters": 1 << 30}), 1 << 30, False),
    ],
    ids=["torch training", "numpy first model"],
)
def test_running_out_of_memory_is_fatal_to_the_worker_and_says_the_fix(
    tmp_path: Path, subject: Subject, cap_bytes: int, *, is_training: bool
) -> None:
    kit = ShardKit(tmp_path, Subject("null", "null", {"parameters": 1}))
    fields = {
        "workload": subject.workload,
        "workload_version": find(subject.workload).version,
        "options": subject.options,
    }
    request: protocol.Request = change(kit.request(0), **fields)
    if not is_training:
        request = msgspec.structs.replace(kit.initial_request(0), **fields)
    with spawn_worker(subject.kind, {"HYPERGPU_WORKER_MEMORY_BYTES": str(cap_bytes)}) as worker:
        worker.send(request)
        reply = worker.answer()
        assert isinstance(reply, protocol.ShardFailed | protocol.InitialModelFailed)
        assert isinstance(reply, protocol.ShardFailed) == is_training
        assert reply.is_fatal
        assert reply.cause is FailureCause.OUT_OF_MEMORY
        assert "out of memory" in reply.reason
        assert worker.process.wait(timeout=240) == 1
