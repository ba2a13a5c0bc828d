"""The services of `examples/images/compose.scale.yaml` as processes: their own commands and
settings, with addresses and folders of this machine.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from benchmarks.ours.demo.takeover import GatewayLine
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import operator, read_line, wait_until_ready
from hypergpu.user.cluster.processes import kill_group
from hypergpu.wire.free_ports import free_ports
from tests.compose_file import compose_services, told_commands
from tests.conformance.journal_stores import postgres_schema
from tests.processes import ENVIRONMENT, NodeProcess

HOST = "127.0.0.1"
STREAM = "hypergpu"
WITHIN_S = 120
pytestmark = pytest.mark.needs("database", "redis-server")

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=4, inner_steps=10, nodes=2),
)
JOIN = "hypergpu join "


class Ports(msgspec.Struct, frozen=True):
    """Free ports in place of the file's."""

    redis: int
    s3: int
    coordinators: tuple[int, ...]
    gateway: int


class ComposedServices:
    """Processes by their services' names."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        redis, s3, *rest = free_ports(9)
        self.ports = Ports(redis, s3, tuple(rest[:4]), rest[4])
        self._gateway_ports = rest[4:]
        self.children: dict[str, subprocess.Popen[str]] = {}
        self.services = compose_services(
            {"HYPERGPU_HOST": HOST, "S3_ACCESS_KEY": "key", "S3_SECRET_KEY": "secret"},
            {
                "postgresql://hypergpu:${POSTGRES_PASSWORD:?}@postgres:5432/hypergpu": database,
                "POSTGRES_PASSWORD: ${POSTGRES_PASSWORD:?}": "POSTGRES_PASSWORD: unused",
                "redis://redis:6379": f"redis://{HOST}:{redis}",
                "0.0.0.0:8080": f"{HOST}:{s3}",
                "${HYPERGPU_HOST:?}:8080": f"{HOST}:{s3}",
                "/buckets": str(folder / "buckets"),
                "/run/secrets": str(folder),
                "/tcp/127.0.0.1/7700": f"/tcp/{HOST}/{self.ports.gateway}",
                **self._coordinator_places(),
            },
        )

    def start(self, name: str, *more: str) -> "subprocess.Popen[str]":
        """Start a service by its command; ``more`` is added to it."""
        service = self.services[name]
        words = [*service.get("entrypoint", ()), *service.get("command", ()), *more]
        is_coordinator = name.startswith("coordinator")
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = child = subprocess.Popen(
                ["hypergpu-coordinator", *words] if is_coordinator else words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_coordinator or name.startswith("gateway") else log,
                stderr=log,
                text=True,
                env=self.environment(name),
                cwd=self.folder,
                start_new_session=True,
            )
        return child

    def environment(self, name: str) -> dict[str, str]:
        """A service's environment: the image's, and the file's with its volume's folder."""
        own = self.services[name].get("environment", {})
        volume = str(self.folder / name)
        port_names = ("PORT", "NODE_PORT", "BULK_PORT")
        pairs = zip(port_names, self._gateway_ports, strict=False)
        return {
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "HYPERGPU_COORDINATOR_DATA_DIR": f"{volume}/coordinator",
            "HYPERGPU_COORDINATOR_BULK_PORT": "0",
            **{f"HYPERGPU_GATEWAY_{key}": str(port) for key, port in pairs},
            **{key: value.replace("/var/lib/hypergpu", volume) for key, value in own.items()},
        }

    def run(self, name: str, words: list[str]) -> str:
        """Run a command in a service's container; returns its output."""
        process = subprocess.run(
            words, check=True, stdout=subprocess.PIPE, text=True, env=self.environment(name)
        )
        return process.stdout

    def is_healthy(self, name: str) -> bool:
        """Whether a service's own check says so."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode == 0

    def end(self) -> None:
        """SIGKILL all."""
        for child in self.children.values():
            kill_group(child)
            if child.stdout is not None:
                child.stdout.close()

    def _coordinator_places(self) -> Mapping[str, str]:
        first, second = self.ports.coordinators[:2], self.ports.coordinators[2:]
        places: dict[str, str] = {}
        for name, before, ports in (("1", 7710, first), ("2", 7720, second)):
            places |= {
                f"coordinator-{name}:{before}": f"{HOST}:{ports[0]}",
                f"coordinator-{name}/{before}": f"{HOST}/{ports[0]}",
                f'_PORT: "{before}"': f'_PORT: "{ports[0]}"',
                f'_PORT: "{before + 1}"': f'_PORT: "{ports[1]}"',
            }
        return places


@pytest.fixture
def services(tmp_path: Path) -> Iterator[ComposedServices]:
    with postgres_schema() as url:
        composed_services = ComposedServices(tmp_path, url)
        (tmp_path / "passphrase").write_text("two words\n")
        (tmp_path / "passphrase").chmod(0o600)
        try:
            yield composed_services
        finally:
            composed_services.end()


def start_stores(services: ComposedServices) -> None:
    services.start("redis", "--port", str(services.ports.redis), "--bind", HOST)
    services.start("s3")


def start_gateways(services: ComposedServices, words: list[str]) -> str:
    """Start both with the token that the command makes; returns the address where nodes join."""
    (services.folder / "gateways").write_text(services.run("coordinator-1", words))
    addresses = set()
    for name in ("gateway-1", "gateway-2"):
        addresses.add(read_line(services.start(name), GatewayLine, name, WITHIN_S).address)
    (address,) = addresses
    return address


def train(client: Coordinator) -> str:
    """A job, trained to its end."""
    job_id = client.submit(SPEC)
    for _ in client.watch(job_id):
        pass
    assert client.job(job_id).job.phase == "finished"
    return job_id


def kinds_of(redis: Any, job_id: str) -> list[str]:
    """Kinds of a job's entries in the stream, to its end; waits for that."""
    kind_list: list[str] = []
    place = "0"
    while "JobEnded" not in kind_list:
        answer = redis.xread({STREAM: place}, block=WITHIN_S * 1000)
        assert answer, kind_list
        entries = answer[0][1]
        place = entries[-1][0]
        kind_list += [entry["kind"] for _, entry in entries if entry["job"] == job_id]
    return kind_list


@pytest.mark.full
def test_a_job_goes_through_the_gateways_and_its_events_arrive_also_after_a_loss(
    services: ComposedServices,
) -> None:
    start_stores(services)
    ready = wait_until_ready(services.start("coordinator-1"), WITHIN_S)
    standby = services.start("coordinator-2")
    for_gateways, for_nodes = told_commands()
    address = start_gateways(services, for_gateways)
    assert all(map(services.is_healthy, ("coordinator-1", "coordinator-2", "gateway-1")))

    words = [word.replace("gpu.example.org:7700", address) for word in for_nodes]
    line = services.run("coordinator-1", words).strip()
    nodes = [NodeProcess(services.folder, f"node-{number}") for number in (1, 2)]
    redis = Redis(host=HOST, port=services.ports.redis, decode_responses=True)
    try:
        for node in nodes:
            node.join(line.removeprefix(JOIN))
        with operator(ready) as client:
            kinds = kinds_of(redis, train(client))
        assert kinds.count("Receipt") == kinds.count("RoundRecorded") * 2 == 8

        kill_group(services.children["coordinator-1"])
        shutil.rmtree(services.folder / "coordinator-1")
        with operator(wait_until_ready(standby, WITHIN_S)) as client:
            assert kinds_of(redis, train(client)) == kinds
        assert services.is_healthy("coordinator-1")
    finally:
        redis.close()
        for node in nodes:
            node.end()
