"""Identifiers that processes exchange: strings and numbers, each with one meaning."""

import re
from typing import NewType

JobId = NewType("JobId", str)
"""``job-`` and 12 lower-case hex digits."""

NodeId = NewType("NodeId", str)
"""``0x`` and 40 lower-case hex digits: the Ethereum address of the node's identity key."""

TokenId = NewType("TokenId", str)
"""12 lower-case hex digits."""

Digest = NewType("Digest", str)
"""BLAKE3-256 of some bytes as 64 lower-case hex digits; 32 bytes on the wire."""

Slot = NewType("Slot", int)
"""A participant's number within one job, given in order of joining. It keys data and seeds."""

Address = NewType("Address", str)
"""``0x`` and 40 lower-case hex digits: an account or a contract on an EVM chain."""

Keccak = NewType("Keccak", str)
"""Keccak-256 of some bytes as 64 lower-case hex digits, for chains, which have no BLAKE3."""

JobKey = NewType("JobKey", str)
"""A job's name in receipts and on chain, 64 lower-case hex digits: it holds the job's owner."""

DATA_NAME_FORM = "1 to 63 lower-case letters, digits, '-' and '_', the first no '-' or '_'"
_DATA_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def is_data_name(text: str) -> bool:
    """Whether a text may name a data set that stays on nodes."""
    return _DATA_NAME.fullmatch(text) is not None
