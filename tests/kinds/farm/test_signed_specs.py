"""A user's order is signed, registered, sent out with each lease, replaced and revoked."""

from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError
from hypergpu.farm.map_request import MAP_KIND, MapRequest
from hypergpu.farm.spec_keys import key_proof, public_bytes, read_spec, sign_spec
from hypergpu.farm.work_spec import work_spec
from hypergpu.packed_work import unpack_work
from hypergpu.signed_spec import SignedSpec
from hypergpu.user.client import Coordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.client.spec_keys import OwnKey, fresh_key
from hypergpu.v1 import spec_pb2
from hypergpu.wire.credentials import Role, parse_token
from hypergpu.wire.messages import digest_message
from hypergpu.wire.specs import spec_message
from hypergpu.wire.work import work_assignment_value, work_value
from tests.kinds.farm.requests import farm_request
from tests.kinds.farm.wire_bundles import KIND, next_bundle
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster

ITEMS = [f"text {number}" for number in range(40)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("signed-specs"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
def user(cluster: Cluster) -> Iterator[Coordinator]:
    """A user with a token of its own."""
    with cluster.client() as operator:
        token = parse_token(operator.create_token(Role.USER, ttl_s=600, label="user").token)
    with Coordinator(ConnectionTarget(cluster.coordinator.address, token, 60.0)) as coordinator:
        yield coordinator


def create_signed(coordinator: Coordinator, own_key: OwnKey, **changes: Any) -> str:
    """A job whose order is signed; changes are of the spec."""
    calls = coordinator.asynchronous
    request = wait_for(farm_request(calls, ITEMS))
    map_request = unpack_work(work_value(request.work), MAP_KIND, MapRequest)
    spec = replace(work_spec(map_request, coordinator.token_id, unix_s() + 600), **changes)
    signed_spec = sign_spec(own_key.key, spec, own_key.successions)
    request.signed_spec.CopyFrom(spec_message(signed_spec))
    return str(wait_for(calls._call(calls._jobs.CreateJob, request)).job_id)


def states(user: Coordinator) -> list[str]:
    """States of the user's keys, by registration."""
    return [each.state for each in user.spec_keys()]


async def test_an_order_travels_with_the_lease_and_its_manifest_can_be_fetched(
    cluster: Cluster, user: Coordinator
) -> None:
    own_key = fresh_key()
    user.register_spec_key(own_key, "laptop")
    job_id = create_signed(user, own_key)
    coordinator = cluster.coordinator
    node = WireNode(coordinator.address, coordinator.node_address)
    await node.join(coordinator.node_token())
    work, bundle = await next_bundle(node.control([(KIND, 1)]))
    signed_spec = work_assignment_value(work).spec
    assert isinstance(signed_spec, SignedSpec)
    spec = read_spec(signed_spec)
    assert (spec.user, spec.kind, signed_spec.public_key) == (user.token_id, KIND, own_key.public)
    assert bundle.manifest is not None
    assert bundle.manifest in bundle.inputs
    content = await node.fetch(digest_message(bundle.manifest.digest))
    assert isinstance(content, bytes)
    assert spec.manifest == bundle.manifest.digest
    await node.close()
    user.stop(job_id)


def test_an_order_is_refused_where_its_key_or_its_words_are_wrong(user: Coordinator) -> None:
    own_key = fresh_key()
    with pytest.raises(HyperGPUError, match="is not registered for token"):
        create_signed(user, own_key)
    user.register_spec_key(own_key)
    for changes, text in (
        ({"seed": 1}, "another seed than the request"),
        ({"items": 41}, "another items than the request"),
        ({"budget": 1}, "another budget than the request"),
        ({"user": "somebody"}, "another user than the request"),
        ({"ends_at_s": unix_s() - 1}, "the signed spec ended"),
    ):
        with pytest.raises(HyperGPUError, match=text):
            create_signed(user, own_key, **changes)


def test_nobody_registers_the_key_of_another(cluster: Cluster, user: Coordinator) -> None:
    key = Ed25519PrivateKey.generate()
    calls = user.asynchronous
    for proof in (key_proof(key, "another token"), b"", bytes(64)):
        request = spec_pb2.RegisterSpecKeyRequest(public_key=public_bytes(key), proof=proof)
        with pytest.raises(HyperGPUError, match="the key did not sign"):
            wait_for(calls._call(calls._jobs.RegisterSpecKey, request))
    own_key = fresh_key()
    user.register_spec_key(own_key)
    with cluster.client() as operator:
        with pytest.raises(HyperGPUError, match=f"of token {user.token_id}"):
            operator.register_spec_key(own_key)
        assert own_key.public.hex() in [each.key for each in operator.spec_keys()]


def test_a_key_is_replaced_by_one_that_it_names_and_signs_no_more(user: Coordinator) -> None:
    own_key = fresh_key()
    user.register_spec_key(own_key)
    later_key = own_key.successor()
    user.register_spec_key(later_key)
    user.register_spec_key(later_key)
    assert states(user) == ["replaced", "good"]
    with pytest.raises(HyperGPUError, match="is replaced"):
        create_signed(user, own_key)
    user.stop(create_signed(user, later_key))
    with pytest.raises(HyperGPUError, match="is replaced"):
        user.register_spec_key(own_key.successor())


def test_a_revoked_key_pauses_its_jobs_and_signs_no_more(
    cluster: Cluster, user: Coordinator
) -> None:
    own_key = fresh_key()
    user.register_spec_key(own_key)
    job_id = create_signed(user, own_key)
    with pytest.raises(HyperGPUError, match="there is no key"):
        user.revoke_spec_key(bytes(32))
    assert user.revoke_spec_key(own_key.public) == 1
    job = user.job(job_id).job
    assert job.phase == "paused"
    assert "was revoked" in job.reason
    with pytest.raises(HyperGPUError, match="is revoked"):
        create_signed(user, own_key)
    with pytest.raises(HyperGPUError, match="is revoked"):
        user.register_spec_key(own_key)
    cluster.coordinator.kill()
    cluster.coordinator.start()
    assert states(user) == ["revoked"]
    user.stop(job_id)
