"""A call to a served model, and the parts of its answer, as they travel between processes.

An answer is a run of tokens, each with the text that it adds. It depends on the call alone: the
draw of a token follows from the call's seed and the token's position, so that another replica can
go on where one was lost: it gets the call with the tokens that are out.
"""

from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.tuned_model import VersionOffer
from hypergpu.units import Bytes, Milliseconds

CALL_BYTES_MOST = Bytes(1 << 20)
"""Size of a packed call at most."""
PART_BYTES_MOST = Bytes(1 << 20)
"""Size of a packed part of an answer at most."""
NEW_TOKENS_MOST = 1 << 17
VECTOR_NUMBERS_MOST = 1 << 16
STOPS_MOST = 16
PRIORITY_MOST = 100
STOP_LENGTH_MOST = 200
MESSAGES_MOST = 4_096
TOP_TOKENS_MOST = 20
SEED_MOST = 2**63 - 1
MARGIN_MOST = 250_000
"""Margin that a token counts with at most, in millionths of a standard deviation of the logits."""
PREFIX_MS = Milliseconds(600_000)
"""How long replicas keep what a conversation read, from its last call on."""
PREFIX_SCOPE_LENGTH_MOST = 64
UNSTATED_SEED = -1
"""The caller states none: the coordinator draws it, so that no replica can choose it."""
_TEMPERATURE_MOST = 100.0
_Content = TypeVar("_Content")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    """0: always the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have so much probability."""
    top_k: int = 0
    """Only so many of the likeliest tokens; 0: all."""
    seed: int = 0
    """With a token's position it decides the draw."""


class AnswerClaim(msgspec.Struct, frozen=True):
    """A call with it is a check: its tokens that are out are another node's, and are scored."""

    first: int
    """Place of the first token that is scored."""
    has_ended: bool = False
    """Whether the model is said to have ended the answer after the last one."""


class CheckFigures(msgspec.Struct, frozen=True, array_like=True):
    """How far an answer's tokens are from those that whoever checks would have given."""

    tokens: int
    """Tokens that were scored, an end of the answer included."""
    margin: int
    """Sum of their margins, each `MARGIN_MOST` at most."""
    prompt_tokens: int
    """Tokens of the prompt, as whoever checks reads it."""
    claimed_prompt_tokens: int = 0
    """The same as whoever answered said; 0: it did not."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that a model is to go on with. Exactly one of ``messages``, ``text`` and ``tokens``
    is there.
    """

    messages: tuple[dict[str, Any], ...] | None = None
    """Turns of a chat, for the model's own chat template."""
    tools: tuple[dict[str, Any], ...] = ()
    """For the chat template."""
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    new_tokens_most: int | None = None
    """None: as many as the context has room for."""
    stops: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    top_tokens: int | None = None
    """Likeliest tokens told with each token beside its own log-probability; None: neither."""
    tokens_out: tuple[int, ...] = ()
    """Tokens of the answer that are out already, from another replica."""
    claim: AnswerClaim | None = None
    """None: it is to be answered."""
    wants_vector: bool = False
    """Whether the answer is the vector of ``text``, and no further text."""
    priority: int = 0
    """Among the calls that wait for a replica the higher goes first."""
    version: int | None = None
    """Rounds of training of the model that answers; None: the newest that the replica holds."""
    offer: VersionOffer | None = None
    """A version that the replica is to take up: then there is no prompt."""
    prefix_scope: str = ""
    """Calls of one scope may go on from what another one of them read. A caller names it as it
    likes, and the coordinator puts a digest of caller and name in its place; empty, at a replica:
    nothing is kept.
    """

    def check(self) -> None:
        """Check each field against its limits.

        Raises:
            HyperGPUError: REQUEST_INVALID, with the field and what would be right.
        """
        if self.offer is not None:
            return
        prompts = (self.messages, self.text, self.tokens)
        if sum(prompt is not None for prompt in prompts) != 1:
            detail = "a call has one of messages, text and tokens"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="give one prompt")
        for is_right, field, rule in _rules(self):
            if not is_right:
                detail = f"{field} of a call: {rule}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=f"change {field}")


def _rules(call: ModelCall) -> tuple[tuple[bool, str, str], ...]:
    rules, new_tokens = call.sampling, call.new_tokens_most
    return (
        (
            call.messages is None or 0 < len(call.messages) <= MESSAGES_MOST,
            "messages",
            f"1 to {MESSAGES_MOST}",
        ),
        (call.tokens is None or len(call.tokens) > 0, "tokens", "at least one"),
        (all(token >= 0 for token in call.tokens or ()), "tokens", "no negative number"),
        (
            0 <= rules.temperature <= _TEMPERATURE_MOST,
            "temperature",
            f"0 to {_TEMPERATURE_MOST:g}",
        ),
        (0 < rules.top_p <= 1, "top_p", "above 0 and at most 1"),
        (0 <= rules.top_k <= 1 << 20, "top_k", "0 to 1048576"),
        (UNSTATED_SEED <= rules.seed <= SEED_MOST, "seed", "0 to 2^63 - 1"),
        (
            new_tokens is None or 0 < new_tokens <= NEW_TOKENS_MOST,
            "new_tokens_most",
            f"1 to {NEW_TOKENS_MOST}",
        ),
        (
            abs(call.priority) <= PRIORITY_MOST,
            "priority",
            f"-{PRIORITY_MOST} to {PRIORITY_MOST}",
        ),
        (len(call.stops) <= STOPS_MOST, "stops", f"{STOPS_MOST} at most"),
        (
            all(0 < len(stop) <= STOP_LENGTH_MOST for stop in call.stops),
            "stops",
            f"1 to {STOP_LENGTH_MOST} characters each",
        ),
        (
            call.top_tokens is None or 0 <= call.top_tokens <= TOP_TOKENS_MOST,
            "top_tokens",
            f"0 to {TOP_TOKENS_MOST}",
        ),
        (
            call.claim is None or 0 <= call.claim.first <= len(call.tokens_out),
            "claim",
            "a place among the tokens that are out",
        ),
        (not call.wants_vector or call.text is not None, "text", "a vector is of a text"),
        (
            len(call.prefix_scope) <= PREFIX_SCOPE_LENGTH_MOST,
            "prefix_scope",
            f"{PREFIX_SCOPE_LENGTH_MOST} characters at most",
        ),
    )


class ReplicaReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model is loaded, and calls are answered."""

    tokens_most: int
    """Tokens of a prompt and its answer at most."""
    fingerprint: str
    """Digest of weights, type and libraries: on one device equal ones answer alike."""
    device: str
    continuation: str = "similar"
    """What another replica of the same fingerprint and device goes on with: ``identical`` tokens,
    ``similar`` ones, or ``none``, as it cannot go on.
    """
    weights_bytes: int = 0
    """Memory that the model takes; 0: not known."""
    token_bytes: int = 0
    """State that a conversation keeps for each of its tokens; 0: not known."""
    takes_checks: bool = False
    """Whether it scores answers of others: calls with a claim."""
    versions: tuple[int, ...] = ()
    """Versions of a training's model that it holds, by their rounds, the newest last; empty: its
    model is no training's.
    """
    updates: int = 0
    """Versions that it has taken up since it was loaded: above 0, calls of before go on."""
    keeps_prefixes: bool = False
    """Whether it keeps what calls with a scope read, for `PREFIX_MS` at most."""

    @property
    def newest_version(self) -> int | None:
        """The version that answers calls which state none."""
        return self.versions[-1] if self.versions else None

    def fingerprint_of(self, version: int | None) -> str:
        """What callers are told: the digest, the device, what holds where a replica is lost, and
        the round of a training's model.
        """
        text = f"{self.fingerprint}-{self.device}-{self.continuation}"
        return text if version is None else f"{text}-r{version}"


class CheckResult(msgspec.Struct, frozen=True, tag=True):
    """Figures of a check."""

    figures: CheckFigures


class VersionTaken(msgspec.Struct, frozen=True, tag=True):
    """A version that was offered is loaded."""

    version: int


class AnswerBegun(msgspec.Struct, frozen=True, tag=True):
    """The prompt was read."""

    prompt_tokens: int
    held_tokens: int = 0
    """Tokens of it that the replica had read before, for another call of the same scope."""


class AnswerVector(msgspec.Struct, frozen=True, tag=True):
    """The vector of a text, by a model of embeddings."""

    numbers: bytes
    """``float32``, little-endian, `VECTOR_NUMBERS_MOST` at most."""


class LikelyToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that could have come."""

    token: int
    text: str
    log_probability: float


class AnswerToken(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The next token."""

    token: int
    text: str = ""
    """Text that is out with it: none where a character or a stop may only have begun."""
    log_probability: float | None = None
    likely: tuple[LikelyToken, ...] = ()


class AnswerEnded(msgspec.Struct, frozen=True, tag=True):
    """No more comes."""

    finish: str
    """``stop``: the model or a stop ended it; ``length``: the limit or the context did."""
    text: str = ""
    """Rest of the text, which was held back in case that a stop had begun."""


class AnswerRefused(msgspec.Struct, frozen=True, tag=True):
    """The call is not answered, or not to its end."""

    reason: str
    is_lasting: bool = True
    """Whether another replica would refuse it, too."""
    is_too_long: bool = False
    """Whether the prompt leaves no room for the answer."""


AnswerPart = (
    ReplicaReady
    | AnswerBegun
    | AnswerToken
    | AnswerVector
    | AnswerEnded
    | AnswerRefused
    | CheckResult
    | VersionTaken
)
_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(ModelCall)
_parts: msgspec.msgpack.Decoder[list[AnswerPart]] = msgspec.msgpack.Decoder(list[AnswerPart])


def scope_digest(caller: str, name: str) -> str:
    """The scope that replicas get for what a caller named: other callers never have the same."""
    return blake3(msgspec.json.encode([caller, name])).hexdigest()[:32]


def pack_call(call: ModelCall) -> bytes:
    """The bytes of a call."""
    return _encoder.encode(call)


def unpack_call(body: bytes) -> ModelCall:
    """Read a call and check it.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large, malformed or out of its limits.
    """
    call = _unpack(body, CALL_BYTES_MOST, _calls, "a call")
    call.check()
    return call


def pack_parts(parts: "list[AnswerPart]") -> bytes:
    """The bytes of parts of one answer, in order."""
    return _encoder.encode(parts)


def unpack_parts(body: bytes) -> "list[AnswerPart]":
    """Read parts of an answer.

    Raises:
        HyperGPUError: REQUEST_INVALID, they are too large or malformed.
    """
    return _unpack(body, PART_BYTES_MOST, _parts, "an answer")


def _unpack(
    body: bytes, bytes_most: int, decoder: "msgspec.msgpack.Decoder[_Content]", what: str
) -> _Content:
    if len(body) > bytes_most:
        detail = f"{what} has {len(body):,} bytes, and {bytes_most:,} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="shorten it")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HyperGPUError(Reason.REQUEST_INVALID, f"{what} is malformed: {error}") from error
