"""What every kind of worker does alike, in real processes."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.shell.evaluator.answer import Evaluator
from coordinator.shell.evaluator.messages import Initialise, Initialised
from gpu_node.shell.worker.messages import (
    Abort,
    Aborted,
    Failed,
    NotDrawn,
    PositionRange,
    Stop,
)
from hypergpu.digest import digest_of
from hypergpu.tensors.codec import IncrementalCheck
from hypergpu.tensors.compression import scheme_named
from hypergpu.tensors.layout import Layout
from hypergpu.units import Samples
from tests.conformance.worker_process import (
    SUBJECTS,
    Desk,
    Subject,
    Worker,
    changed,
    decoded,
    spawned,
    unknown_digest,
)

LEARNERS = tuple(subject for subject in SUBJECTS if subject.kind != "null")


def named(subject: Subject) -> str:
    return f"{subject.kind}:{subject.workload}"


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Worker]]:
    """One worker of each kind for the whole suite: a request must not depend on those before it."""
    with spawned("torch") as torch, spawned("numpy") as numpy, spawned("null") as null:
        yield {"torch": torch, "numpy": numpy, "null": null}


@pytest.fixture
def worker(workers: dict[str, Worker], subject: Subject) -> Worker:
    return workers[subject.kind]


@pytest.fixture
def desk(tmp_path: Path, subject: Subject) -> Desk:
    return Desk(tmp_path, subject)


every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=named)
every_learner = pytest.mark.parametrize("subject", LEARNERS, ids=named)
every_codec = pytest.mark.parametrize("codec", ["int4", "topk64"])


@every_subject
def test_a_ready_worker_names_its_device_and_its_workloads(
    worker: Worker, subject: Subject
) -> None:
    assert worker.ready.kind == subject.kind
    assert worker.ready.device in {"cpu", "cuda", "mps"}
    assert worker.ready.memory_bytes > 0
    assert subject.workload in worker.ready.workloads


def refuse_malformed(layout: Layout, scheme: str, update: bytes) -> None:
    """Judge an update as the coordinator does."""
    check = IncrementalCheck(layout, scheme)
    check.feed(update)
    check.finish()


@every_subject
def test_the_update_is_what_the_reply_says_and_what_the_codec_wants(
    worker: Worker, desk: Desk
) -> None:
    request = desk.request(0)
    reply = worker.trained(request)
    payload = Path(request.update_path).read_bytes()
    refuse_malformed(desk.layout, request.codec, payload)
    assert reply.update_digest == digest_of(payload)
    assert (reply.update_bytes, reply.samples, reply.inner_steps) == (len(payload), 64, 4)
    assert math.isfinite(reply.loss_last)


@every_subject
def test_the_same_request_gives_the_same_bytes(worker: Worker, desk: Desk) -> None:
    again = changed(desk.request(0, state="again"), update_path=str(desk.folder / "update-again"))
    assert desk.update(worker, desk.request(0)) == desk.update(worker, again)


@every_subject
def test_a_new_process_goes_on_as_if_it_had_never_stopped(worker: Worker, desk: Desk) -> None:
    uninterrupted = [desk.update(worker, desk.request(round)) for round in range(3)]
    resumed = [desk.update(worker, desk.request(round, state="resumed")) for round in range(2)]
    with spawned(desk.subject.kind) as fresh:
        resumed.append(desk.update(fresh, desk.request(2, state="resumed")))
    assert resumed == uninterrupted


@every_subject
def test_a_round_that_is_assigned_again_starts_where_it_did(worker: Worker, desk: Desk) -> None:
    desk.update(worker, desk.request(0))
    first = desk.update(worker, desk.request(1))
    assert desk.update(worker, desk.request(1)) == first


@every_learner
def test_two_generations_of_end_states_are_kept(worker: Worker, desk: Desk) -> None:
    for round in range(4):
        desk.update(worker, desk.request(round))
    kept = sorted(path.name for path in (desk.folder / "state").iterdir())
    assert kept == ["end-2.safetensors", "end-3.safetensors"]


@every_learner
@every_codec
def test_a_refused_update_goes_back_into_the_error_feedback(
    worker: Worker, desk: Desk, codec: str
) -> None:
    refused = desk.update(worker, changed(desk.request(0), codec=codec))
    accepted = changed(desk.request(1), codec=codec)
    said = decoded(desk, desk.update(worker, accepted), codec) + residual(desk, 1)
    returned = desk.update(worker, changed(accepted, returns_update=True))
    said_with_return = decoded(desk, returned, codec) + residual(desk, 1)
    # Decoded plus residual is all there was to say, so the difference is what was returned. A
    # sparse scheme lets it decay once.
    expected = decoded(desk, refused, codec)
    expected[: desk.layout.large_count] *= scheme_named(codec).residual_decay
    np.testing.assert_allclose(said_with_return - said, expected, atol=1e-6)


@every_learner
@every_codec
def test_what_is_not_finite_in_a_refused_update_is_dropped(
    worker: Worker, desk: Desk, codec: str
) -> None:
    desk.update(worker, changed(desk.request(0), codec=codec))
    path = desk.folder / "state" / "end-0.safetensors"
    poison(path)
    reply = worker.trained(changed(desk.request(1), codec=codec, returns_update=True))
    assert math.isfinite(reply.loss_last)
    refuse_malformed(desk.layout, codec, (desk.folder / "update-1").read_bytes())


@every_learner
def test_without_its_end_state_a_round_starts_fresh(worker: Worker, desk: Desk) -> None:
    fresh = desk.update(worker, changed(desk.request(1), resume_from=None))
    missing = desk.request(1, state="nowhere")
    assert desk.update(worker, missing) == fresh


@every_learner
def test_a_damaged_end_state_counts_as_missing(worker: Worker, desk: Desk) -> None:
    fresh = desk.update(worker, changed(desk.request(1), resume_from=None))
    desk.update(worker, desk.request(0))
    path = desk.folder / "state" / "end-0.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    assert desk.update(worker, desk.request(1)) == fresh


@every_learner
@every_codec
def test_the_codec_may_change_between_rounds(worker: Worker, desk: Desk, codec: str) -> None:
    worker.trained(changed(desk.request(0), codec=codec))
    reply = worker.trained(changed(desk.request(1), codec="fp32", returns_update=True))
    assert reply.update_bytes == 4 * desk.layout.parameters_count


@every_learner
def test_an_abort_is_answered_and_leaves_nothing(worker: Worker, desk: Desk) -> None:
    long = changed(
        desk.request(0), ranges=(PositionRange(0, Samples(400_000)),), batch_size=1, lease=77
    )
    worker.say(desk.request(1, state="first"))
    worker.say(long)
    worker.say(Abort(77))
    assert not isinstance(worker.answer(), Aborted)
    assert worker.answer() == Aborted(77)
    assert not Path(long.update_path).exists()


@every_subject
def test_an_abort_of_another_lease_changes_nothing(worker: Worker, desk: Desk) -> None:
    request = desk.request(0)
    worker.say(Abort(request.lease))
    worker.trained(request)


@every_subject
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layout_digest": unknown_digest()}, "layout"),
        ({"workload": "sorcery"}, "no workload 'sorcery'"),
        ({"workload_version": 99}, "Fix: upgrade the older side"),
        ({"options": {"sorcery": 1}}, "has no such option"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_does_not_fit_fails_and_the_worker_lives(
    worker: Worker, desk: Desk, fields: dict[str, object], reason: str
) -> None:
    worker.say(changed(desk.request(0), **fields))
    reply = worker.answer()
    assert isinstance(reply, Failed)
    assert reason in reply.reason
    assert not reply.is_fatal
    worker.trained(desk.request(0))


@every_learner
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ranges": ()}, "the shard is empty"),
        ({"ranges": (PositionRange(5, Samples(0)),)}, "empty batch or range"),
        ({"partition": 3}, "partition 3 of 1 does not exist"),
        ({"model_path": "/nowhere/model"}, "the model cannot be read"),
        ({"learning_rate": 1e30}, "lower inner.learning_rate"),
        ({"skew_alpha": 0.5, "partitions": 10**6}, "cannot make 1000000 partitions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_shard_fails_with_its_reason(
    worker: Worker, desk: Desk, fields: dict[str, object], reason: str
) -> None:
    worker.say(changed(desk.request(0), **fields))
    reply = worker.answer()
    assert isinstance(reply, Failed)
    assert reason in reply.reason
    assert not reply.is_fatal


@every_subject
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_a_first_model_is_drawn_as_the_coordinator_draws_it(
    worker: Worker, desk: Desk, seed: int
) -> None:
    wanted = Initialise(
        workload=desk.subject.workload,
        options=desk.subject.options,
        seed=seed,
        model_path=str(desk.folder / "first"),
        layout_path=str(desk.folder / "layout"),
    )
    made = Evaluator().answer(wanted)
    assert isinstance(made, Initialised)
    assert digest_of(desk.drawn(worker, seed)) == made.digest


@pytest.fixture(scope="module")
def of_threads() -> Iterator[tuple[Worker, Worker]]:
    """A worker that computes on one thread and one that computes on three."""
    one, three = ({"HYPERGPU_WORKER_THREADS": str(number)} for number in (1, 3))
    with spawned("torch", one) as first, spawned("torch", three) as second:
        yield first, second


@pytest.mark.parametrize("workload", ["digits-cnn", "text-gpt", "cifar10-resnet18"])
def test_a_first_model_does_not_depend_on_how_many_threads_draw_it(
    tmp_path: Path, workload: str, of_threads: tuple[Worker, Worker]
) -> None:
    desks = [Desk(tmp_path / str(number), Subject("torch", workload, {})) for number in range(2)]
    one, three = of_threads
    first = desks[0].drawn(one, 5)
    assert desks[1].drawn(three, 5) == first
    assert desks[1].drawn(three, 6) != first


@every_subject
def test_a_training_does_not_depend_on_what_was_drawn_before(worker: Worker, desk: Desk) -> None:
    plain = desk.update(worker, desk.request(0, state="plain"))
    desk.drawn(worker, 9)
    assert desk.update(worker, desk.request(0)) == plain


@every_subject
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"workload": "sorcery"}, "no workload 'sorcery'"),
        ({"workload_version": 99}, "Fix: upgrade the older side"),
        ({"options": {"sorcery": 1}}, "has no such option"),
        ({"model_path": "/nowhere/model"}, "FileNotFoundError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_drawn_is_said_and_the_worker_lives(
    worker: Worker, desk: Desk, fields: dict[str, object], reason: str
) -> None:
    worker.say(msgspec.structs.replace(desk.drawing(3), **fields))
    reply = worker.answer()
    assert isinstance(reply, NotDrawn)
    assert (reply.number, reply.is_fatal) == (3, False)
    assert reason in reply.reason
    worker.trained(desk.request(0))


@every_learner
def test_progress_comes_at_most_four_times_a_second(worker: Worker, desk: Desk) -> None:
    worker.progress.clear()
    ranges = (PositionRange(0, Samples(3000)),)
    reply = worker.trained(changed(desk.request(0), ranges=ranges, batch_size=2))
    assert len(worker.progress) <= reply.compute_ms / 250 + 1
    assert all(step.steps_total == 1500 for step in worker.progress)


@every_learner
def test_a_node_with_a_batch_of_its_own_takes_one_step_at_the_jobs_learning_rate(
    worker: Worker, desk: Desk
) -> None:
    ranges = (PositionRange(64, Samples(10)), PositionRange(9000, Samples(14)))
    request = changed(desk.request(0), inner_steps=1, ranges=ranges, batch_size=24)
    reply = worker.trained(changed(request, stated_batch_size=32))
    assert (reply.inner_steps, reply.samples) == (1, 24)
    whole = Path(request.update_path).read_bytes()
    # Warm-up is counted in the job's batches: 24 samples are three quarters of its first step.
    warm = {"warmup_steps": 3, "learning_rate": 4e-3}
    assert desk.update(worker, changed(request, stated_batch_size=32, **warm)) == whole
    assert desk.update(worker, changed(request, **warm)) != whole


@every_learner
def test_partitions_of_a_skewed_split_train_different_samples(worker: Worker, desk: Desk) -> None:
    requests = [
        changed(desk.request(0), partitions=2, partition=partition, skew_alpha=0.3)
        for partition in (0, 1)
    ]
    assert desk.update(worker, requests[0]) != desk.update(worker, requests[1])


@pytest.mark.parametrize("kind", ["torch", "numpy", "null"])
def test_stop_ends_the_process(kind: str) -> None:
    with spawned(kind) as worker:
        worker.say(Stop())
        assert worker.process.wait(timeout=240) == 0


@pytest.mark.parametrize("kind", ["numpy", "null"])
def test_a_closed_pipe_ends_the_process(kind: str) -> None:
    with spawned(kind) as worker:
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.process.wait(timeout=240) == 0


def residual(desk: Desk, round: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    kept = load_file(desk.folder / "state" / f"end-{round}.safetensors")["residual"]
    return np.asarray(kept, np.float32)


def poison(path: Path) -> None:
    """Make every byte of the kept update 0xFF: NaN scales in every scheme."""
    octets = bytearray(path.read_bytes())
    header_bytes = int.from_bytes(octets[:8], "little")
    header = msgspec.json.decode(octets[8 : 8 + header_bytes])
    start, end = header["update"]["data_offsets"]
    begin = 8 + header_bytes
    octets[begin + start : begin + end] = b"\xff" * (end - start)
    path.write_bytes(bytes(octets))


too_large = pytest.mark.parametrize(
    ("subject", "cap_bytes"),
    [
        (Subject("torch", "text-gpt", {"width": 4096, "layers": 64}), 1200 << 20),
        (Subject("numpy", "null", {"parameters": 1 << 30}), 1 << 30),
    ],
    ids=["torch", "numpy"],
)


@too_large
def test_a_first_model_too_large_to_draw_is_fatal_to_the_worker(
    tmp_path: Path, subject: Subject, cap_bytes: int
) -> None:
    desk = Desk(tmp_path, Subject("null", "null", {"parameters": 1}))
    wanted = {"workload": subject.workload, "options": subject.options}
    with spawned(subject.kind, {"HYPERGPU_WORKER_MEMORY_BYTES": str(cap_bytes)}) as worker:
        worker.say(msgspec.structs.replace(desk.drawing(0), **wanted))
        reply = worker.answer()
        assert isinstance(reply, NotDrawn)
        assert reply.is_fatal
        assert "out of memory" in reply.reason
        assert worker.process.wait(timeout=240) == 1


@too_large
def test_running_out_of_memory_is_fatal_to_the_worker_and_says_the_fix(
    tmp_path: Path, subject: Subject, cap_bytes: int
) -> None:
    desk = Desk(tmp_path, Subject("null", "null", {"parameters": 1}))
    request = changed(desk.request(0), workload=subject.workload, options=subject.options)
    with spawned(subject.kind, {"HYPERGPU_WORKER_MEMORY_BYTES": str(cap_bytes)}) as worker:
        worker.say(request)
        reply = worker.answer()
        assert isinstance(reply, Failed)
        assert reply.is_fatal
        assert "out of memory" in reply.reason
        assert worker.process.wait(timeout=240) == 1


@pytest.mark.parametrize("subject", SUBJECTS[1:], ids=named)
def test_a_worker_that_plays_a_slow_one_computes_the_same(
    worker: Worker, desk: Desk, subject: Subject
) -> None:
    usual = worker.trained(desk.request(0, state="usual"))
    with spawned(subject.kind, {"HYPERGPU_WORKER_STEP_FLOOR_MS": "50"}) as another:
        began_s = time.monotonic()
        slow = another.trained(desk.request(0, state="slow"))

    assert slow.update_digest == usual.update_digest
    assert time.monotonic() - began_s >= 0.05 * slow.inner_steps
