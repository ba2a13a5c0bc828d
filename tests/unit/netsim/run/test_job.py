"""When a job that paused itself is resumed."""

from netsim.run.job import WaitLimit


def test_a_wait_is_long_enough_after_its_limit_each_time_anew() -> None:
    timeout = WaitLimit(60)
    waits = [(0, True), (59, True), (60, True), (61, True), (119, True), (120, True)]
    found = [timeout.is_over(is_waiting=waiting, now_s=at_s) for at_s, waiting in waits]
    assert found == [False, False, True, False, False, True]


def test_a_wait_that_ended_begins_anew() -> None:
    timeout = WaitLimit(60)
    waits = [(0, True), (50, False), (55, True), (70, True), (115, True)]
    found = [timeout.is_over(is_waiting=waiting, now_s=at_s) for at_s, waiting in waits]
    assert found == [False, False, False, False, True]
