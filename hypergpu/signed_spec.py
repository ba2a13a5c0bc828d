"""A signed order as it travels. What is signed, by which keys: `hypergpu.farm.spec_keys`."""

import msgspec


class KeySuccession(msgspec.Struct, frozen=True):
    """A key that names the one which follows it."""

    public_key: bytes
    signature: bytes


class SignedSpec(msgspec.Struct, frozen=True):
    """A spec with the signature of its user, as it travels."""

    spec: bytes
    """A `WorkSpec` as msgpack."""
    public_key: bytes
    signature: bytes
    successions: tuple[KeySuccession, ...] = ()
    """Keys of the user before this one, the oldest first."""
