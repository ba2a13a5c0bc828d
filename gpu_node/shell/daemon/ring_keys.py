"""Keys of this node's stages in rings: fresh ones, signed by its identity."""

from gpu_node.shell.worker.protocol import RingKey
from hypergpu.assignment import PackedAssignment
from hypergpu.crypto import IdentityKey
from hypergpu.rings.frame_cipher import generate_ring_secret, public_ring_key
from hypergpu.rings.ring_members import sign_ring_key
from hypergpu.rings.stage_work import STAGE_KIND


def ring_key_for(identity: IdentityKey, assignment: PackedAssignment) -> RingKey | None:
    """A key for one start of a stage: a worker that starts anew gets another one.

    None where the work is no stage.
    """
    if assignment.work.kind != STAGE_KIND:
        return None
    secret, lease = generate_ring_secret(), assignment.lease
    signature = sign_ring_key(identity, lease.job_id, lease.number, public_ring_key(secret))
    return RingKey(secret, signature)
