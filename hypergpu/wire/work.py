"""Work of kinds other than training on the wire: the one translation that both ends use."""

from hypergpu.assignment import INPUTS_MOST, PackedAssignment
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Slot
from hypergpu.packed_work import CONTENT_BYTES_MOST, PackedWork
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.messages import (
    blob_message,
    blob_value,
    lease_message,
    lease_value,
    terms_message,
    terms_value,
)
from hypergpu.wire.specs import spec_message, spec_value


def work_message(work: PackedWork) -> work_pb2.PackedWork:
    """Packed work on the wire."""
    return work_pb2.PackedWork(kind=work.kind, body=work.body)


def work_value(message: work_pb2.PackedWork) -> PackedWork:
    """Packed work off the wire, of which nothing is read but its size.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large.
    """
    work = PackedWork(message.kind, message.body)
    work.check_size()
    return work


def work_assignment_message(assignment: PackedAssignment) -> node_pb2.WorkAssignment:
    """An assignment of packed work on the wire."""
    return node_pb2.WorkAssignment(
        lease=lease_message(assignment.lease),
        slot=assignment.slot,
        reason=assignment.reason,
        work=work_message(assignment.work),
        inputs=[blob_message(blob) for blob in assignment.inputs],
        terms=None if assignment.terms is None else terms_message(assignment.terms, epoch=0),
        spec=None if assignment.spec is None else spec_message(assignment.spec),
        content_bytes_most=assignment.content_bytes_most,
        after_lease=assignment.after_lease,
    )


def work_assignment_value(message: node_pb2.WorkAssignment) -> PackedAssignment:
    """An assignment of packed work off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, the work is too large, has too many inputs or a digest that
            is none, or is to be signed under terms that are not the job's.
    """
    if len(message.inputs) > INPUTS_MOST:
        detail = f"packed work has {len(message.inputs)} inputs, and {INPUTS_MOST} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    lease = lease_value(message.lease)
    terms = terms_value(message.terms) if message.HasField("terms") else None
    if terms is not None and not terms.match(lease.job_id):
        detail = f"the terms are not those of {lease.job_id[:80]!r} in {terms.unit.value}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return PackedAssignment(
        lease=lease,
        slot=Slot(message.slot),
        work=work_value(message.work),
        inputs=tuple(blob_value(blob) for blob in message.inputs),
        terms=terms,
        spec=spec_value(message.spec) if message.HasField("spec") else None,
        content_bytes_most=min(message.content_bytes_most, CONTENT_BYTES_MOST),
        after_lease=message.after_lease,
        reason=message.reason,
    )
