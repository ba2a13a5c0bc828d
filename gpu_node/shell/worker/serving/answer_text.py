"""The text of an answer, token by token: whole characters only, and nothing of a stop.

What is out after so many tokens follows from the tokens alone, so that a replica which goes on with
an answer comes to the same pieces.
"""

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 6
"""Tokens of the prompt before the answer: how a token reads may depend on those before it."""
_UNFINISHED = "�"


class AnswerText:
    """The text so far.

    Args:
        decode: Text of tokens without special ones; U+FFFD where a character is not whole.
        prompt: Tokens of the prompt.
        stops: Texts before which the answer ends.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int],
        stops: Sequence[str],
    ) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._first = 0
        """Tokens from here on are read again, as the newest may read otherwise with them."""
        self._read = len(self._tokens)
        """Tokens whose text was taken."""
        self._stops = tuple(stops)
        self._held = ""
        """Text in which a stop may have begun."""
        self.is_stopped = False
        """Whether a stop came. Then the answer is over."""

    def add(self, token: int) -> str:
        """Text that is out with one more token."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._first : self._read])
        text = self._decode(self._tokens[self._first :])
        if text.endswith(_UNFINISHED) or len(text) <= len(before):
            return ""
        self._first, self._read = self._read, len(self._tokens)
        return self._release(text[len(before) :])

    def end(self) -> str:
        """The rest of the text, once no further token comes."""
        before = self._decode(self._tokens[self._first : self._read])
        end = self._decode(self._tokens[self._first :])[len(before) :]
        text = self._release(end) if end else ""
        if self.is_stopped:
            return text
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        """What of the text may go out: all before a stop, or before what may begin one."""
        text = self._held + text
        self._held = ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return text[: min(places)]
        length = max((_begun_length(text, stop) for stop in self._stops), default=0)
        if length:
            self._held = text[-length:]
            return text[:-length]
        return text


def _begun_length(text: str, stop: str) -> int:
    """Length of the longest end of a text that a stop begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
