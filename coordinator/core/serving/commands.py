"""Commands of served models beside those of every leased work."""

import msgspec

from hypergpu.ids import NodeId


class RequestSignature(msgspec.Struct, frozen=True):
    """Ask a node to sign a count of its tokens, if it is connected: `WindowSigned` answers."""

    window: int


class CheckAgain(msgspec.Struct, frozen=True):
    """Have a third node score an answer: `AnswerChecked` or `CheckUndecided` answers."""

    answer: int


class RefuseAnswer(msgspec.Struct, frozen=True):
    """An answer is not paid, nor is the window that it is in; its node's other open ones are
    checked.
    """

    answer: int
    reason: str


class RefuseStage(msgspec.Struct, frozen=True):
    """The window of a stage that waits for a check is not paid."""

    check: int
    """0: none waits, and what is counted now is not paid."""
    node: NodeId
    reason: str


ServeCommand = RequestSignature | CheckAgain | RefuseAnswer | RefuseStage
"""All of them."""
