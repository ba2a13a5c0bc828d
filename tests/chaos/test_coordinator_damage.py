import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.spec import Evaluation, JobSpec, RoundRule, TrainingSettings, Trust
from hypergpu.user.client import JobView
from tests.processes import Cluster, Happening, json_lines

MORE = 15
"""Rounds behind the one in which a job is killed."""
AT_ONCE = {"HYPERGPU_NODE_RECONNECT_CAP_MS": "200"}
"""A node dials again as soon as it may."""
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=100_000, inner_steps=20, nodes=2),
    evaluation=Evaluation(every=2),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
"""It is not done by the time that it is to be killed, and is made shorter after that."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("damage")) as cluster:
        cluster.add_nodes(2, settings=AT_ONCE)
        yield cluster


ExpectedModel = Callable[[int], str | None]


@pytest.fixture(scope="module")
def expected_model(cluster: Cluster) -> ExpectedModel:
    """The digest of the model after so many rounds that nobody disturbed."""

    @cache
    def digest(rounds: int) -> str | None:
        training = replace(SPEC.training, rounds=rounds)
        return cluster.wait_until_finished(cluster.submit(replace(SPEC, training=training))).model

    return digest


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Drop the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    """Lose the file."""
    path.unlink()


def current_blob(cluster: Cluster, job_id: str, which: str) -> Path:
    """Where the coordinator keeps a blob of a job's current model."""
    with journal(cluster) as rows:
        (body_json,) = rows.execute(
            "SELECT body_json FROM entries WHERE job_id = ? AND kind = 'AggregateReady'"
            " ORDER BY sequence DESC LIMIT 1",
            (job_id,),
        ).fetchone()
    model = json.loads(body_json)["model"]
    blob = model["deltas"][-1]["blob"] if which == "delta" else model[which]
    name = str(blob["digest"])
    return cluster.coordinator.data_dir / "blobs" / name[:2] / name


@contextlib.contextmanager
def journal(cluster: Cluster) -> Iterator[sqlite3.Connection]:
    """The journal of a coordinator that is not running."""
    connection = sqlite3.connect(cluster.coordinator.data_dir / "journal.sqlite")
    with contextlib.closing(connection), connection:
        yield connection


def is_late_round(happening: Happening) -> bool:
    """Whether the job is well under way."""
    return happening.kind == "RoundRecorded" and happening.fields["round"] >= 10


def kill_under_way(cluster: Cluster) -> str:
    """A paused job whose coordinator is dead."""
    job_id = cluster.submit(SPEC)
    cluster.wait_for(job_id, is_late_round)
    with cluster.coordinator.client() as client:
        client.pause(job_id)
    cluster.coordinator.kill()
    return job_id


def resume_and_finish(cluster: Cluster, job_id: str) -> JobView:
    """A paused job some rounds later, at its end."""
    with cluster.coordinator.client() as client:
        rounds = client.job(job_id).job.round + MORE
        client.set_parameters(job_id, {"training.rounds": str(rounds)})
        client.resume(job_id)
    job = cluster.wait_until_finished(job_id)
    assert (job.phase, job.round) == ("finished", rounds)
    return job


@pytest.mark.parametrize(
    "damage",
    [
        remove,
        pytest.param(flip, marks=pytest.mark.full),
        pytest.param(truncate, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("which", ["blob", "outer_state", "delta"])
def test_a_damaged_current_model_is_made_again_bit_for_bit(
    which: str, damage: Callable[[Path], None], cluster: Cluster, expected_model: ExpectedModel
) -> None:
    job_id = kill_under_way(cluster)
    damage(current_blob(cluster, job_id, which))

    cluster.coordinator.start()
    end_view = resume_and_finish(cluster, job_id)
    assert end_view.model == expected_model(end_view.round)
    kinds = [each.kind for each in cluster.events(job_id)]
    assert kinds.count("ModelLost") == 1


def test_a_damaged_end_of_the_journal_is_cut_off_and_told(
    cluster: Cluster, expected_model: ExpectedModel
) -> None:
    job_id = kill_under_way(cluster)
    with journal(cluster) as rows:
        rows.execute(
            "UPDATE entries SET body_json = x'7b7d' WHERE job_id = ? AND kind = 'JobPaused'",
            (job_id,),
        )
        # Rows before the newest snapshot are not read: a round may have ended after the pause.
        rows.execute(
            "DELETE FROM snapshots WHERE job_id = ?1 AND sequence >="
            " (SELECT sequence FROM entries WHERE job_id = ?1 AND kind = 'JobPaused')",
            (job_id,),
        )

    cluster.coordinator.start()
    cut = [line for line in json_lines(cluster.coordinator.log) if "cut back" in line["event"]]
    assert [line["job_id"] for line in cut] == [job_id]
    # With the row of the pause all after it is lost, such as an evaluation that ended late.
    with cluster.coordinator.client() as client:
        client.pause(job_id)
    end_view = resume_and_finish(cluster, job_id)
    assert end_view.model == expected_model(end_view.round)
