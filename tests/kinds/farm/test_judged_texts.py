"""Texts of nodes that round otherwise count, and those of another model do not."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import transformers
from msgspec.structs import replace

from coordinator.shell.kinds.farm.judging import are_judged_alike, are_upheld
from gpu_node.shell.worker.performers import PERFORMERS
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of, digest_to_wire
from hypergpu.errors import HyperGPUError
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.bundles import Bundle, BundleResult
from hypergpu.farm.map_request import ComparisonRule, ResultComparison
from hypergpu.farm.written_texts import GENERATE_VERSION, claim_lines
from hypergpu.packed_work import pack_work, unpack_work
from hypergpu.units import Bytes
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.resume import ignore
from hypergpu.user.client.upload import send_folder
from hypergpu.user.client.values import JobView
from hypergpu.user.farm.base_parts import base_parts
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.messages import blob_message
from hypergpu.wire.work import work_assignment_value, work_message
from hypergpu.work_units import WorkUnit
from tests.bundles import BundleFolder, counting_texts
from tests.kinds.farm.requests import farm_request, item_chunks
from tests.kinds.farm.wire_bundles import result_signature
from tests.node_client import NOBODY_LOST, WireNode, get_range, reason_of
from tests.processes import Cluster
from tests.tiny_bases import save_base

KIND = "map/generate"
RULES: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8}
SEED = 5
Bases = tuple[Path, Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """A base, and another one of the same form."""
    folder = tmp_path_factory.mktemp("bases")
    base, other = save_base(folder / "one"), save_base(folder / "other")
    transformers.set_seed(77)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.init_weights()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.05)
    model.save_pretrained(other)
    return base, other


class Writer:
    """Writes and judges as a node does.

    Args:
        folder: For its files.
        base: What it computes with.
    """

    def __init__(self, folder: Path, base: Path, items: int = 12) -> None:
        self._bundles = BundleFolder(folder, "generate")
        self._bundles.add_base(base)
        self._bundles.add_items(counting_texts(items))

    def write(self, **changes: Any) -> list[ItemResult]:
        """The texts of all items."""
        self._bundles.claims = None
        return self._bundles.values(**{"seed": SEED, **RULES, **changes})

    def judge(self, texts: list[ItemResult], **changes: Any) -> list[ItemResult]:
        """The judgements of another node's texts."""
        self._bundles.add_claims(claim_lines(texts))
        return self._bundles.values(**{"seed": SEED, **RULES, **changes})


@pytest.fixture(scope="module")
def honest(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Writer:
    return Writer(tmp_path_factory.mktemp("honest"), bases[0])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("writes", "judges"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_nodes_that_round_otherwise_uphold_each_others_texts(
    honest: Writer, writes: str, judges: str, temperature: float
) -> None:
    texts = honest.write(dtype=writes, temperature=temperature)
    assert texts != honest.write(dtype=judges, temperature=temperature)
    judgements = honest.judge(texts, dtype=judges, temperature=temperature)
    assert all(are_upheld([text], [value]) for text, value in zip(texts, judgements, strict=True))
    assert are_upheld(texts, judgements)
    again = honest.judge(texts, dtype=writes, temperature=temperature)
    assert are_judged_alike(again, judgements)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_another_model_are_not_upheld_and_judges_say_so_alike(
    honest: Writer, bases: Bases, tmp_path: Path, temperature: float
) -> None:
    liar = Writer(tmp_path, bases[1])
    texts = liar.write(temperature=temperature)
    judgements = [
        honest.judge(texts, dtype=dtype, temperature=temperature)
        for dtype in ("float32", "bfloat16")
    ]
    for judgement in judgements:
        pairs = zip(texts, judgement, strict=True)
        assert not any(are_upheld([text], [value]) for text, value in pairs)
    assert are_judged_alike(*judgements)


def test_texts_of_another_seed_or_cooler_sampling_are_not_upheld(honest: Writer) -> None:
    for changes in ({"seed": SEED + 1}, {"temperature": 0.2}):
        texts = honest.write(**changes)
        assert not are_upheld(texts, honest.judge(texts))


def _changed_texts(
    texts: list[ItemResult], change: Callable[[dict[str, Any]], None]
) -> list[ItemResult]:
    changed_texts = []
    for text in texts:
        value = dict(text.value)
        change(value)
        changed_texts.append(ItemResult(value))
    return changed_texts


def _cut(value: dict[str, Any]) -> None:
    value["token_ids"], value["new_tokens"] = value["token_ids"][:2], 2


def _other_text(value: dict[str, Any]) -> None:
    value["text"] = "trust me"


def _more_prompt(value: dict[str, Any]) -> None:
    value["prompt_tokens"] += 1


def _likelier(value: dict[str, Any]) -> None:
    value["log_likelihood"] += 1.5


@pytest.mark.parametrize("change", [_cut, _other_text, _more_prompt, _likelier])
def test_a_claim_that_is_changed_is_not_upheld(
    honest: Writer, change: Callable[[dict[str, Any]], None]
) -> None:
    texts = honest.write()
    changed_texts = _changed_texts(texts, change)
    judgements = honest.judge(changed_texts)
    pairs = zip(changed_texts, judgements, strict=True)
    assert not any(are_upheld([text], [value]) for text, value in pairs)


def test_a_judge_that_did_not_read_upholds_nothing(honest: Writer) -> None:
    texts = honest.write()
    judgements = honest.judge(texts)
    lazy = _changed_texts(judgements, lambda value: value.update(log_likelihood=-20.0, margin=0))
    assert not are_upheld(texts, lazy)
    assert not are_judged_alike(judgements, lazy)


def test_what_is_no_text_or_judgement_is_malformed(honest: Writer) -> None:
    texts = honest.write()
    judgements = honest.judge(texts)
    for wrong in (None, 17, {"text": "a"}, {**texts[0].value, "new_tokens": 99}):
        with pytest.raises(HyperGPUError, match="malformed"):
            are_upheld([ItemResult(wrong)], judgements[:1])
    with pytest.raises(HyperGPUError, match="malformed"):
        are_judged_alike(judgements[:1], texts[:1])


def test_an_item_that_cannot_be_done_has_its_reason_at_both(bases: Bases, tmp_path: Path) -> None:
    bundles = BundleFolder(tmp_path, "generate")
    bundles.add_base(bases[0])
    bundles.add_items(["number 3", "1 " * 200, {"no": "text"}])
    texts = bundles.values(seed=SEED, **RULES)
    assert [bool(text.error) for text in texts] == [False, True, True]
    bundles.add_claims(claim_lines(texts))
    judgements = bundles.values(seed=SEED, **RULES)
    assert are_upheld(texts, judgements)
    given_up = [ItemResult(error="I would rather not"), *texts[1:]]
    bundles.add_claims(claim_lines(given_up))
    assert not are_upheld(given_up, bundles.values(seed=SEED, **RULES))


class JudgedWorld(NamedTuple):
    """What nodes of a test compute with: all blobs of the job, by their digests."""

    inputs: Path
    outputs: Path
    swap: dict[str, BlobRef]
    """Files of another base."""

    def put(self, content: bytes) -> BlobRef:
        """Lay a blob there."""
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        (self.inputs / blob.digest).write_bytes(content)
        return blob

    def put_base(self, base: Path) -> dict[str, BlobRef]:
        """Lay a base there; returns its files."""
        parts = base_parts(base)
        large_files = {
            name: self.put(path.read_bytes()) for name, path in parts.large_files.items()
        }
        return {BASE_INDEX: self.put(parts.index_content), **large_files}

    def perform(self, work: Any, dtype: str, *, is_liar: bool) -> tuple[BundleResult, bytes]:
        """Do a bundle by a type; a liar computes with the other base."""
        bundle = unpack_work(work.work, KIND, Bundle)
        bundle = replace(bundle, parameters={**bundle.parameters, "dtype": dtype})
        if is_liar:
            bundle = replace(bundle, files=self.swap)
        request = DoWork(work.lease, pack_work(KIND, bundle), str(self.inputs), str(self.outputs))
        callbacks = ShardCallbacks(lambda: None, lambda _: None, lambda _: None)
        output = PERFORMERS.perform(request, callbacks)
        result = unpack_work(output.result, KIND, BundleResult)
        return result, request.output_path(result.blob.digest).read_bytes()


async def fetch_claims(node: WireNode, world: JudgedWorld, bundle: Bundle) -> None:
    """Fetch what a node is to judge, as it alone may."""
    if bundle.claims is None:
        return
    digest = tensor_pb2.Digest(value=digest_to_wire(bundle.claims.digest))
    request = node_pb2.ResolveBlobRequest(digest=digest)
    answer = await node.stub.ResolveBlob(request, metadata=node.metadata, timeout=60)
    content = b"".join(
        [(await get_range(part, part.start, part.end))[1] for part in answer.ticket.ranges]
    )
    assert world.put(content) == bundle.claims
    assert b"log_likelihood" not in content


@contextlib.asynccontextmanager
async def _ignore_void_leases() -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if reason_of(error) not in {"LEASE_STALE", "BLOB_UNKNOWN", "REQUEST_INVALID"}:
            raise


async def work_along(
    node: WireNode, world: JudgedWorld, turn: asyncio.Lock, dtype: str, *, is_liar: bool = False
) -> None:
    """Do what a node is given until it is cancelled."""
    async for message in node.control([(KIND, GENERATE_VERSION)]):
        if not message.HasField("work_assignment"):
            continue
        work = work_assignment_value(message.work_assignment)
        # A lease may be void by now.
        async with turn, _ignore_void_leases():
            await fetch_claims(node, world, unpack_work(work.work, KIND, Bundle))
            result, content = world.perform(work, dtype, is_liar=is_liar)
            request = node_pb2.ContributeRequest(
                lease=message.work_assignment.lease,
                result=work_message(pack_work(KIND, result)),
                blob=blob_message(result.blob),
                signature=result_signature(node, message.work_assignment, result),
                content=content,
            )
            await node.stub.Contribute(request, metadata=node.metadata, timeout=60)


def create_job(cluster: Cluster, world: JudgedWorld, base: Path, texts: list[str]) -> str:
    """Send items and base, and have the texts written."""
    files = world.put_base(base)
    chunks, manifest = item_chunks(texts, 1_000)
    for content in (*chunks, manifest):
        world.put(content)
    with cluster.client() as client:
        calls = client.asynchronous
        wait_for(send_folder(calls._calls, world.inputs, ignore))
        request = wait_for(
            farm_request(
                calls,
                texts,
                item_kind="generate",
                item_kind_version=GENERATE_VERSION,
                files=files,
                parameters=RULES,
                seed=SEED,
                unit=WorkUnit.TOKENS,
                units_per_item_most=1_000,
                comparison=ResultComparison(ComparisonRule.JUDGED),
                checked_permille=300,
            )
        )
        return str(wait_for(calls._call(calls._jobs.CreateJob, request)).job_id)


async def finish_with(
    cluster: Cluster, job_id: str, world: JudgedWorld, nodes: list[WireNode]
) -> JobView:
    """Have nodes work along until the job has ended; the last of them lies."""
    turn = asyncio.Lock()
    dtypes = itertools.cycle(["float32", "bfloat16"])
    tasks = [
        asyncio.create_task(work_along(node, world, turn, dtype, is_liar=node is nodes[-1]))
        for node, dtype in zip(nodes, dtypes, strict=False)
    ]
    job = await asyncio.to_thread(cluster.wait_until_finished, job_id)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return job


async def test_a_coordinator_believes_unlike_nodes_and_no_node_of_another_model(
    bases: Bases, tmp_path: Path
) -> None:
    texts = counting_texts(48)
    for name in ("inputs", "outputs"):
        (tmp_path / name).mkdir()
    world = JudgedWorld(tmp_path / "inputs", tmp_path / "outputs", {})
    with Cluster(tmp_path / "cluster", *NOBODY_LOST) as cluster:
        job_id = create_job(cluster, world, bases[0], texts)
        world = world._replace(swap=world.put_base(bases[1]))
        nodes = []
        for _ in range(4):
            node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
            await node.join(cluster.coordinator.node_token())
            nodes.append(node)
        job = await finish_with(cluster, job_id, world, nodes)
        events = list(cluster.events(job_id))
        for node in nodes:
            await node.close()
    assert job.phase == "finished"
    accepted_fields = [event.fields for event in events if event.kind == "BundleAccepted"]
    assert sum(each["items"] for each in accepted_fields) == len(texts)
    assert {each["node"] for each in accepted_fields} <= {node.node_id for node in nodes[:3]}
    doubted_nodes = {event.fields["node"] for event in events if event.kind == "ResultDoubted"}
    assert doubted_nodes == {nodes[3].node_id}
    confirming_nodes = {who[0] for each in accepted_fields for who in each["confirmations"]}
    assert nodes[1].node_id in confirming_nodes | {each["node"] for each in accepted_fields}
