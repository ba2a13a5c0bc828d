"""What can be wrong with a chain's RPC, told apart, since each is answered differently."""


class RpcError(Exception):
    """Base of all: nothing is known about what became of the call."""


class RpcUnreachableError(RpcError):
    """Nobody answered in time. It may have reached the chain all the same."""


class RpcLimitedError(RpcError):
    """The RPC asks for fewer calls."""

    def __init__(self, text: str, wait_ms: int = 0) -> None:
        super().__init__(text)
        self.wait_ms = wait_ms
        """How long it asks to be left alone; 0 when it does not say."""


class RpcGarbledError(RpcError):
    """It answered what no chain answers: not JSON, too much, another question's answer."""


class RpcRefusedError(RpcError):
    """It understood the call and said no."""

    def __init__(self, method: str, code: int, message: str, words: bytes = b"") -> None:
        super().__init__(f"{method} was refused: {message} (code {code})")
        self.method = method
        self.code = code
        self.message = message
        self.words = words
        """What a contract said when it reverted; empty: nothing, or the RPC does not tell."""
