"""gRPC errors back into numbered refusals."""

import contextlib
from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError

DETAILS_KEY = "grpc-status-details-bin"
AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


@contextlib.contextmanager
def explained(address: str) -> Iterator[None]:
    """Turn a failed call inside into the refusal that the coordinator meant.

    Raises:
        HyperGPUError: The coordinator's numbered reason, or what the broken call amounts to.
        RemoteFailureError: A numbered reason that this version does not know.
    """
    try:
        yield
    except grpc.RpcError as broken:
        raise explanation(broken, address) from broken


def explanation(broken: grpc.RpcError, address: str) -> Exception:
    """What a failed call means, as an exception to raise."""
    if (numbered := _numbered(broken)) is not None:
        return numbered
    code, details = _code(broken), _details(broken)
    if code in AWAY:
        why = "it did not answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details
        return HyperGPUError(Reason.COORDINATOR_UNREACHABLE, f"the coordinator at {address}: {why}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        detail = (
            f"the coordinator at {address} does not know this call: it is older than this program,"
            " or this is its port for nodes"
        )
        return HyperGPUError(Reason.VERSION_MISMATCH, detail)
    return HyperGPUError(
        Reason.CALL_BROKEN, f"the coordinator at {address}: {code.name}: {details}"
    )


def is_away(broken: grpc.RpcError) -> bool:
    """Whether trying again later can help: nobody answered, or nobody is ready."""
    return _code(broken) in AWAY


def _code(broken: grpc.RpcError) -> grpc.StatusCode:
    code = _answer(broken, "code")
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _details(broken: grpc.RpcError) -> str:
    return str(_answer(broken, "details") or "no details")


def _answer(broken: grpc.RpcError, name: str) -> object:
    """What the failed call says of itself. Each is a `grpc.Call` too, which no stub tells."""
    method = getattr(broken, name, None)
    return method() if callable(method) else None


def _numbered(broken: grpc.RpcError) -> Exception | None:
    metadata = _answer(broken, "trailing_metadata")
    packed = dict(metadata).get(DETAILS_KEY) if isinstance(metadata, tuple) else None
    if not isinstance(packed, bytes):
        return None
    found = error_details_pb2.ErrorInfo()
    try:
        status = status_pb2.Status.FromString(packed)
        if not any(detail.Unpack(found) for detail in status.details):
            return None
    except DecodeError:
        return None
    if found.reason in Reason.__members__:
        detail, fix = found.metadata["detail"], found.metadata["fix"]
        return HyperGPUError(Reason[found.reason], detail or status.message, fix=fix)
    number = found.metadata["number"]
    if not number.isdecimal():
        return None
    return RemoteFailureError(
        number=int(number),
        detail=found.metadata["detail"] or status.message,
        fix=found.metadata["fix"] or "upgrade this program: pip install -U hypergpu",
    )
