import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import (
    STRATEGIES,
    CodecChoice,
    Evaluation,
    JobSpec,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.user.client import ENDED, JobView
from tests.processes import (
    ENVIRONMENT,
    Cluster,
    CoordinatorProcess,
    Happening,
    accepted_updates,
)

QUICK = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    name="quick",
    training=TrainingSettings(rounds=6, inner_steps=5, nodes=2),
    evaluation=Evaluation(every=3),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
LONG_ROUNDS = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=100_000, inner_steps=800, nodes=1),
)
LONG = JobSpec(
    workload="digits-softmax",
    name="long",
    training=TrainingSettings(rounds=100_000, inner_steps=5, nodes=1),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("training")) as cluster:
        cluster.add_nodes(2)
        yield cluster


@pytest.fixture
def small_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One with short silences, so that losses are noticed soon."""
    flags = ("--heartbeat-interval-ms", "200", "--lost-after-ms", "2000")
    with Cluster(tmp_path, *flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def quick(cluster: Cluster) -> tuple[str, JobView]:
    """The job of `QUICK` at its end, and its id."""
    job_id = cluster.submit(QUICK)
    return job_id, cluster.wait_until_finished(job_id)


def is_round(number: int) -> Callable[[Happening], bool]:
    """Whether a happening is the record of a round at least as late."""
    return lambda event: event.kind == "RoundRecorded" and event.fields["round"] >= number


def has_updates(count: int) -> Callable[[Happening], bool]:
    """Whether a happening is the record of a round with so many updates."""
    return lambda event: event.kind == "RoundRecorded" and event.fields["updates"] == count


def with_shorter_rounds(cluster: Cluster, job_id: str, more: int) -> int:
    """Let a job end so many rounds from where it is; gives its rounds."""
    with cluster.coordinator.client() as client:
        client.pause(job_id)
        rounds = client.job(job_id).job.round + more
        client.set_parameters(job_id, {"training.rounds": str(rounds)})
        client.resume(job_id)
    return int(rounds)


def test_two_nodes_train_a_job_to_its_end(quick: tuple[str, JobView]) -> None:
    _, job = quick
    assert job.phase == "finished"
    assert job.round == job.rounds == 6
    assert job.updates_accepted == 12
    assert job.metric_name == "accuracy"
    assert job.metric is not None
    assert job.metric > 0.6


def test_the_same_job_gives_the_same_model_again_and_over_mutual_tls(
    cluster: Cluster, quick: tuple[str, JobView], tmp_path: Path
) -> None:
    assert cluster.wait_until_finished(cluster.submit(QUICK)).model == quick[1].model
    with Cluster(tmp_path, is_plaintext=False) as secure_cluster:
        secure_cluster.add_nodes(2)
        assert (
            secure_cluster.wait_until_finished(secure_cluster.submit(QUICK)).model == quick[1].model
        )


def test_two_jobs_at_once_share_the_nodes_and_both_end(cluster: Cluster) -> None:
    spec = JobSpec(
        workload="digits-softmax", training=TrainingSettings(rounds=6, inner_steps=5, nodes=1)
    )
    jobs = [cluster.submit(spec) for _ in range(2)]
    end_views = [cluster.wait_until_finished(job_id) for job_id in jobs]

    assert [job.phase for job in end_views] == ["finished", "finished"]


def test_every_codec_trains(cluster: Cluster) -> None:
    specs = [
        JobSpec(
            workload="digits-softmax",
            training=TrainingSettings(rounds=3, inner_steps=5, nodes=2),
            codec=CodecChoice(up, down),
        )
        for up, down in (("fp32", "fp32"), ("bf16", "int8"), ("int8", "bf16"))
    ]
    jobs = [cluster.submit(spec) for spec in specs]
    assert [cluster.wait_until_finished(job_id).phase for job_id in jobs] == ["finished"] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains(cluster: Cluster, strategy: str) -> None:
    job_id = cluster.submit(with_strategy(QUICK, strategy))
    assert cluster.wait_until_finished(job_id).phase == "finished"
    plan_events = [event for event in cluster.events(job_id) if event.kind == "RoundPlanned"]
    assert bool(plan_events) == (strategy == "aware")


def test_a_planned_job_does_the_work_that_its_file_states(cluster: Cluster) -> None:
    training = TrainingSettings(rounds=30, inner_steps=20, nodes=2)
    spec = with_strategy(replace(QUICK, training=training), "aware")
    job_id = cluster.submit(spec)
    job = cluster.wait_until_finished(job_id)
    records = [event.fields for event in cluster.events(job_id) if event.kind == "RoundRecorded"]

    assert job.samples >= 30 * 20 * 32 * 2
    assert sum(record["samples"] for record in records) == job.samples
    assert all(sum(record["codecs"].values()) == record["participants"] for record in records)
    plans = [event.fields["plan"] for event in cluster.events(job_id) if "plan" in event.fields]
    assert all(part["reason"] for plan in plans for part in plan["nodes"].values())


def test_a_job_ends_at_its_target(cluster: Cluster) -> None:
    training = TrainingSettings(rounds=100_000, inner_steps=5, nodes=2)
    evaluation = Evaluation(every=2, target=0.5)
    job = cluster.wait_until_finished(
        cluster.submit(replace(QUICK, training=training, evaluation=evaluation))
    )
    assert job.phase == "finished"
    assert job.metric is not None
    assert job.metric >= 0.5
    assert job.reason.startswith("the target is reached: accuracy 0.")


def test_a_watch_from_a_sequence_number_tells_the_rest_of_the_journal(
    cluster: Cluster, quick: tuple[str, JobView]
) -> None:
    job_id, _ = quick
    whole = list(cluster.events(job_id))
    assert [each.sequence for each in whole] == list(range(len(whole)))
    assert list(cluster.events(job_id, 5)) == whole[5:]
    assert whole[0].kind == "JobCreated"


def run_loader(loader: Path, folder: Path, *arguments: str) -> str:
    """Run an export's ``load.py`` from another, empty folder; what it prints."""
    folder.mkdir()
    command = [sys.executable, str(loader), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_an_exported_model_has_the_bytes_of_its_digest(
    cluster: Cluster, quick: tuple[str, JobView], tmp_path: Path
) -> None:
    job_id, job = quick
    with cluster.coordinator.client() as client:
        exported_model = client.export(job_id, tmp_path)
    tensors = load_file(exported_model.model)
    orders = itertools.permutations(tensors.values())
    flat = {digest_of(b"".join(each.tobytes() for each in order)) for order in orders}
    assert exported_model.digest == job.model
    assert job.model in flat
    card = exported_model.card.read_text("utf-8")
    assert "digits-softmax" in card
    assert "650 parameters, 2 tensors" in card
    assert "- Preprocessing: grey values of 0 to 16 are divided by 16" in card
    output = run_loader(exported_model.loader, tmp_path / "elsewhere")
    match = re.fullmatch(r"digits-softmax: accuracy (\S+), loss (\S+) on 3\d\d .*\n", output)
    assert match is not None
    assert f"- Held-out loss {match[2]}, accuracy {match[1]}" in card


def test_the_same_request_twice_is_one_job(cluster: Cluster) -> None:
    spec = JobSpec(workload="digits-softmax", training=TrainingSettings(rounds=1, nodes=2))
    with cluster.coordinator.client() as client:
        jobs = {client.submit(spec, request_id="a request of this test") for _ in range(2)}
        assert len(jobs) == 1
        other = replace(spec, name="other")
        with pytest.raises(HyperGPUError, match="differs"):
            client.submit(other, request_id="a request of this test")
    cluster.wait_until_finished(jobs.pop())


def test_a_job_without_its_workload_is_refused(cluster: Cluster) -> None:
    with pytest.raises(HyperGPUError, match="digits-softmax"):
        cluster.submit(JobSpec(workload="digits-sofmax"))


def test_a_paused_job_rests_and_goes_on_where_it_was(
    quick: tuple[str, JobView], tmp_path: Path
) -> None:
    with Cluster(tmp_path) as slow:
        # It is not done by the time that it is to be paused.
        slow.add_nodes(2, settings={"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "150"})
        job_id = slow.submit(QUICK)
        slow.wait_for(job_id, is_round(1))
        with slow.coordinator.client() as client:
            client.pause(job_id)
            assert client.job(job_id).job.phase == "paused"
            client.resume(job_id)

        assert slow.wait_until_finished(job_id).model == quick[1].model


def test_changed_parameters_hold_from_the_next_round_on(cluster: Cluster) -> None:
    job_id = cluster.submit(LONG)
    cluster.wait_for(job_id, is_round(1))
    rounds = with_shorter_rounds(cluster, job_id, 20)

    job = cluster.wait_until_finished(job_id)
    assert (job.phase, job.round) == ("finished", rounds)


def test_a_stopped_job_can_be_removed(cluster: Cluster) -> None:
    job_id = cluster.submit(LONG)
    cluster.wait_for(job_id, is_round(0))
    with cluster.coordinator.client() as client:
        with pytest.raises(HyperGPUError, match="stop it first"):
            client.remove(job_id)
        client.stop(job_id)
        client.remove(job_id)
        with pytest.raises(HyperGPUError, match="there is no job"):
            client.job(job_id)


def test_a_node_joins_late_is_killed_returns_and_leaves_in_good_order(
    small_cluster: Cluster,
) -> None:
    small_cluster.add_nodes(1)
    job_id = small_cluster.submit(LONG)
    small_cluster.wait_for(job_id, is_round(1))
    (late,) = small_cluster.add_nodes(1)
    joined_event = small_cluster.wait_for(job_id, has_updates(2))

    late.kill()
    loss_event = small_cluster.wait_for(
        job_id, lambda happening: happening.kind == "NodeLost", joined_event.sequence
    )
    alone = small_cluster.wait_for(job_id, has_updates(1), loss_event.sequence)
    late.run()
    back = small_cluster.wait_for(job_id, has_updates(2), alone.sequence)

    assert late.terminate() == 0
    small_cluster.wait_for(job_id, has_updates(1), back.sequence)


@pytest.mark.parametrize("drain_limit_ms", ["25000", "0"])
def test_the_only_node_told_to_leave_in_a_round_ends_the_job_once_it_is_back(
    small_cluster: Cluster, drain_limit_ms: str
) -> None:
    settings = {"HYPERGPU_NODE_DRAIN_LIMIT_MS": drain_limit_ms}
    (node,) = small_cluster.add_nodes(1, settings=settings)
    job_id = small_cluster.submit(LONG_ROUNDS)
    small_cluster.wait_for(job_id, is_round(0))

    assert node.terminate() == 0
    assert small_cluster.job(job_id).job.phase not in ENDED
    node.run()

    rounds = with_shorter_rounds(small_cluster, job_id, 2)
    job = small_cluster.wait_until_finished(job_id)
    assert (job.phase, job.round) == ("finished", rounds)
    few = replace(LONG_ROUNDS, training=replace(LONG_ROUNDS.training, rounds=rounds))
    assert job.model == small_cluster.wait_until_finished(small_cluster.submit(few)).model


def test_a_node_on_which_no_worker_starts_leaves_and_is_used_again_once_one_does(
    small_cluster: Cluster, tmp_path: Path
) -> None:
    mark = tmp_path / "no-driver"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if os.path.exists({str(mark)!r}) and 'gpu_node.shell.worker' in sys.orig_argv:\n"
        "    os._exit(9)\n"
    )
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    (node,) = small_cluster.add_nodes(1, settings={"PYTHONPATH": path})
    job_id = small_cluster.submit(LONG)
    well = small_cluster.wait_for(job_id, is_round(0))
    mark.touch()
    (worker,) = psutil.Process(node.child.pid).children()
    worker.kill()
    away = small_cluster.wait_for(
        job_id, lambda happening: happening.kind == "NodeDraining", well.sequence
    )
    mark.unlink()

    small_cluster.wait_for(job_id, is_round(0), away.sequence)
    assert "no worker got ready in 4 starts" in away.fields["reason"]


def test_a_second_coordinator_is_refused_and_sigterm_ends_the_first_while_it_trains(
    small_cluster: Cluster,
) -> None:
    small_cluster.add_nodes(1)
    job_id = small_cluster.submit(LONG)
    round_record = small_cluster.wait_for(job_id, is_round(1))
    second = CoordinatorProcess(small_cluster.folder)
    assert second.launch().wait(timeout=240) == 15
    second.end()

    assert small_cluster.coordinator.terminate() == 0
    small_cluster.coordinator.start()
    small_cluster.wait_for(
        job_id, is_round(round_record.fields["round"] + 1), round_record.sequence
    )


@pytest.mark.parametrize("strategy", ["diloco", pytest.param("aware", marks=pytest.mark.full)])
def test_a_device_short_of_memory_trains_the_same_batches_in_smaller_parts(
    tmp_path: Path, strategy: str
) -> None:
    training = TrainingSettings(rounds=3, inner_steps=3, nodes=2, batch_size=65_536)
    # Every round waits for both, however busy this machine is.
    spec = JobSpec(workload="digits-softmax", training=training, round=RoundRule(quorum=1.0))
    spec = with_strategy(spec, strategy)
    # The process itself takes about 65 MiB, the job's batch some 40 more.
    small = {
        "HYPERGPU_NODE_WORKER_MEMORY_BYTES": str(82 << 20),
        "HYPERGPU_NODE_WORKER_THREADS": "1",
    }
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(1)
        cluster.add_nodes(1, settings=small)
        events = list(cluster.events(cluster.submit(spec)))

    assert "JobPaused" not in {event.kind for event in events}
    back = next(event.fields for event in events if event.kind == "ShardHandedBack")
    assert back["reason"].startswith("out of memory")
    fitted_fields = [event.fields for event in events if event.kind == "MemoryFitted"]
    least = fitted_fields[-1]["micro_batch"]
    assert least in {32_768, 16_384}
    why = f"micro-batch {least} of 65536: a larger one ran out of memory"
    assert fitted_fields[-1]["reason"].endswith(why)
    plans = [event.fields["plan"]["nodes"] for event in events if event.kind == "RoundPlanned"]
    assert all(why in plan[back["node"]]["reason"] for plan in plans[1:])
    records = [event.fields for event in events if event.kind == "RoundRecorded"]
    assert {record["updates"] for record in records} == {2}
    assert {node for _, node, _ in accepted_updates(events)} >= {back["node"]}
