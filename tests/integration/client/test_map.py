"""`hypergpu map` and `hypergpu.map` against a real coordinator and real nodes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hypergpu
from hypergpu.command_line import program
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.wire.credentials import Role
from tests.bundles import counting_texts
from tests.processes import ENVIRONMENT, Cluster
from tests.tiny_bases import save_base, save_encoder

EXAMPLE = Path(__file__).parents[3] / "examples" / "embed_texts.py"
KINDS = ("training", "checksum", "embed", "score", "classify", "program")
ROWS = [{"name": f"row {number}", "text": f"text {number}"} for number in range(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator with two nodes that have torch."""
    with Cluster(tmp_path_factory.mktemp("map"), is_plaintext=False) as cluster:
        cluster.add_nodes(2, "torch", kinds=KINDS)
        yield cluster


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Iterator[Coordinator]:
    """A connection to it."""
    with cluster.client() as client:
        yield client


def write_rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
    return path


def checksum(row: object) -> str:
    return digest_of(msgspec.json.encode(row, order="sorted"))


def test_vectors_of_many_nodes_are_those_of_sentence_transformers(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    base = save_encoder(tmp_path / "base")
    texts = counting_texts(300)
    run = hypergpu.map("embed", data=texts, base=str(base), coordinator=coordinator, checks=0.2)
    vectors = SentenceTransformer(str(base), device="cpu").encode(texts)
    np.testing.assert_allclose(run.result(), vectors, atol=1e-5)
    bundles = run.detail().job.bundles
    assert bundles is not None
    assert (bundles.items, bundles.settled_items, bundles.units) == (300, 300, 300)


def test_a_module_runs_over_arrays(coordinator: Coordinator) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    values = np.random.default_rng(4).standard_normal((200, 6)).astype(np.float32)
    outputs = hypergpu.map(module, data={"x": values}, coordinator=coordinator).result()
    weight, bias = (each.detach().numpy() for each in module.parameters())
    np.testing.assert_allclose(outputs, np.tanh(values @ weight.T + bias), atol=1e-5)


class MeanColours(nn.Module):
    """The mean of each colour of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.float().mean((2, 3)) * self.scale


def test_a_module_runs_over_a_folder_of_pictures(coordinator: Coordinator, tmp_path: Path) -> None:
    colours = [(10 * number, 200, 5 * number) for number in range(12)]
    for number, colour in enumerate(colours):
        Image.new("RGB", (20 + number, 30), colour).save(tmp_path / f"{number:02}.png")
    size = {"height": 8, "width": 8}
    run = hypergpu.map(MeanColours(), data=tmp_path, parameters=size, coordinator=coordinator)
    np.testing.assert_allclose(run.result(), np.array(colours, np.float32), atol=1e-3)


def test_perplexity_is_that_of_all_tokens(coordinator: Coordinator, tmp_path: Path) -> None:
    base = save_base(tmp_path)
    evaluation = hypergpu.evaluate(base, data=counting_texts(30), coordinator=coordinator)
    assert evaluation.items == 30
    assert evaluation.errors == 0
    assert 100 < evaluation.perplexity < 1000


def test_rows_keep_their_ids_and_order_and_tell_their_errors(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    given_rows: list[object] = [
        {"key": "a", "text": "1 2"},
        {"key": "b", "text": 7},
        {"key": "c", "text": "3"},
    ]
    base = save_encoder(tmp_path / "base", labels=2)
    out = tmp_path / "labels.jsonl"
    run = hypergpu.map(
        "classify",
        data=given_rows,
        base=str(base),
        id_field="key",
        out=out,
        coordinator=coordinator,
    )
    output = run.watch()
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [row["label"] is None for row in rows] == [False, True, False]
    assert output.errors_file is not None
    (error,) = output.errors_file.read_text("utf-8").splitlines()
    assert json.loads(error) == {
        "id": "b",
        "error": "row 2: its text is int, not a text",
    }
    assert not out.with_name("labels.jsonl.part").exists()


def test_the_example_runs_as_written(cluster: Cluster, tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base")
    with cluster.client() as client:
        token = client.create_token(Role.USER, ttl_s=600).token
    output = subprocess.run(
        [sys.executable, str(EXAMPLE), str(base)],
        env={**os.environ, **ENVIRONMENT, "HYPERGPU_TOKEN": token},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.startswith("nearest to text 17: [17, ")


class MapCommand:
    """`hypergpu map checksum` as a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.out = folder / "sums.parquet"
        token = folder / "token"
        with cluster.client() as client:
            token.write_text(client.create_token(Role.USER, ttl_s=600).token, "utf-8")
        self._words = ["map", "checksum", str(write_rows(folder)), "--out", str(self.out)]
        self._words += ["--id-field", "name", "--json", "--token-file", str(token)]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            program("hypergpu.user.cli", *self._words, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        output, errors = process.communicate()
        return process.returncode, output, errors

    def check_output(self) -> None:
        from pyarrow import parquet

        table = parquet.read_table(self.out).to_pydict()
        assert table["id"] == [row["name"] for row in ROWS]
        assert table["checksum"] == [checksum(row) for row in ROWS]
        assert set(table["error"]) == {None}
        assert all(node.startswith("0x") for node in table["node"])


def test_a_killed_client_goes_on_and_a_job_is_created_once(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        command = MapCommand(cluster, tmp_path)
        process = command.start("--name", "sums")
        assert process.stderr is not None
        assert " runs; its results" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        status, _, errors = command.run("--name", "sums")
        assert status == 16
        assert "holds an unfinished run. Fix: go on with it: --resume" in errors
        cluster.add_nodes(2, kinds=KINDS)
        status, output, errors = command.run("--name", "sums", "--resume")
        assert status == 0, errors
        assert json.loads(output)["items"] == 600
        command.check_output()
        with cluster.client() as client:
            assert len(client.jobs()) == 1
        status, _, errors = command.run("--name", "sums")
        assert status == 16
        assert "sums.parquet is there already" in errors


def test_results_that_were_fetched_before_a_kill_are_kept(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "sums.jsonl"
    rules = {"rounds": 3000}
    with cluster.client() as client:
        run = hypergpu.map("checksum", data=ROWS, out=out, parameters=rules, coordinator=client)
        cluster.wait_for(run.id, lambda event: event.kind == "BundleAccepted")
        run.fetch()
        first_piece = run.pieces[0]
        content = first_piece.read_bytes()
        # As a kill leaves them: a fetch that broke off, and a piece that was not whole.
        (run.pieces[0].parent / f".{first_piece.name}.new").write_bytes(b"{")
        run._folder.close()
        again = hypergpu.map(
            "checksum", data=ROWS, out=out, parameters=rules, coordinator=client, resume=True
        )
        assert again.id == run.id
        assert again.pieces[0].read_bytes() == content
        assert again.wait().items == len(ROWS)
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == list(range(len(ROWS)))
    assert all(len(row["checksum"]) == 64 for row in rows)


def test_an_interrupted_client_says_how_to_come_back(tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        command = MapCommand(cluster, tmp_path)
        process = command.start()
        assert process.stderr is not None
        job_id = process.stderr.readline().split()[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode == 130
        assert f"{job_id} goes on; come back to it: the same command with --resume" in errors
        status, _, errors = command.run("--resume", "--seed", "5")
        assert status == 16
        assert "had other data or other settings" in errors


def test_a_trial_tells_time_and_a_sample_and_writes_no_output(
    cluster: Cluster, tmp_path: Path
) -> None:
    command = MapCommand(cluster, tmp_path)
    status, output, errors = command.run("--limit", "20")
    assert status == 0, errors
    trial = json.loads(output)
    assert (trial["items"], trial["units"], trial["cost"]) == (20, 20, "0")
    assert trial["sample"][0]["checksum"] == checksum(ROWS[0])
    assert not command.out.exists()
    status, output, _ = command.run("--estimate", "--price", "50")
    estimate = json.loads(output)
    assert (estimate["items"], estimate["cost"]) == (600, "300")


def test_an_unknown_setting_is_refused_before_anything_is_sent(coordinator: Coordinator) -> None:
    with pytest.raises(HyperGPUError, match="embed has no setting 'top_k'"):
        hypergpu.map(
            "embed", data=["a"], base="b", parameters={"top_k": 3}, coordinator=coordinator
        )
