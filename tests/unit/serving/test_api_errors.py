"""Each refusal of the API says what to do."""

import ast
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.serving.answering import api_error

SERVING = Path(__file__).parents[3] / "hypergpu" / "user" / "serving"


def refusals() -> list[tuple[str, ast.Call]]:
    """Every place where the API makes an error, with its call."""
    return [
        (f"{path.name}:{node.lineno}", node)
        for path in sorted(SERVING.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ApiError"
    ]


def test_each_refusal_has_a_fix_or_is_a_numbered_error_that_has_one() -> None:
    places = [
        place
        for place, call in refusals()
        if not any(word.arg == "fix" for word in call.keywords)
        and "Fix:" not in ast.unparse(call)
        and ast.unparse(call.args[0]) != "text"  # of a numbered error: see below
    ]
    assert len(refusals()) > 20
    assert not places, places


def test_a_numbered_error_keeps_its_fix_and_the_time_to_ask_again() -> None:
    error = api_error(HyperGPUError(Reason.RATE_LIMITED, "too many calls", wait_ms=2_500))
    assert (error.status, error.headers) == (429, {"retry-after": "3"})
    assert "Fix: wait and try again" in str(error)
    busy = api_error(HyperGPUError(Reason.NOT_READY, "no replica was free"))
    assert (busy.status, busy.headers) == (503, {"retry-after": "5"})
