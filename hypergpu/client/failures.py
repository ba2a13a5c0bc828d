"""gRPC errors back into numbered refusals."""

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError

DETAILS_KEY = "grpc-status-details-bin"
RESTARTING = frozenset({Reason.COORDINATOR_UNREACHABLE, Reason.NOT_READY})
"""Reasons that a coordinator gives while it is being restarted: trying again may help."""
AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


def explanation(broken: grpc.aio.AioRpcError, address: str) -> Exception:
    """What a failed call means, as an exception to raise."""
    if (numbered := _numbered_error(broken)) is not None:
        return numbered
    code, details = broken.code(), broken.details() or "no details"
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


def pause_s(idle_tries: int) -> float:
    """How long to wait before trying again: doubled each time, at most 5 s."""
    return float(min(5.0, 0.1 * 2**idle_tries))


def _numbered_error(broken: grpc.aio.AioRpcError) -> Exception | None:
    packed = dict(broken.trailing_metadata() or ()).get(DETAILS_KEY)
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
