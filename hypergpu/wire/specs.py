"""Signed specs on the wire: the one translation that both ends use."""

from hypergpu.signed_spec import KeySuccession, SignedSpec
from hypergpu.v1 import spec_pb2


def spec_message(signed: SignedSpec) -> spec_pb2.SignedSpec:
    """A signed spec on the wire."""
    return spec_pb2.SignedSpec(
        spec=signed.spec,
        public_key=signed.public_key,
        signature=signed.signature,
        successions=map(succession_message, signed.successions),
    )


def spec_value(message: spec_pb2.SignedSpec) -> SignedSpec:
    """A signed spec off the wire, of which nothing is checked."""
    return SignedSpec(
        message.spec,
        message.public_key,
        message.signature,
        tuple(map(succession_value, message.successions)),
    )


def succession_message(before: KeySuccession) -> spec_pb2.KeySuccession:
    """A key that names the next one, on the wire."""
    return spec_pb2.KeySuccession(public_key=before.public_key, signature=before.signature)


def succession_value(message: spec_pb2.KeySuccession) -> KeySuccession:
    """A key that names the next one, off the wire."""
    return KeySuccession(message.public_key, message.signature)
