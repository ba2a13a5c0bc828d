"""Contradictions in the pay settings, and the escrow of a job that names none."""

from collections.abc import Iterator

from msgspec.structs import replace

from hypergpu.jobfile.limits import LIMITS
from hypergpu.jobfile.problem import Problem
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.statements.domain import AMOUNT_MOST


def pay_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield settings of ``[pay]`` that contradict each other or the work."""
    pay, training = spec.pay, spec.training
    if pay.unit_price <= 0:
        for name in ("escrow", "judged"):
            if getattr(pay, name) != getattr(Pay(), name):
                what = f"{name} does nothing where nothing is paid"
                yield Problem(f"pay.{name}", what, f"set unit_price in [pay], or remove {name}")
        return
    a_round = pay.most_for(training.inner_steps * training.batch_size * training.nodes)
    if 0 < pay.escrow < a_round:
        what = f"{pay.escrow} does not cover the first round, which may cost {a_round}"
        fix = f"set at least {a_round}, or 0 for what the whole job may cost; or lower unit_price"
        yield Problem("pay.escrow", what, fix)
    # One that is named has a range of its own.
    if not pay.escrow and spec.escrow > AMOUNT_MOST:
        what = (
            f"the whole job may cost {spec.escrow}, and the ledger holds an escrow of at most"
            f" {AMOUNT_MOST}"
        )
        most = AMOUNT_MOST * 100 // spec.most_samples
        fix = f"set unit_price to at most {most}; or fewer rounds; or name an escrow in [pay]"
        yield Problem("pay.unit_price", what, fix)


def covering(spec: JobSpec, nodes: int) -> JobSpec:
    """Return the job with an escrow for all known nodes, where its file names none.

    A plan divides the stated work among all nodes; else each adds as much as the others.

    Args:
        spec: Of the job.
        nodes: That could take work as it begins.
    """
    stated = spec.training.nodes
    if not spec.pay.unit_price or spec.pay.escrow or spec.strategy == "aware" or nodes <= stated:
        return spec
    most = spec.pay.most_for(spec.stated_samples // stated * nodes)
    escrow = min(most, int(LIMITS["pay.escrow"].most))
    return replace(spec, pay=replace(spec.pay, escrow=escrow))
