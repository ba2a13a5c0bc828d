"""A world's job in virtual time, and what is said of its end."""

import msgspec

from netsim.network.world import WorldDescription
from netsim.network.world_file import parse_world
from netsim.run.report import summary_lines
from netsim.run.virtual import run_virtually


def world(nodes: int) -> WorldDescription:
    job = f'[job]\nworkload = "null"\n[job.training]\nrounds = 2\nnodes = {nodes}\n'
    return parse_world(job + '[[nodes]]\nprofile = "lan"\n', source="test", name="home")


def test_a_job_that_finished_is_told_with_its_own_phase() -> None:
    report = run_virtually(world(1))
    assert report.phase == "finished"
    assert report.is_good
    assert not msgspec.structs.replace(report, phase="stopped").is_good


def test_virtual_time_says_that_it_has_no_metric() -> None:
    report = run_virtually(world(1))
    assert (report.metric, report.to_target, report.evaluations) == (None, None, ())
    assert "no metric" in report.note
    assert [each.ended_ms for each in report.rounds] == [
        report.rounds[0].duration_ms,
        report.rounds[0].duration_ms + report.rounds[1].duration_ms,
    ]
    assert f"note       {report.note}" in summary_lines(report)


def test_virtual_time_trains_to_the_end_whatever_the_target() -> None:
    job = '[job]\nworkload = "digits-softmax"\n[job.training]\nrounds = 9\n'
    text = f'{job}[job.evaluation]\nevery = 1\ntarget = 0.7\n[[nodes]]\nprofile = "lan"\n'
    report = run_virtually(parse_world(text, source="test", name="home"))
    assert (len(report.rounds), report.target) == (9, 0.7)
    assert "target" not in report.reason
