"""Every call of every service by every kind of caller, on a coordinator with TLS and a node."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message_factory import GetMessageClass

from hypergpu.crypto import IdentityKey, JoinClaim
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.protocol import PROTOCOL, PROTOCOL_ENTRY
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.user.client.connection import open_channel
from hypergpu.v1 import job_pb2, node_pb2, payments_pb2, serving_pb2
from hypergpu.wire.credentials import Role, Token, authorization, parse_token
from hypergpu.wire.errors import error_in
from tests.polling import first_true
from tests.processes import Cluster

Metadata = tuple[tuple[str, str], ...]
REFUSALS = {
    *("TOKEN_INVALID", "TOKEN_REVOKED", "TOKEN_EXPIRED", "ROLE_FORBIDDEN", "RATE_LIMITED"),
    *("VERSION_MISMATCH", "UNIMPLEMENTED", "UNAVAILABLE"),
}
STRANGERS = {
    *("no token", "no scheme", "basic", "wrong secret", "operator without protocol"),
    *("revoked operator", "expired operator", "name of a node"),
}
ROLES = {"node", "viewer", "another user", "owner", "operator"}
NODE_PORT = {"certificate", "another's name", "operator's token beside it"}
NODE_PORT_STRANGERS = {"no certificate", "certificate without protocol"}
EVERYBODY = ROLES - {"node"}
ADMITTED: Mapping[str, set[str]] = {
    # The token of its request decides: those without a token of their own show a node's.
    "Join": {"node", "no token", "no scheme", "basic", "wrong secret", "name of a node"},
    "ListJobs": ROLES,
    "GetToken": ROLES,
    "ListNodes": ROLES,
    "WatchTelemetry": ROLES,
    # This node's token has no node, so no job and no ledger is shown to it.
    "GetJob": EVERYBODY,
    "WatchJob": EVERYBODY,
    "GetLedger": EVERYBODY,
    "ListReceipts": EVERYBODY,
    "CreateJob": {"another user", "owner", "operator"},
    "EstimateJob": {"another user", "owner", "operator"},
    "OfferData": {"another user", "owner", "operator"},
    "CommitData": {"another user", "owner", "operator"},
    "RegisterSpecKey": {"another user", "owner", "operator"},
    "ListSpecKeys": {"another user", "owner", "operator"},
    "RevokeSpecKey": {"another user", "owner", "operator"},
    "PauseJob": {"owner", "operator"},
    "ResumeJob": {"owner", "operator"},
    "SetParameters": {"owner", "operator"},
    "ResolveModel": {"owner", "operator"},
    "ListResults": {"owner", "operator"},
    "ResolveResult": {"owner", "operator"},
    "StopJob": {"owner", "operator"},
    # Whose models there are is told, and answered, by the method itself.
    "ListModels": {"another user", "owner", "operator"},
    "Answer": {"another user", "owner", "operator"},
    "RemoveJob": {"owner", "operator"},
    # This node's token has no node to steer.
    "PauseNode": {"operator"},
    "ResumeNode": {"operator"},
    "DrainNode": {"operator"},
}
"""Who may call a method of the main port; only operators may call one that is not here."""
LAST = (
    "PauseNode",
    "DrainNode",
    "StopJob",
    "RemoveJob",
    "RevokeToken",
    "ReadmitNode",
    "RevokeNode",
)
"""Calls that change what other cells need, in this order after all others."""
IDLE_STREAM_S = 3
WAITING = JobSpec(workload="null", training=TrainingSettings(nodes=7))


class RequestSubjects(NamedTuple):
    """What requests name."""

    job: str
    node: str
    victim: str
    """A token that may be revoked."""
    joining: Mapping[str, Token]
    """The token that each caller joins with."""


def with_fields(message: Any, **values: str) -> Any:
    """A request with those fields that it has."""
    for name, value in values.items():
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, value)
    return message


def request_of(method: Any, subjects: RequestSubjects, caller: str) -> Any:
    """A request that the caller's rights alone decide about."""
    message: Any = GetMessageClass(method.input_type)()
    if method.name == "CreateJob":
        return with_fields(message, spec_json='{"workload":"null","training":{"nodes":50}}')
    if method.name == "EstimateJob":
        return with_fields(message, spec_json='{"workload":"null"}')
    if method.name == "CreateToken":
        return job_pb2.CreateTokenRequest(role=job_pb2.TOKEN_ROLE_VIEWER, ttl_s=60, uses=1)
    if method.name == "RevokeToken":
        return job_pb2.RevokeTokenRequest(token_id=subjects.victim)
    if method.name == "Join":
        return join_request(subjects.joining.get(caller, subjects.joining["node"]))
    if "lease" in message.DESCRIPTOR.fields_by_name:
        message.lease.job_id = subjects.job
    return with_fields(message, job_id=subjects.job, node_id=subjects.node, which="latest")


def join_request(token: Token) -> node_pb2.JoinRequest:
    """A right request of a new node, with that token."""
    key, name = IdentityKey.generate(), x509.Name([])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    signed_request = builder.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    certificate_request = signed_request.public_bytes(serialization.Encoding.DER)
    claim = JoinClaim(token.id, digest_of(certificate_request))
    return node_pb2.JoinRequest(
        version=node_pb2.Version(protocol=PROTOCOL, software="test"),
        token_id=token.id,
        token_secret=token.secret,
        public_key=key.public_key,
        certificate_request=certificate_request,
        signature=key.sign(claim),
    )


async def outcome(channel: grpc.aio.Channel, method: Any, request: Any, metadata: Metadata) -> str:
    """``answered``, or the name of the reason or status that the call ends with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    answer = GetMessageClass(method.output_type)
    codecs: dict[str, Any] = {
        "request_serializer": lambda message: message.SerializeToString(),
        "response_deserializer": answer.FromString,
    }
    # A stream that is admitted and has nothing to say ends by its deadline.
    is_stream = method.server_streaming
    call_settings: dict[str, Any] = {
        "metadata": metadata,
        "timeout": IDLE_STREAM_S if is_stream else 60,
    }
    try:
        if method.client_streaming:
            hello = node_pb2.Hello(version=node_pb2.Version(protocol=PROTOCOL, software="test"))
            call: Any = channel.stream_stream(path, **codecs)(**call_settings)
            await call.write(node_pb2.ControlRequest(hello=hello))
        elif method.server_streaming:
            call = channel.unary_stream(path, **codecs)(request, **call_settings)
        else:
            await channel.unary_unary(path, **codecs)(request, **call_settings)
            return "answered"
        await call.read()
        call.cancel()
    except grpc.aio.AioRpcError as error:
        numbered_error = error_in(error.trailing_metadata())
        return (
            numbered_error.reason.name
            if isinstance(numbered_error, HyperGPUError)
            else error.code().name
        )
    return "answered"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("matrix"), is_plaintext=False) as cluster:
        cluster.add_nodes(1, "null")
        yield cluster


class Callers(NamedTuple):
    """Metadata by caller, at the main port and at the node port, and tokens."""

    main: Mapping[str, Metadata]
    tokens: Mapping[str, Token]


def callers(operator: Coordinator, node: str) -> Callers:
    """Tokens of every kind."""

    def token_of(role: Role, ttl_s: int = 3600) -> Token:
        return parse_token(operator.create_token(role, ttl_s=ttl_s, label="matrix").token)

    def bearer(token: Token) -> tuple[str, str]:
        return ("authorization", authorization(token))

    tokens = {
        "expired operator": token_of(Role.OPERATOR, ttl_s=1),
        "revoked operator": token_of(Role.OPERATOR),
        "node": token_of(Role.NODE),
        "viewer": token_of(Role.VIEWER),
        "another user": token_of(Role.USER),
        "owner": token_of(Role.USER),
        "operator": token_of(Role.OPERATOR),
    }
    operator.revoke_token(tokens["revoked operator"].id)
    # It has a second to live, and nothing tells its end.
    while not any(
        each.id == tokens["expired operator"].id and each.expires_in_s == 0
        for each in operator.tokens()
    ):
        pass
    secret = authorization(tokens["operator"]).removeprefix("Bearer ")
    main: dict[str, Metadata] = {
        name: (PROTOCOL_ENTRY, bearer(token)) for name, token in tokens.items()
    }
    main |= {
        "no token": (PROTOCOL_ENTRY,),
        "no scheme": (PROTOCOL_ENTRY, ("authorization", secret)),
        "basic": (PROTOCOL_ENTRY, ("authorization", f"Basic {secret}")),
        "wrong secret": (
            PROTOCOL_ENTRY,
            ("authorization", f"Bearer {tokens['operator'].id}.{'x' * 32}"),
        ),
        "operator without protocol": (bearer(tokens["operator"]),),
        "name of a node": (PROTOCOL_ENTRY, ("hypergpu-node", node)),
    }
    return Callers(main, tokens)


async def test_every_call_admits_those_who_may_call_it_and_nobody_else(cluster: Cluster) -> None:
    with cluster.client() as operator:
        node = first_true(operator.nodes)[0].id
        all_callers = callers(operator, node)
        victim = operator.create_token(Role.VIEWER, ttl_s=60, label="victim").id
    target = ConnectionTarget(cluster.coordinator.address, all_callers.tokens["owner"], 10.0)
    with Coordinator(target) as owner:
        job = owner.submit(WAITING)
    subjects = RequestSubjects(
        job, node, victim, {"node": all_callers.tokens["node"], **all_callers.tokens}
    )
    state = cluster.nodes[0].state_dir
    authority = (state / "authority.crt").read_bytes()
    certificate = grpc.ssl_channel_credentials(
        root_certificates=authority,
        private_key=(state / "tls.key").read_bytes(),
        certificate_chain=(state / "tls.crt").read_bytes(),
    )
    nobody = grpc.ssl_channel_credentials(root_certificates=authority)
    address = cluster.coordinator.node_address
    async with (
        await open_channel(target) as main,
        grpc.aio.secure_channel(address, certificate) as certified_channel,
        grpc.aio.secure_channel(address, nobody) as uncertified_channel,
    ):
        operator_call = all_callers.main["operator"]
        another = (PROTOCOL_ENTRY, ("hypergpu-node", f"0x{'ab' * 20}"))
        cells = [(caller, main, metadata) for caller, metadata in all_callers.main.items()] + [
            ("certificate", certified_channel, (PROTOCOL_ENTRY,)),
            ("another's name", certified_channel, another),
            ("operator's token beside it", certified_channel, operator_call),
            ("certificate without protocol", certified_channel, ()),
            ("no certificate", uncertified_channel, operator_call),
        ]
        assert {caller for caller, *_ in cells} == STRANGERS | ROLES | NODE_PORT | (
            NODE_PORT_STRANGERS
        )
        differences, count = [], 0
        for method in methods():
            requests = [request_of(method, subjects, caller) for caller, *_ in cells]
            outcomes = await asyncio.gather(
                *(
                    outcome(channel, method, request, metadata)
                    for (_, channel, metadata), request in zip(cells, requests, strict=True)
                )
            )
            for (caller, *_), end in zip(cells, outcomes, strict=True):
                is_admitted, count = end not in refusals(method), count + 1
                if is_admitted is not may_call(method, caller):
                    differences.append(f"{method.full_name} by {caller}: {end}")
    assert differences == []
    assert count == 18 * len(methods())


def test_a_jobs_program_is_offered_to_those_alone_who_may_export_its_model() -> None:
    offering_methods = {
        method.name
        for method in methods()
        for field in method.output_type.fields
        if field.message_type is job_pb2.ModelFile.DESCRIPTOR
    }
    assert offering_methods == {"ResolveModel"}
    assert ADMITTED["ResolveModel"] == {"owner", "operator"}


def methods() -> list[Any]:
    """Every call there is, those that change what others need last."""
    services = [
        *job_pb2.DESCRIPTOR.services_by_name.values(),
        *node_pb2.DESCRIPTOR.services_by_name.values(),
        *payments_pb2.DESCRIPTOR.services_by_name.values(),
        *serving_pb2.DESCRIPTOR.services_by_name.values(),
    ]

    def place(method: Any) -> int:
        return LAST.index(method.name) + 1 if method.name in LAST else 0

    return sorted((each for service in services for each in service.methods), key=place)


def refusals(method: Any) -> set[str]:
    """Endings of a call that was not admitted."""
    endings = set(REFUSALS)
    if method.containing_service.name == "NodeService":
        endings |= {"NODE_UNKNOWN", "NODE_REVOKED"}
    # gRPC hides a refusal behind INTERNAL where a write of the client meets it.
    return endings | {"INTERNAL"} if method.client_streaming else endings


def may_call(method: Any, caller: str) -> bool:
    """Whether the caller is to be admitted."""
    if method.containing_service.name == "NodeService" and method.name != "Join":
        return caller in NODE_PORT
    return caller in ADMITTED.get(method.name, {"operator"})
