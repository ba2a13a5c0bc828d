"""Every way in which a job file can be wrong says what, where and the fix."""

from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import (
    JobFileError,
    check_data_folder,
    parse_job,
    parse_spec_json,
    read_job_file,
    spec_json,
)
from hypergpu.jobfile.spec import JobSpec

HEAD = 'workload = "digits-softmax"\n'


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        parse_job(text, source="job.toml")
    return [str(problem) for problem in caught.value.problems]


def only_problem_of(text: str) -> str:
    found = problems_of(text)
    assert len(found) == 1, found
    return found[0]


def test_smallest_job_file_takes_every_default() -> None:
    assert parse_job(HEAD) == JobSpec(workload="digits-softmax")


def test_every_table_reaches_the_spec() -> None:
    spec = parse_job(
        'workload = "digits-cnn"\nname = "first"\n'
        "[options]\nchannels = 16\n"
        "[training]\nrounds = 3\nnodes = 2\n"
        '[inner]\nlearning_rate = 1\nschedule = "cosine"\n'
        "[outer]\nmomentum = 0.5\n"
        '[codec]\nup = "int8"\ndown = "fp32"\n'
        '[round]\ndeadline = "2m"\nquorum = 1\n'
        '[data]\nsharding = "dirichlet"\nalpha = 0.1\npartitions = 4\n'
        "[evaluation]\nevery = 2\n"
    )
    assert spec.options == {"channels": 16}
    assert (spec.training.rounds, spec.training.nodes) == (3, 2)
    assert spec.inner.learning_rate == 1.0
    assert spec.round.deadline_ms == 120_000
    assert (spec.codec.up, spec.codec.down) == ("int8", "fp32")
    assert (spec.data.alpha, spec.data.partitions) == (0.1, 4)


@pytest.mark.parametrize(
    ("written", "span_ms"), [("250ms", 250), ("60s", 60_000), ("1.5m", 90_000), ("1 h", 3_600_000)]
)
def test_deadline_is_a_duration_with_its_unit(written: str, span_ms: int) -> None:
    spec = parse_job(f'{HEAD}[round]\ndeadline = "{written}"\n')
    assert spec.round.deadline_ms == span_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('nme = "x"\n', "job.toml:2 nme: there is no key nme here. Fix: did you mean name?"),
        (
            "[training]\nround = 3\n",
            "job.toml:3 [training] round: there is no key round here. Fix: did you mean rounds?",
        ),
        (
            "[training]\nH = 3\n",
            "job.toml:3 [training] H: there is no key H here. Fix: did you mean inner_steps?",
        ),
        (
            "[outer]\nlr = 0.5\n",
            "job.toml:3 [outer] lr: there is no key lr here. Fix: did you mean learning_rate?",
        ),
        (
            "[training]\nquorum = 0.5\n",
            (
                "job.toml:3 [training] quorum: there is no key quorum here."
                " Fix: quorum belongs to [round]"
            ),
        ),
        (
            "[codec]\nzzz = 1\n",
            "job.toml:3 [codec] zzz: there is no key zzz here. Fix: the keys are up, down",
        ),
        ("[iner]\nx = 1\n", "job.toml:2 iner: there is no such table. Fix: did you mean [inner]?"),
        (
            "training = 3\n",
            "job.toml:2 training: it is the number 3, not a table. Fix: write [training]",
        ),
    ],
)
def test_unknown_key_says_where_it_is_and_what_was_meant(text: str, expected: str) -> None:
    assert only_problem_of(HEAD + text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[training]\nrounds = "20"\n',
            (
                'job.toml:3 [training] rounds: it is the text "20", not a whole number.'
                " Fix: write a whole number without quotes"
            ),
        ),
        (
            "[training]\nrounds = true\n",
            (
                "job.toml:3 [training] rounds: it is true (true or false), not a whole number."
                " Fix: give a whole number"
            ),
        ),
        (
            "[codec]\nup = 4\n",
            'job.toml:3 [codec] up: it is the number 4, not text. Fix: write it in quotes: "4"',
        ),
        (
            "[inner]\nlearning_rate = [1]\n",
            "job.toml:3 [inner] learning_rate: it is a list, not a number. Fix: give a number",
        ),
        (
            '[round]\ndeadline = "60"\n',
            'job.toml:3 [round] deadline: "60" has no unit. Fix: say the unit, for example "60s"',
        ),
        (
            "[round]\ndeadline = 60\n",
            (
                "job.toml:3 [round] deadline: 60 has no unit."
                ' Fix: say the unit, for example "60s" or "60ms"'
            ),
        ),
        (
            '[round]\ndeadline = "soon"\n',
            (
                'job.toml:3 [round] deadline: "soon" is not a duration.'
                ' Fix: write a number and ms, s, m or h, for example "90s"'
            ),
        ),
        (
            '[round]\ndeadline = "60s"\ndeadline_ms = 5\n',
            "job.toml:3 [round] deadline: deadline_ms is given too. Fix: keep one of the two",
        ),
        (
            '[round]\ndeadline_ms = 5\ndeadline = "60s"\n',
            "job.toml:4 [round] deadline: deadline_ms is given too. Fix: keep one of the two",
        ),
    ],
)
def test_wrong_type_or_unit_says_what_it_is_and_how_to_write_it(text: str, expected: str) -> None:
    assert only_problem_of(HEAD + text) == expected


@pytest.mark.parametrize(
    ("text", "key", "limit"),
    [
        ("[training]\nrounds = 0\n", "[training] rounds", "[1, 1000000]"),
        ("[training]\nseed = -1\n", "[training] seed", "[0, 9.22337203685478e+18]"),
        ("[inner]\nlearning_rate = 0\n", "[inner] learning_rate", "(0, 100]"),
        ("[inner]\nlearning_rate = nan\n", "[inner] learning_rate", "(0, 100]"),
        ("[outer]\nlearning_rate = inf\n", "[outer] learning_rate", "(0, 10]"),
        ("[outer]\nmomentum = 1.0\n", "[outer] momentum", "[0, 1)"),
        ('[round]\ndeadline = "1s"\nquorum = 0.0\n', "[round] quorum", "(0, 1]"),
        ('[data]\nsharding = "dirichlet"\nalpha = 0.0\n', "[data] alpha", "(0, 1000000]"),
    ],
)
def test_number_outside_its_range_names_the_range(text: str, key: str, limit: str) -> None:
    found = only_problem_of(HEAD + text)
    assert key in found
    assert found.endswith(f"Fix: choose a value in {limit}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[codec]\nup = "int5"\n', '"int5" is unknown. Fix: did you mean "int8"?'),
        ('[codec]\ndown = "zip"\n', "Fix: choose one of fp32, bf16, int8, int4"),
        ('[data]\nsharding = "IID"\n', 'Fix: did you mean "iid"?'),
    ],
)
def test_unknown_word_names_the_words_there_are(text: str, expected: str) -> None:
    assert expected in only_problem_of(HEAD + text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[data]\nalpha = 0.3\n",
            (
                'alpha does nothing when sharding is "iid".'
                ' Fix: set sharding = "dirichlet" or remove alpha'
            ),
        ),
        (
            "[data]\npartitions = 3\n",
            (
                'partitions does nothing when sharding is "iid".'
                ' Fix: set sharding = "dirichlet" or remove partitions'
            ),
        ),
        (
            '[training]\nnodes = 5\n[data]\nsharding = "dirichlet"\npartitions = 3\n',
            (
                "3 partitions cannot serve 5 nodes."
                " Fix: set partitions to at least 5, or to 0 for one a node"
            ),
        ),
        (
            "[round]\nquorum = 0.5\n",
            'quorum does nothing without a deadline. Fix: add deadline = "60s" or remove quorum',
        ),
        (
            "[training]\nrounds = 2\ninner_steps = 5\n[inner]\nwarmup_steps = 10\n",
            "a warm-up of 10 steps outlasts the job. Fix: stay below rounds x inner_steps = 10",
        ),
        (
            '[data]\npath = "photos"\n',
            (
                "digits-softmax trains on digits only."
                " Fix: remove path, or choose a workload that takes data"
            ),
        ),
    ],
)
def test_impossible_combination_says_which_and_the_way_out(text: str, expected: str) -> None:
    assert only_problem_of(HEAD + text).endswith(expected)


def test_workload_is_required() -> None:
    assert only_problem_of("[training]\nrounds = 3\n").startswith(
        "job.toml workload: it is missing"
    )


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("chanels = 3", "digits-cnn has no such option. Fix: did you mean channels?"),
        ('channels = "3"', "must be a int"),
        ("channels = 1", "must be at least 4"),
        ("channels = [1]", "options are text, numbers or true/false"),
    ],
)
def test_options_are_judged_by_the_workload(option: str, expected: str) -> None:
    found = only_problem_of(f'workload = "digits-cnn"\n[options]\n{option}\n')
    assert found.startswith("job.toml:3 [options] chan")
    assert expected in found


def test_everything_wrong_is_said_at_once_in_the_order_of_the_lines() -> None:
    found = problems_of(
        'nme = "x"\nworkload = "digits-cn"\n[training]\nrounds = 0\n[round]\ndeadline = "6"\n'
    )
    assert [line.split(" ")[0] for line in found] == [
        "job.toml:1",
        "job.toml:2",
        "job.toml:4",
        "job.toml:6",
    ]


def test_broken_toml_says_where() -> None:
    assert "(at line 2, column 10)" in only_problem_of('workload = "x"\nrounds = \n')


def test_unreadable_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match=r"absent\.toml cannot be read") as caught:
        read_job_file(tmp_path / "absent.toml")
    assert caught.value.reason is Reason.FILE_UNUSABLE


def test_name_that_cannot_be_shown_is_refused() -> None:
    assert "characters that cannot be printed" in only_problem_of(HEAD + 'name = "a\\nb"\n')


def test_spec_is_the_same_after_the_wire() -> None:
    spec = parse_job(f'{HEAD}name = "n"\n[training]\nnodes = 3\n')
    assert parse_spec_json(spec_json(spec)) == spec


def test_spec_from_the_wire_is_judged_like_a_file() -> None:
    with pytest.raises(JobFileError) as caught:
        parse_spec_json('{"workload": "digits-softmax", "training": {"rounds": 0}}')
    assert caught.value.reason is Reason.SPEC_INVALID
    assert [problem.key for problem in caught.value.problems] == ["training.rounds"]


def test_wire_text_that_is_no_spec_is_refused() -> None:
    with pytest.raises(JobFileError, match="unknown field"):
        parse_spec_json('{"workload": "digits-softmax", "x": 1}')


def test_a_file_that_is_nested_without_end_is_refused() -> None:
    text = f"name = {'[' * 100_000}"
    assert only_problem_of(text).startswith("job.toml: it is nested too deeply")


@pytest.mark.parametrize(
    ("text", "place"),
    [('name = "a"\nrounds = = 3\n', "job.toml:2"), ('\n\nname = "a', "job.toml:3")],
)
def test_syntax_error_names_file_and_line(text: str, place: str) -> None:
    assert only_problem_of(text).startswith(f"{place}: it is not TOML: ")


def test_missing_folder_of_data_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('workload = "text-gpt"\n[data]\npath = "words"\n', "utf-8")
    with pytest.raises(JobFileError) as wrong:
        check_data_folder(read_job_file(file), file)
    (problem,) = wrong.value.problems
    assert problem.where == f"{file}:3 [data] path"
    assert problem.what == f"there is no folder {tmp_path / 'words'}"
