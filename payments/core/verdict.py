"""The arbiters' signed decision to void a node's share of an epoch."""

from struct import Struct

import msgspec

from hypergpu.ids import Digest, JobKey, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.statements.domain import address_bytes, word_bytes
from hypergpu.units import Wei

_TYPE = keccak(b"Verdict(bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence)")
_WORDS = Struct(">32s32s28xI12x20s16x16s32s")


class VoidVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a node in an epoch is void, and its stake loses a penalty."""

    job: JobKey
    epoch: int
    node: NodeId
    penalty: Wei
    """Most that is taken from free stake on top of the share."""
    evidence: Digest
    """Digest of a document that says why."""

    def encode_data(self) -> bytes:
        """See `hypergpu.statements.signing.Statement`."""
        return _WORDS.pack(
            _TYPE,
            word_bytes(self.job),
            self.epoch,
            address_bytes(self.node),
            self.penalty.to_bytes(16, "big"),
            word_bytes(self.evidence),
        )
