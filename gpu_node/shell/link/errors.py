"""gRPC errors back into numbered errors."""

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError, Reason

_DETAILS_KEY = "grpc-status-details-bin"


def rejection_in(broken: Exception) -> HyperGPUError | None:
    """The numbered error, if it is one or the coordinator rejected a call with one."""
    if isinstance(broken, HyperGPUError):
        return broken
    if not isinstance(broken, grpc.aio.AioRpcError):
        return None
    packed = dict(broken.trailing_metadata() or ()).get(_DETAILS_KEY)
    if not isinstance(packed, bytes):
        return None
    found = error_details_pb2.ErrorInfo()
    try:
        status = status_pb2.Status.FromString(packed)
        if not any(detail.Unpack(found) for detail in status.details):
            return None
    except DecodeError:
        return None
    detail = found.metadata["detail"] or status.message
    if found.reason in Reason.__members__:
        return HyperGPUError(Reason[found.reason], detail, fix=found.metadata["fix"])
    # A newer coordinator has reasons that this node does not know: its text is complete.
    return HyperGPUError(Reason.CALL_BROKEN, f"{found.reason}: {detail}")


def describe_error(broken: Exception) -> str:
    """A broken call in a few words."""
    if (rejection := rejection_in(broken)) is not None:
        return f"{rejection.reason.name}: {rejection.detail}"
    if isinstance(broken, grpc.aio.AioRpcError):
        return f"{broken.code().name}: {broken.details() or 'no details'}"
    return f"{type(broken).__name__}: {broken}"
