"""A machine with two devices: a node each, in one process, that is killed and comes back."""

from pathlib import Path

import msgspec

from hypergpu.jobfile.spec import CodecChoice, JobSpec, RoundRule, TrainingSettings
from hypergpu.user.cli.status import read_report
from tests.processes import Cluster, Happening, accepted_updates

ROUNDS = 6
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=10, nodes=2),
    codec=CodecChoice(up="int8"),
    # A round is to wait for a machine that takes longer than a second to come back.
    round=RoundRule(quorum=1.0),
)
TWO = {
    "HYPERGPU_NODE_DEVICES": "cpu,cpu",
    "HYPERGPU_NODE_NAME": "attic",
    "HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "20",
}


def test_a_machine_with_two_devices_trains_as_two_and_resumes_after_a_kill(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (machine,) = cluster.add_nodes(1, settings=TWO)
        job_id = cluster.submit(SPEC)

        def is_second_round(happening: Happening) -> bool:
            return happening.kind == "UpdateReceived" and happening.fields["round"] == 1

        cluster.wait_for(job_id, is_second_round)
        machine.kill()
        machine.run()
        assert cluster.wait_until_finished(job_id).phase == "finished"
        accepted_pairs = [each[:2] for each in accepted_updates([*cluster.events(job_id)])]
        assert len(accepted_pairs) == len(set(accepted_pairs)) == 2 * ROUNDS

        with cluster.coordinator.client() as client:
            names = {node.id: node.name for node in client.nodes()}
        report = read_report(machine.state_dir)
        assert machine.terminate() == 0
    assert names == {report.node: "attic", report.others[0].node: "attic-2"}
    assert {node for _, node in accepted_pairs} == names.keys()
    assert [Path(each.state_dir).name for each in report.others] == ["device-2"]
    assert msgspec.json.decode(msgspec.json.encode(report))["others"][0]["state"] == "running"
