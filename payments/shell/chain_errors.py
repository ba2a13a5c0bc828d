"""Errors of a chain's RPC, for code that must load without web3."""


class ChainError(Exception):
    """The chain could not be asked, or gave no usable answer: it is asked again later."""


class ChainUnreachableError(ChainError):
    """The RPC did not answer, or not as a chain's RPC does."""


class CallRefusedError(ChainError):
    """The RPC or a contract refused a call."""

    def __init__(self, message: str, code: int = 0, revert: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.revert = revert
        """The contract's error; empty: none, or the RPC does not say."""

    @property
    def is_revert(self) -> bool:
        """Whether a contract refused, as opposed to the RPC."""
        return bool(self.revert) or self.code == _REVERTED or "revert" in str(self).lower()


_REVERTED = 3
"""JSON-RPC's code of a call that a contract refused."""
