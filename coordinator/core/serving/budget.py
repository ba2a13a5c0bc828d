"""How far the budget and the funding of a served model reach. No call goes out whose answer might
not be paid for.
"""

from coordinator.core.serving.state import ServeJob
from hypergpu.journal.worth import samples_for
from hypergpu.serving.calls import NEW_TOKENS_MOST, ModelCall, pack_call
from hypergpu.token_counts import TokenCount

_SPECIAL_TOKENS = 16
"""Tokens that a tokenizer may add to a text."""
_TEMPLATE_TOKENS = 4_096
_MESSAGE_TOKENS = 64
_TEMPLATE_GROWTH = 4
"""A chat template may write tools with blanks and quotes of its own."""


def budget_units(job: ServeJob) -> int | None:
    """Units that may be paid in all; None: nothing limits them."""
    request, funding = job.request, job.funding
    limits: list[int] = []
    if request.unit_price:
        limits.append(samples_for(request.unit_price, request.budget))
    if funding is not None and funding.funded_units is not None:
        limits.append(funding.funded_units)
    return min(limits, default=None)


def due_units(job: ServeJob) -> int:
    """Units that are paid, or will be once their nodes have signed them."""
    return job.paid_units + sum(window.count.units for window in job.windows.values())


def spent_reason(job: ServeJob, needed_units: int, open_units: int = 0) -> str:
    """Why a call is not answered for want of money; empty: there is enough.

    Args:
        job: The model.
        needed_units: Units of the call at most.
        open_units: Units that are counted and not journalled yet, or set aside for open calls.
    """
    limit = budget_units(job)
    used_units = due_units(job) + open_units
    if limit is None or used_units + needed_units <= limit:
        return ""
    unit = job.terms.unit.value
    by_funding = job.funding is not None and job.funding.funded_units == limit
    source = "escrow" if by_funding else "budget"
    text = f"its {source} covers {limit} {unit}, of which {used_units} are counted or in use"
    why = job.funding.reason if by_funding and job.funding is not None else ""
    return f"{text}; the answer may take {needed_units}" + (f": {why}" if why else "")


def prompt_tokens_most(call: ModelCall) -> int:
    """Tokens that a call's prompt can have at most: a token is at least a byte of it."""
    if call.tokens is not None:
        return len(call.tokens)
    if call.text is not None:
        return len(call.text.encode("utf-8", "surrogatepass")) + _SPECIAL_TOKENS
    size_bytes = len(pack_call(call))
    messages = len(call.messages or ())
    return _TEMPLATE_GROWTH * size_bytes + _MESSAGE_TOKENS * messages + _TEMPLATE_TOKENS


def units_most(call: ModelCall, tokens_most: int, units_per_token: int = 1) -> int:
    """Units that the rest of an answer can have at most.

    Args:
        call: With the tokens that are out.
        tokens_most: Tokens of a prompt and its answer at most, of the replica.
        units_per_token: See `ServeRequest.units_per_token`. Read tokens are rounded up before,
            which is no less than what all stages of a ring count, however it is cut.
    """
    tokens_out = len(call.tokens_out)
    new_tokens = min(call.new_tokens_most or NEW_TOKENS_MOST, tokens_most) - tokens_out
    read_tokens = min(prompt_tokens_most(call) + tokens_out, tokens_most)
    tokens = TokenCount(prompt_tokens=read_tokens, new_tokens=max(0, new_tokens)).units
    return tokens * units_per_token
