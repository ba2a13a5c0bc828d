"""Flower's FedAvg training a real network over netsim's links or loopback: its resident path.

The path is that of `flower_lean`: processes that stay, and its old gRPC transport. Nodes may be
killed and started again by a script while it trains.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import Popen
from typing import Any, NamedTuple

import flwr

from benchmarks.peers.flower_task import FlowerTask, FlowerTraining, Learner, ends, task_of
from benchmarks.peers.measured import DEADLINE_S

MESSAGE_LIMIT = (1 << 31) - 1
RANK = "FLOWER_RANK"
"""Set for nodes: which one it is, and where the hub is."""
ADDRESS = "FLOWER_ADDRESS"
CHURN = "--churn="
"""The option that holds `NodeChurn` as JSON."""


class NodeChurn(NamedTuple):
    """Kills of training nodes; times count from the opening of the first round."""

    kills: Sequence[tuple[float, Sequence[int]]] = ()
    """At which second which ranks are killed."""
    away_s: float = 0.0
    """How long a killed one is away before it is started again."""
    limit_s: float = DEADLINE_S
    """When the run ends without having reached its target."""
    least: int = 0
    """Nodes that a round may begin with; 0: all of the job's."""


class OverError(Exception):
    """There is no need to go on: the target is reached, or the time is up."""


class FlowerNode(flwr.client.NumPyClient):
    """Trains a shard a round."""

    def __init__(self, task: FlowerTask, rank: int) -> None:
        self._learner = Learner(FlowerTraining(task), rank)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Take the inner steps and answer with the parameters after them."""
        after = self._learner.train(parameters[0], int(config["round"]))
        return [after], self._learner.samples, {}


class FlowerNodes:
    """The nodes' processes: each can be killed and started again.

    Args:
        commands: Of each, by rank.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._running: dict[int, Popen[bytes]] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        for rank in range(len(commands)):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start one that is away, unless all were ended for good."""
        with self._lock:
            if not self._is_closed:
                self._running[rank] = Popen(
                    self._commands[rank], stdout=sys.stderr, start_new_session=True
                )

    def kill(self, rank: int) -> None:
        """End one without a word."""
        with self._lock:
            process = self._running.pop(rank, None)
            if process is not None:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        """End all for good."""
        with self._lock:
            self._is_closed = True
            for rank in list(self._running):
                self.kill(rank)

    def suffer(self, churn: NodeChurn) -> None:
        """Kill and start by the script, from now on."""
        callbacks = [(at_s, self.kill, rank) for at_s, ranks in churn.kills for rank in ranks]
        callbacks += [(at_s + churn.away_s, self.start, rank) for at_s, _, rank in callbacks]
        began_s = time.monotonic()
        for at_s, callback, rank in sorted(callbacks, key=lambda each: each[0]):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            callback(rank)


class RoundAccount:
    """What became of the rounds; every model is judged beside the rounds after it.

    Args:
        training: Judges.
    """

    def __init__(self, training: FlowerTraining) -> None:
        self.began_s = 0.0
        self.ends_s: list[float] = []
        self.updates: list[int] = []
        self._training = training
        self._judging = ThreadPoolExecutor(1)
        self._metrics: list[Future[float]] = []
        self._model = training.initial()

    def add(self, parameters: Any, updates: int) -> None:
        """A round is over; without parameters the model is the one before."""
        self.ends_s.append(time.monotonic() - self.began_s)
        self.updates.append(updates)
        if parameters is not None:
            self._model = flwr.common.parameters_to_ndarrays(parameters)[0]
        self._metrics.append(self._judging.submit(self._judge, self._model, len(self.ends_s)))

    def report(self) -> dict[str, Any]:
        """All of it, once every model is judged."""
        metrics = [each.result() for each in self._metrics]
        return {
            "ends_s": self.ends_s[: len(metrics)],
            "metrics": metrics,
            "updates": self.updates[: len(metrics)],
        }

    def _judge(self, model: Any, number: int) -> float:
        accuracy = self._training.accuracy(model)
        target, rounds = self._training.spec.evaluation.target, self._training.task.rounds
        # After the last round the run ends by itself.
        if accuracy >= target and number < rounds:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        return accuracy


class AccountedAverage(flwr.server.strategy.FedAvg):
    """Federated averaging that keeps account of its rounds.

    Args:
        account: Of them.
        opened: Called when the first round is about to be opened, with all nodes there.
        nodes: How many that is.
        settings: Of the strategy.
    """

    def __init__(
        self, account: RoundAccount, start_churn: Callable[[], None], nodes: int, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._account, self._opened, self._nodes = account, start_churn, nodes

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Average as usual."""
        aggregate = super().aggregate_fit(server_round, results, failures)
        self._account.add(aggregate[0], len(results))
        return aggregate

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """As usual, but the first round waits for all nodes."""
        if not self._account.began_s:
            client_manager.wait_for(self._nodes, DEADLINE_S)
            self._account.began_s = time.monotonic()
            self._opened()
        return super().configure_fit(server_round, parameters, client_manager)


def serve(
    training: FlowerTraining, churn: NodeChurn, hub: str, nodes: FlowerNodes
) -> dict[str, Any]:
    """Run the rounds: what each took since the first was opened, and how good its model is."""
    account = RoundAccount(training)
    count = training.spec.training.nodes

    def start_churn() -> None:
        signal.setitimer(signal.ITIMER_REAL, churn.limit_s)
        threading.Thread(target=nodes.suffer, args=[churn], daemon=True).start()

    def over(*_: object) -> None:
        nodes.close()
        raise OverError

    strategy = AccountedAverage(
        account,
        start_churn,
        count,
        fraction_evaluate=0.0,
        min_fit_clients=churn.least or count,
        min_available_clients=churn.least or count,
        initial_parameters=flwr.common.ndarrays_to_parameters([training.initial()]),
        on_fit_config_fn=lambda number: {"round": number},
    )
    signal.signal(signal.SIGALRM, over)
    try:
        flwr.server.start_server(
            server_address=hub,
            config=flwr.server.ServerConfig(num_rounds=training.task.rounds),
            strategy=strategy,
            grpc_max_message_length=MESSAGE_LIMIT,
        )
    except OverError:
        pass
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return account.report()


def be_node(task: FlowerTask, rank: int) -> None:
    """Train for the hub until it says that it is over."""
    flwr.client.start_client(
        server_address=os.environ[ADDRESS],
        client=FlowerNode(task, rank).to_client(),
        grpc_max_message_length=MESSAGE_LIMIT,
    )


def commands(count: int) -> tuple[str, list[list[str]]]:
    """Where the hub listens, and what starts the nodes, each at its own end of its link."""
    this = [sys.executable, "-m", "benchmarks.peers.flower_trained", *sys.argv[1:]]
    hub_ends = ends(count)
    return hub_ends.hub, [
        [*prefix, "env", f"{RANK}={rank}", f"{ADDRESS}={address}", *this]
        for rank, (prefix, address) in enumerate(hub_ends.nodes)
    ]


def main() -> None:
    """Start the nodes and serve, or be one node."""
    task, others = task_of(sys.argv[1:])
    if rank := os.environ.get(RANK):
        be_node(task, int(rank))
        return
    churn_text = next((word for word in others if word.startswith(CHURN)), f"{CHURN}{{}}")
    churn = NodeChurn(**json.loads(churn_text.removeprefix(CHURN)))
    training = FlowerTraining(task)
    hub, words = commands(training.spec.training.nodes)
    nodes = FlowerNodes(words)
    try:
        print(json.dumps(serve(training, churn, hub, nodes)), flush=True)
    finally:
        nodes.close()


if __name__ == "__main__":
    main()
