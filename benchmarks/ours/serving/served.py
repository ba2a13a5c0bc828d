"""A served model on nodes of this machine, which are killed and come back."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError, Running, running
from benchmarks.ours.serving.standby import stands_by
from hypergpu.command_line import program
from hypergpu.serving.calls import AnswerBegun, AnswerToken, ModelCall
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import AnswerRoute
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.user.serving.starting import ServeOrder, model_named, start_serving

_READY_S = 240.0
_LOOK_S = 0.05


class TimedAnswer(NamedTuple):
    """An answer with the times of its tokens."""

    tokens: tuple[int, ...]
    nodes: tuple[str, ...]
    """Nodes that gave it, in order."""
    at_s: tuple[float, ...]
    """When each token came, from the call on."""
    prompt_tokens: int = 0
    held_tokens: int = 0
    """Tokens of the prompt that the replica had read before."""

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two tokens."""
        return max((b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)


class ServedModelRun:
    """A served model, its nodes and a connection."""

    def __init__(self, cluster: Running, client: Coordinator, settings: Mapping[str, str]) -> None:
        self.client = client
        self._cluster = cluster
        self._environment = {**ONE_THREAD, **settings}
        self._children: dict[str, subprocess.Popen[str]] = {}
        self._ids: dict[str, str] = {}
        self.job = ""

    def add_node(self, name: str, token: str = "") -> None:
        """Let a node join whose owner allows serving, by a token of its own if need be."""
        folder = self._cluster.folder / name
        folder.mkdir(mode=0o700)
        (folder / "node.toml").write_text(f"kinds = {json.dumps(['training', 'serve'])}\n")
        self._start(name, "join", "--token-file", "-", secret=token or self._cluster.node_token())

    def _start(self, name: str, *words: str, secret: str | None = None) -> None:
        folder = self._cluster.folder / name
        command = program("gpu_node", *words, "--state-dir", str(folder), "--worker", "torch")
        environment = {**self._environment, "HYPERGPU_NODE_NAME": name}
        log = self._cluster.folder / f"{name}.log"
        child = start(command, secret=secret, log=log, environment=environment)
        self._cluster.owner.callback(kill_group, child)
        self._children[name] = child

    def serve(self, base: Path, *, replicas: int, stages: int = 0) -> None:
        """Have the model served, whole or in stages, and wait until all replicas answer."""
        order = ServeOrder(str(base), name="bench", replicas=replicas, stages=stages)
        self.job = start_serving(self.client, order).job
        self.wait_until_ready(replicas)
        self._ids = {node.id: node.name for node in self.client.nodes()}

    def wait_until_ready(self, replicas: int) -> None:
        """Wait until so many replicas answer.

        Raises:
            BenchmarkError: They do not within four minutes.
        """
        end_s = time.monotonic() + _READY_S
        while model_named(self.client, self.job).ready_replicas < replicas:
            if time.monotonic() > end_s:
                raise BenchmarkError(f"no {replicas} replicas; see {self._cluster.folder}")
            time.sleep(_LOOK_S)

    def start_again(self) -> None:
        """Start a node that was killed and stayed away."""
        for name, child in self._children.items():
            if child.poll() is not None:
                self._start(name, "run")
                return
        raise BenchmarkError("no node is away")

    def wait_for_standby(self) -> None:
        """Wait until a node stands by with a stage in memory.

        Raises:
            BenchmarkError: None does within four minutes.
        """
        end_s = time.monotonic() + _READY_S
        while not stands_by(self.client, self.job, self._log_of):
            if time.monotonic() > end_s:
                raise BenchmarkError(f"no node stands by; see {self._cluster.folder}")
            time.sleep(_LOOK_S)

    def _log_of(self, node: str) -> Path:
        return self._cluster.folder / f"{self._ids[node]}.log"

    def kill(self, name: str) -> None:
        """SIGKILL a node with its worker; it stays away until `start_again`."""
        kill_group(self._children[name])

    def kill_and_start(self, node: str) -> None:
        """SIGKILL a node with its worker, and start it again."""
        name = self._ids[node]
        kill_group(self._children[name])
        self._start(name, "run")

    def answer(self, call: ModelCall, *, kill_after: int = 0, restarts: bool = True) -> TimedAnswer:
        """The answer to a call.

        Args:
            call: To be answered.
            kill_after: Tokens after which the answering node is killed; 0: none is.
            restarts: Whether the node is started again at once.
        """
        began_s = time.monotonic()
        tokens: list[int] = []
        nodes: list[str] = []
        at_s: list[float] = []
        begin = AnswerBegun(0)
        for part in self.client.answer("bench", call):
            if isinstance(part, AnswerRoute):
                nodes.append(part.node)
            elif isinstance(part, AnswerBegun):
                begin = part
            elif isinstance(part, AnswerToken):
                tokens.append(part.token)
                at_s.append(time.monotonic() - began_s)
                if len(tokens) == kill_after and restarts:
                    self.kill_and_start(nodes[-1])
                elif len(tokens) == kill_after:
                    kill_group(self._children[self._ids[nodes[-1]]])
        return TimedAnswer(
            tuple(tokens), tuple(nodes), tuple(at_s), begin.prompt_tokens, begin.held_tokens
        )


@contextmanager
def served_model(
    folder: Path, base: Path, nodes: Sequence[str], *, floor_ms: int = 0, stages: int = 0
) -> Iterator[ServedModelRun]:
    """A model that each of some nodes holds; all of it ends with the block.

    Args:
        folder: Holds everything that the processes keep, and their logs.
        base: The model.
        nodes: Names of the nodes.
        floor_ms: No pass of an engine takes less.
        stages: Nodes that hold the model together; 0: each holds it whole.
    """
    folder.mkdir()
    settings = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor_ms)} if floor_ms else {}
    with running(folder, is_plaintext=True) as cluster, cluster.client() as client:
        run = ServedModelRun(cluster, client, settings)
        for name in nodes:
            run.add_node(name)
        run.serve(base, replicas=1 if stages else len(nodes), stages=stages)
        yield run
