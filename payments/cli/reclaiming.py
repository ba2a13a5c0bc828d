"""`ledger reclaim`: a job's free escrow goes back to its coordinator, after a wait."""

import asyncio
from collections.abc import Callable

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.terminal.output import confirm, say, say_json
from hypergpu.v1 import payments_pb2 as pb
from payments.cli.outcome import amount_text, time_text
from payments.cli.service import JobAt, PaymentsClient, open_payments_client, run

_LOOK_EACH_S = 0.5
_LOOKS = 60


class Reclaimed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/reclaimed/2"
):
    """State of a job's end on its ledger."""

    job: str
    purpose: str
    """Purpose of the queued transaction; empty: none was queued."""
    ends_at_unix_s: int
    """0: the announcement is not in a block yet."""
    free_escrow: str


def reclaim_job(at: JobAt, *, yes: bool, as_json: bool) -> None:
    """Announce a job's end; once its time has come, take what is free."""
    state, sentence = run(lambda: _announce_or_take(at, yes=yes))
    if as_json:
        say_json(state)
    else:
        say(sentence)


async def _announce_or_take(at: JobAt, *, yes: bool) -> tuple[Reclaimed, str]:
    async with open_payments_client(at) as payments:
        chain = await _chain(payments)
        free = amount_text(int(chain.free_escrow), chain.decimals)
        if not chain.ends_at_unix_s:
            question = (
                f"end {payments.job_id} on its ledger for good? Receipts that are not recorded"
                " when the wait is over are not paid"
            )
            confirm(question, yes=yes)
            purpose = await payments.request_reclaim()
            chain = await _wait(payments, lambda found: found.ends_at_unix_s > 0)
            when = time_text(chain.ends_at_unix_s) if chain.ends_at_unix_s else "a time to come"
            said = f"{payments.job_id} ends at {when}; run this again then to take what is free"
        elif chain.block_time_unix_s < chain.ends_at_unix_s:
            purpose, when = "", time_text(chain.ends_at_unix_s)
            said = f"{payments.job_id} ends at {when}; {free} is free now: run this again then"
        elif not int(chain.free_escrow):
            purpose, said = "", f"nothing of {payments.job_id} is free"
        else:
            purpose = await payments.reclaim()
            chain = await _wait(payments, lambda found: not int(found.free_escrow))
            is_back = not int(chain.free_escrow)
            said = f"{free} of {payments.job_id} " + ("is paid back" if is_back else "is queued")
        state = Reclaimed(
            job=payments.job_id,
            purpose=purpose,
            ends_at_unix_s=chain.ends_at_unix_s,
            free_escrow=chain.free_escrow,
        )
        return state, said


async def _chain(payments: PaymentsClient) -> pb.LedgerOnChain:
    ledger = await payments.ledger()
    if ledger.HasField("on_chain") and ledger.on_chain.is_open:
        return ledger.on_chain
    detail = f"{payments.job_id} is not open on a ledger: no escrow of it lies there"
    fix = "see its state: hypergpu ledger show JOB"
    raise HyperGPUError(Reason.JOB_PHASE, detail, fix=fix)


async def _wait(
    payments: PaymentsClient, is_reached: Callable[[pb.LedgerOnChain], bool]
) -> pb.LedgerOnChain:
    """The job on the ledger once a change is in a block, or as it is after half a minute."""
    chain = await _chain(payments)
    for _ in range(_LOOKS):
        if is_reached(chain):
            break
        await asyncio.sleep(_LOOK_EACH_S)
        chain = await _chain(payments)
    return chain
