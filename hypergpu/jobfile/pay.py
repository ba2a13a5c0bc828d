"""The pay settings that cannot be meant."""

from collections.abc import Iterator

from hypergpu.jobfile.problem import Problem
from hypergpu.ledger.pay import AMOUNT_MOST
from hypergpu.spec import JobSpec, Pay


def pay_problems(spec: JobSpec) -> Iterator[Problem]:
    """Settings of ``[pay]`` that contradict each other or the work."""
    pay, training = spec.pay, spec.training
    if pay.unit_price <= 0:
        for name in ("escrow", "guaranteed_bps", "judged"):
            if getattr(pay, name) != getattr(Pay(), name):
                what = f"{name} does nothing where nothing is paid"
                yield Problem(f"pay.{name}", what, f"set unit_price in [pay], or remove {name}")
        return
    a_round = pay.most_for(training.inner_steps * training.batch_size * training.nodes)
    if 0 < pay.escrow < a_round:
        what = f"{pay.escrow} does not cover the first round, which may cost {a_round}"
        fix = f"set at least {a_round}, or 0 for what the whole job may cost; or lower unit_price"
        yield Problem("pay.escrow", what, fix)
    if spec.escrow > AMOUNT_MOST:
        what = (
            f"the whole job may cost {spec.escrow}, and the ledger holds an escrow of at most"
            f" {AMOUNT_MOST}"
        )
        most = AMOUNT_MOST * 100 // spec.most_samples
        fix = f"set unit_price to at most {most}; or fewer rounds; or name an escrow in [pay]"
        yield Problem("pay.unit_price", what, fix)
