"""What whoever submits a job is told of how it counts, in one line."""

import pytest

from hypergpu.jobfile.notes import submit_note
from hypergpu.jobfile.reading import parse_job

HEAD = 'workload = "digits-softmax"\n'
WORK = "[training]\nrounds = 4\ninner_steps = 5\nbatch_size = 10\nnodes = 3\n"
COUNTED = 'strategy "aware": 600 samples (4 x 5 x 10 x 3 nodes) in as many rounds as plans make'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WORK, COUNTED),
        (
            f'{WORK}[codec]\nup = "int8"\n[round]\ndeadline = "1500ms"\n',
            f"{COUNTED}; as stated: codec.up int8, deadline 1500 ms",
        ),
        (f"{WORK}[pay]\nunit_price = 7\n", f"{COUNTED}; escrow 53"),
        (
            f"{WORK}[pay]\nunit_price = 7\nescrow = 42\n",
            f"{COUNTED}; escrow 42, and the work may cost 53",
        ),
        (
            f"{WORK}[round]\nquorum = 1\n",
            f"{COUNTED}; with quorum = 1 each round waits for its slowest node",
        ),
    ],
)
def test_a_planned_job_is_told_in_samples(text: str, expected: str) -> None:
    assert submit_note(parse_job(HEAD + text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("[round]\nquorum = 0.5\n", ""),
        (
            "[round]\nquorum = 1\n",
            'strategy "diloco": with quorum = 1 each round waits for its slowest node',
        ),
        (
            '[round]\ndeadline = "60s"\n',
            'strategy "diloco": each round may wait 60 s for slow nodes, as the deadline states',
        ),
    ],
)
def test_fixed_steps_are_told_where_the_user_chose_to_wait(text: str, expected: str) -> None:
    assert submit_note(parse_job(f'{HEAD}strategy = "diloco"\n{text}')) == expected
