"""`/metrics` of real processes: by TLS and an operator's token beyond loopback, else open."""

import ssl
from contextlib import ExitStack
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core.hub.health import NEWCOMER
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from tests.gateway_process import FREE_PORTS, GatewayProcess, operator_token
from tests.processes import Cluster, NodeProcess

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=4, inner_steps=2, batch_size=16, nodes=1),
)


def read(url: str, authority: Path | None = None, **headers: str) -> tuple[int, str]:
    """Status and text."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    answer = httpx.get(url, headers=headers, verify=context)
    return answer.status_code, answer.text


def names(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


def test_beyond_loopback_metrics_take_tls_and_an_operators_token(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--metrics-listen", "0.0.0.0:0", is_plaintext=False) as cluster:
        port = cluster.coordinator.metrics_port
        authority = cluster.coordinator.data_dir / "identity" / "authority.pem"
        url = f"https://127.0.0.1:{port}/metrics"
        assert read(url, authority)[0] == 401
        token = cluster.coordinator.node_token()
        assert read(url, authority, Authorization=f"Bearer {token}")[0] == 403
        token = operator_token(cluster.coordinator)
        status, text = read(url, authority, Authorization=f"Bearer {token}")
        assert status == 200
        assert "hypergpu_coordinator_nodes" in names(text)


def test_a_coordinator_and_a_gateway_tell_the_nodes_of_a_job(tmp_path: Path) -> None:
    with Cluster(tmp_path, "--metrics-listen", "127.0.0.1:0") as cluster, ExitStack() as ends:
        flags = (*FREE_PORTS, "--metrics-listen", "127.0.0.1:0")
        token = operator_token(cluster.coordinator)
        gateway = GatewayProcess(token, tmp_path / "gateway.log", *flags)
        ends.callback(gateway.end)
        node = NodeProcess(tmp_path, "node-0")
        cluster.nodes.append(node)
        node.join(gateway.token(cluster.coordinator))
        job_id = cluster.submit(SPEC)
        assert cluster.wait_until_finished(job_id).phase == "finished"
        _, text = read(f"http://127.0.0.1:{cluster.coordinator.metrics_port}/metrics")
        assert {"hypergpu_node_health", "hypergpu_link_up_bits_per_second"} <= names(text)
        assert f'job="{job_id}"' in text
        _, text = read(f"http://127.0.0.1:{gateway.line.metrics_port}/metrics")
        assert {"hypergpu_gateway_sessions", "hypergpu_gateway_node_passed"} <= names(text)


def test_what_a_job_taught_of_a_node_outlives_a_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(1)
        assert cluster.wait_until_finished(cluster.submit(SPEC)).phase == "finished"
        with cluster.client() as client:
            (before,) = client.nodes()
        assert before.health.reliability > NEWCOMER
        assert cluster.coordinator.terminate() == 0
        cluster.coordinator.start()
        with cluster.client() as client:
            (after,) = client.nodes()
        assert after.health.reliability == before.health.reliability
