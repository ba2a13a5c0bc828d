"""gRPC errors back into numbered refusals."""

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError, Reason

_DETAILS_KEY = "grpc-status-details-bin"


def refusal_in(broken: grpc.aio.AioRpcError) -> HyperGPUError | None:
    """The coordinator's refusal; None when the call just broke."""
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
    # A newer coordinator has reasons that this node does not know: its text still says it all.
    return HyperGPUError(Reason.CALL_BROKEN, f"{found.reason}: {detail}")


def why(broken: Exception) -> str:
    """A broken call in a few words."""
    if isinstance(broken, HyperGPUError):
        return f"{broken.reason.name}: {broken.detail}"
    if isinstance(broken, grpc.aio.AioRpcError):
        refused = refusal_in(broken)
        if refused is not None:
            return why(refused)
        return f"{broken.code().name}: {broken.details() or 'no details'}"
    return f"{type(broken).__name__}: {broken}"
