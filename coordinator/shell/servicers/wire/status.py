"""The one place where a refusal becomes a gRPC status with its numbered reason."""

from typing import NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from hypergpu.errors import HyperGPUError

DOMAIN = "hypergpu"
DETAILS_KEY = "grpc-status-details-bin"

_CODES = {code.name: code for code in grpc.StatusCode}


def rich_status(refusal: HyperGPUError) -> status_pb2.Status:
    """The refusal as `google.rpc.Status` with an `ErrorInfo` of number, detail and fix."""
    details = error_details_pb2.ErrorInfo(
        reason=refusal.reason.name,
        domain=DOMAIN,
        metadata={
            "number": str(refusal.reason.number),
            "detail": refusal.detail,
            "fix": refusal.fix,
        },
    )
    packed = any_pb2.Any()
    packed.Pack(details)
    code = _CODES[refusal.reason.status]
    return status_pb2.Status(code=code.value[0], message=str(refusal), details=[packed])


async def abort(
    context: "grpc.aio.ServicerContext[bytes, bytes]", refusal: HyperGPUError
) -> NoReturn:
    """End the call with the refusal."""
    await context.abort(
        _CODES[refusal.reason.status],
        str(refusal),
        trailing_metadata=((DETAILS_KEY, rich_status(refusal).SerializeToString()),),
    )
    raise AssertionError("abort always raises")
