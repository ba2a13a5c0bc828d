"""A batch's input, line by line."""

import json
from pathlib import Path

import pytest

from hypergpu.user.serving.batch_forms import (
    ERRORS_MOST,
    USUAL_LIMITS,
    InputFaultsError,
    InputLimits,
    batch_lines,
    window_seconds,
)

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", **changes: object) -> str:
    body = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "tiny"}}
    return json.dumps({**body, **changes})


def faults(path: Path, text: str, limits: InputLimits = USUAL_LIMITS) -> list[tuple[str, int]]:
    path.write_text(text, "utf-8")
    with pytest.raises(InputFaultsError) as error:
        batch_lines(path, CHAT, limits)
    return [(fault.code, fault.line) for fault in error.value.faults]


def test_lines_keep_their_numbers_and_bodies(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text(f"{line('a')}\n\n{line('b')}", "utf-8")
    lines = batch_lines(path, CHAT)
    assert [(each.number, each.custom_id) for each in lines] == [(1, "a"), (3, "b")]
    assert json.loads(lines[0].body) == {"model": "tiny"}


def test_each_line_that_is_not_right_is_named(tmp_path: Path) -> None:
    texts = [line("a"), "no json", line("b", url="/v1/files"), line("a"), line("c", method="GET")]
    assert faults(tmp_path / "input", "\n".join(texts)) == [
        ("invalid_json_line", 2),
        ("mismatched_url", 3),
        ("duplicate_custom_id", 4),
        ("invalid_json_line", 5),
    ]


def test_an_input_has_lines_but_not_too_many(tmp_path: Path) -> None:
    path = tmp_path / "input"
    assert faults(path, "\n") == [("empty_file", 1)]
    assert len(faults(path, "x\n" * 100)) == ERRORS_MOST
    few = InputLimits(lines=2)
    assert faults(path, "\n".join(map(line, "abcd")), few) == [("too_many_requests", 3)]
    short = InputLimits(line_bytes=200)
    assert faults(path, line(body={"text": "x" * 300}), short) == [("line_too_long", 1)]


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("24h", 86_400), ("7d", 604_800), ("0h", None), ("31d", None), ("h", None), ("", None)],
)
def test_windows_are_hours_or_days(window: str, seconds: int | None) -> None:
    assert window_seconds(window) == seconds
