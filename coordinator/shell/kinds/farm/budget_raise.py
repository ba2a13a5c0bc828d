"""Reads what a user asks of a running farm job's settings: a larger budget, and nothing else."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from coordinator.core.farm.events import BudgetRaised
from coordinator.core.farm.state import FarmJob
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.spec_keys import read_spec
from hypergpu.farm.work_spec import request_conflict
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Milliseconds, Wei

BUDGET = "budget"


def raised_budget(
    job: FarmJob, parameters: Mapping[str, str], signed_spec: SignedSpec | None, now_s: int
) -> BudgetRaised:
    """The event of a budget that is raised.

    Args:
        job: The job.
        parameters: As the user states them, with values as JSON.
        signed_spec: The order with the new budget; None: it is not signed.
        now_s: Unix time.

    Raises:
        HyperGPUError: REQUEST_INVALID, another setting, or no amount; SIGNATURE_INVALID, the order
            differs from the job in more than its budget.
    """
    if parameters.keys() != {BUDGET}:
        names = ", ".join(sorted(parameters.keys() - {BUDGET})) or "nothing"
        detail = f"of a running farm job the budget alone can be changed, not {names[:200]}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="set budget=AMOUNT")
    request = replace(job.request, budget=_amount(parameters[BUDGET]))
    request.check()
    if signed_spec is not None:
        spec = read_spec(signed_spec)
        if reason := request_conflict(spec, request, job.owner, now_s):
            fix = "sign the order of the job with its new budget"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, reason, fix=fix)
    return BudgetRaised(at_ms=Milliseconds(0), budget=request.budget, spec=signed_spec)


def _amount(text: str) -> Wei:
    """An amount as JSON, a number or the text of one: numbers of this size are no floats."""
    try:
        return Wei(int(str(msgspec.json.decode(text, type=int | str))))
    except (msgspec.MsgspecError, ValueError) as error:
        detail = f"the budget {text[:80]} is no whole number"
        fix = "state it in the smallest unit of money, such as budget=2000"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix) from error
