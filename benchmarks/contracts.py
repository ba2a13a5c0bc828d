"""The contracts under random calls and with mistakes put in: do the books hold, do tests notice?"""

from benchmarks.ours.table import ResultTable
from contracts.compile import sources
from contracts.tools.forge import random_calls
from contracts.tools.mutate import EQUIVALENT, one_of, score

_CALLS = 1_000_000
_QUICK_PART = 10


def run(is_quick: bool) -> ResultTable:
    """Make a million calls and judge every mutant; quick, a tenth of both."""
    part = _QUICK_PART if is_quick else 1
    campaign = random_calls(_CALLS // part)
    mutation_score = score(one_of(part, sources()))
    return ResultTable(
        title="The contracts: random calls, and mistakes put in",
        columns=("", "value"),
        rows=[
            ["random calls, the invariants looked at after every tenth", f"{campaign.calls:,}"],
            ["invariants broken", f"{campaign.is_broken:d}"],
            ["mutants that compile and change the code", f"{mutation_score.judged_count}"],
            ["mutation score, %", f"{mutation_score.percent:.1f}"],
        ],
        metrics={
            "invariant_calls": float(campaign.calls),
            "invariants_broken": float(campaign.is_broken),
            "mutation_score": mutation_score.percent,
        },
        notes=(
            "Calls of two jobs, three nodes and six epochs in any order; none may revert.",
            "The score counts every mutant that no test notices, also those that change nothing",
            f"to notice: {EQUIVALENT.relative_to(EQUIVALENT.parents[2])} says which.",
            *(f"survived: {mutant.name}" for mutant in mutation_score.survivors),
        ),
    )
