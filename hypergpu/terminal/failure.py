"""How a command ends when it fails: one numbered line with the fix, and an exit status."""

import sys

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError


def usage_error(detail: str, fix: str) -> HyperGPUError:
    """An argument that cannot be meant."""
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def report(failure: Exception) -> int:
    """Tell the person what went wrong; returns the exit status."""
    from hypergpu.jobfile.problem import JobFileError

    if isinstance(failure, JobFileError):
        for problem in failure.problems:
            _line(
                failure.reason.number,
                f"{problem.where or problem.key}: {problem.what}",
                problem.fix,
            )
        return failure.reason.exit_code
    if isinstance(failure, HyperGPUError):
        _line(failure.reason.number, failure.detail, failure.fix)
        return failure.reason.exit_code
    if isinstance(failure, RemoteFailureError):
        _line(failure.number, failure.detail, failure.fix)
        return failure.exit_code
    raise failure


def error_line(number: int, what: str, fix: str) -> str:
    """How every error reads. What ends in a question mark needs no full stop.

    A detail with a fix of its own, as a coordinator's reasons have, gets no second one.
    """
    if "Fix: " in what:
        return f"error {number}: {what}"
    ended = what.rstrip(".")
    return f"error {number}: {ended}{'' if ended.endswith('?') else '.'} Fix: {fix}"


def _line(number: int, what: str, fix: str) -> None:
    text = error_line(number, what, fix)
    if sys.stderr.isatty():
        from hypergpu.terminal.output import is_rich

        text = f"\x1b[31m{text}\x1b[0m" if is_rich() else text
    sys.stderr.write(f"{text}\n")
