"""Numbered errors of gRPC calls, as `google.rpc.Status` with an `ErrorInfo`, and a `RetryInfo`
where the caller is told when to come again.

This module does not import grpc: callers hand over the call's trailing metadata.
"""

from collections.abc import Iterable

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError

DOMAIN = "hypergpu"
DETAILS_KEY = "grpc-status-details-bin"


def error_metadata(error: HyperGPUError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata of a call that ends with this error."""
    fields = {"number": str(error.reason.number), "detail": error.detail, "fix": error.fix}
    error_detail = any_pb2.Any()
    error_detail.Pack(
        error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=fields)
    )
    code = code_pb2.Code.Value(error.reason.status)
    status = status_pb2.Status(code=code, message=str(error), details=[error_detail])
    if error.wait_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.wait_ms)
        status.details.add().Pack(retry)
    return ((DETAILS_KEY, status.SerializeToString()),)


def error_in(
    metadata: Iterable[tuple[str, str | bytes]] | None,
) -> HyperGPUError | RemoteFailureError | None:
    """The numbered error that ended a call; None: another error did."""
    status_bytes = dict(metadata or ()).get(DETAILS_KEY)
    if not isinstance(status_bytes, bytes):
        return None
    error_info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = status_pb2.Status.FromString(status_bytes)
        if not any(detail.Unpack(error_info) for detail in status.details):
            return None
        any(detail.Unpack(retry) for detail in status.details)
    except DecodeError:
        return None
    detail, fix = error_info.metadata["detail"] or status.message, error_info.metadata["fix"]
    if error_info.reason in Reason.__members__:
        wait_ms = max(0, retry.retry_delay.ToMilliseconds())
        return HyperGPUError(Reason[error_info.reason], detail, fix=fix, wait_ms=wait_ms)
    number = error_info.metadata["number"]
    if not number.isdecimal():
        return None
    fix = fix or "upgrade this program: pip install -U hypergpu"
    return RemoteFailureError(number=int(number), detail=detail, fix=fix)
