"""Job files and settings that are meant to break or to stall their reader."""

import json
import time
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.reading import (
    parameter_words,
    parse_job,
    parse_spec_json,
    read_job_file,
    spec_json,
    with_parameters,
)
from hypergpu.jobfile.toml import PROBLEMS_MOST, JobFileError
from hypergpu.jobfile.toml_text import TEXT_LENGTH_MOST

HEAD = 'workload = "digits-softmax"\n'
DIGITS = "9" * 400
MANY = 20_000
MOST_S = 20.0
"""A bound that only a reader of quadratic cost exceeds, on however busy a machine."""


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobFileError) as failure:
        parse_job(text, source="job.toml")
    return [str(problem) for problem in failure.value.problems]


@pytest.mark.parametrize(
    "text",
    [
        f"[training]\nrounds = {DIGITS}\n",
        f"[training]\nrounds = -{DIGITS}\n",
        f"[training]\nrounds = 0x{'f' * 9000}\n",
        f"[training]\nrounds = {'9' * 5000}\n",
        f"[inner]\nlearning_rate = {DIGITS}\n",
        f"[pay]\nunit_price = {DIGITS}\n",
        f"[round]\ndeadline = {DIGITS}\n",
        f'[round]\ndeadline = "{DIGITS}s"\n',
        f"[options]\nwidth = {DIGITS}\n",
        f"[options]\nwidth = [{DIGITS}]\n",
        f"name = {DIGITS}\n",
        "[inner]\nlearning_rate = 1e400\n",
    ],
)
def test_number_of_400_digits_is_a_problem_with_a_fix_and_not_told_in_full(text: str) -> None:
    (problem,) = problems_of(f'workload = "digits-mlp"\n{text}')
    assert " Fix: " in problem
    assert len(problem) < 300


@pytest.mark.parametrize("key", ["training.rounds", "inner.learning_rate", "round.deadline"])
@pytest.mark.parametrize("value", [DIGITS, f"-{DIGITS}", "9" * 5000, "1e400", f'"{DIGITS}s"'])
def test_change_to_a_number_of_400_digits_is_refused(key: str, value: str) -> None:
    spec = parse_job(HEAD)
    for changes in ({key: value}, parameter_words([f"{key}={value}"])):
        with pytest.raises(JobFileError) as failure:
            with_parameters(spec, changes)
        assert len(str(failure.value)) < 400


@pytest.mark.parametrize("value", [DIGITS, f"-{DIGITS}", "9" * 5000, "1e400", "NaN", "[" * 10_000])
def test_spec_of_the_wire_with_such_a_number_is_refused(value: str) -> None:
    for key in ("rounds", "inner_steps"):
        tree = json.loads(spec_json(parse_job(HEAD)))
        tree["training"][key] = "HERE"
        with pytest.raises(JobFileError):
            parse_spec_json(json.dumps(tree).replace('"HERE"', value))


def test_option_of_the_wire_with_such_a_number_is_refused() -> None:
    tree = json.loads(spec_json(parse_job('workload = "digits-mlp"\n')))
    tree["options"] = {"width": "HERE"}
    with pytest.raises(JobFileError, match="a number of more than 18 digits"):
        parse_spec_json(json.dumps(tree).replace('"HERE"', DIGITS))


COSTLY = {
    "a dotted key": ".".join("a" * 100_000) + " = 1\n",
    "a dotted header": "[" + ".".join("a" * 100_000) + "]\n",
    "a dotted key with blanks": "a   .   " * 30_000 + "a = 1\n",
    "a quoted dotted key": '"a".' * 60_000 + "a = 1\n",
    "a dotted key of long parts": ('"' + "b" * 80 + '".') * 3_000 + "a = 1\n",
    "keys below deep headers": "".join(f"[{'a.' * 30}b{n}]\nc = 1\n" for n in range(3_000)),
    "quotes in a text": 'a = "' + '\\"' * 100_000 + '"\n',
    "blanks in a header": "[a" + " " * 100_000 + "." + " " * 50_000 + "b]\n",
    "blanks": " " * 200_000 + "nme = 1\n",
    "brackets": "a = " + "[" * 200_000,
    "inline tables": "a = " + "{a = " * 40_000,
    "tables of an array": "[[a]]\nb = 1\n" * 18_000,
    "many keys": "".join(f"k{n} = 1\n" for n in range(MANY)),
    "too much": "#" * (TEXT_LENGTH_MOST + 1),
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY.keys())
def test_text_that_is_costly_to_parse_is_refused_soon(text: str) -> None:
    begun_s = time.thread_time()
    assert problems_of(HEAD + text)
    assert time.thread_time() - begun_s < MOST_S


@pytest.mark.parametrize("header", ["", "[training]\n", "[options]\n"])
def test_of_20_000_unknown_keys_the_first_20_and_a_count_are_told(header: str) -> None:
    lines = "".join(f"k{number} = 1\n" for number in range(MANY))
    *problem_lines, count = problems_of(HEAD + header + lines)
    assert len(problem_lines) == PROBLEMS_MOST == 20
    first_line = 2 + header.count("\n")
    for number, problem in enumerate(problem_lines):
        assert problem.startswith(f"job.toml:{first_line + number} ")
        assert f"k{number}" in problem
    assert count == "job.toml: there are 19,980 more problems. Fix: correct these first"


def test_byte_order_mark_is_passed_over_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert read_job_file(file) == parse_job(HEAD)
    file.write_bytes(b"\xef\xbb\xbfnme = 1\n" + HEAD.encode())
    with pytest.raises(JobFileError, match=r"job\.toml:1 nme: there is no key nme"):
        read_job_file(file)


def test_file_without_an_end_is_refused_and_not_read_to_it() -> None:
    with pytest.raises(HyperGPUError, match="too large for a job file"):
        read_job_file(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'workload = "text-gpt"\n[options]\nheads = 3\n',
            "options.heads of text-gpt is 3 and options.width is 128; heads must divide width",
        ),
        (
            'workload = "text-gpt"\n[options]\nwidth = 9\n',
            "options.heads of text-gpt is 4 and options.width is 9; heads must divide width",
        ),
        (
            'workload = "digits-cnn"\n[options]\nchannels = 6\n',
            "options.channels of digits-cnn is 6; it must be a multiple of 4",
        ),
        (
            'workload = "mnist-cnn"\n[options]\nchannels = 6\n',
            "options.channels of mnist-cnn is 6; it must be a multiple of 4",
        ),
    ],
)
def test_options_that_no_model_can_have_are_refused_before_a_node_tries(
    text: str, expected: str
) -> None:
    (problem,) = problems_of(text)
    assert expected in problem


def test_options_are_judged_together() -> None:
    spec = parse_job('workload = "text-gpt"\n[options]\nheads = 3\nwidth = 9\n')
    assert spec.options == {"heads": 3, "width": 9}
