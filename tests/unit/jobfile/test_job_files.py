"""Every way in which a job file or a change can be wrong says what, where and the fix."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.keys import ALIASES, KEYS, SECTIONS, SETTABLE
from hypergpu.jobfile.limits import CHOICES, LIMITS
from hypergpu.jobfile.reading import (
    check_data_folder,
    parameter_words,
    parse_job,
    parse_spec_json,
    read_job_file,
    spec_json,
    with_parameters,
)
from hypergpu.jobfile.spec import JobSpec, OuterSettings
from hypergpu.jobfile.toml import JobFileError
from hypergpu.optimizer import MUON_RATIO
from hypergpu.user.farm.sweep_file import read_sweep_file
from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.entry import Option

HEAD = 'workload = "digits-softmax"\n'


def problems_of(text: str) -> list[str]:
    with pytest.raises(JobFileError) as failure:
        parse_job(text, source="job.toml")
    return [str(problem) for problem in failure.value.problems]


def only_problem_of(text: str) -> str:
    problems = problems_of(text)
    assert len(problems) == 1, problems
    return problems[0]


def test_smallest_job_file_takes_every_default() -> None:
    assert parse_job(HEAD) == JobSpec(workload="digits-softmax", strategy="aware")


def test_a_spec_of_the_wire_or_a_journal_without_a_strategy_has_fixed_steps() -> None:
    assert parse_spec_json('{"workload": "digits-softmax"}').strategy == "diloco"


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
        ('[inner]\noptimizer = "muon"\nmomentum = 1.0\n', "[inner] momentum", "[0, 1)"),
        ('[inner]\noptimizer = "muon"\nmuon_ratio = 0.0\n', "[inner] muon_ratio", "(0, 100]"),
        ('[round]\ndeadline = "1s"\nquorum = 0.0\n', "[round] quorum", "(0, 1]"),
        ('[data]\nsharding = "dirichlet"\nalpha = 0.0\n', "[data] alpha", "(0, 1000000]"),
    ],
)
def test_number_outside_its_range_names_the_range(text: str, key: str, limit: str) -> None:
    problem = only_problem_of(HEAD + text)
    assert key in problem
    assert problem.endswith(f"Fix: choose a value in {limit}")


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
            '[inner]\noptimizer = "sgd"\nbeta2 = 0.95\n',
            ('it does nothing with optimizer "sgd". Fix: remove it, or set optimizer = "adamw"'),
        ),
        (
            "[inner]\nmomentum = 0.9\n",
            'it does nothing with optimizer "adamw". Fix: remove it, or set optimizer = "sgd"',
        ),
        (
            "[inner]\nmuon_ratio = 2.0\n",
            'it does nothing with optimizer "adamw". Fix: remove it, or set optimizer = "muon"',
        ),
        (
            '[inner]\noptimizer = "sgd"\nmuon_ratio = 2.0\n',
            'it does nothing with optimizer "sgd". Fix: remove it, or set optimizer = "muon"',
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
        (
            '[data]\nname = "wards"\n',
            'where source is "shared". Fix: set source = "node", or remove name',
        ),
        (
            '[data]\nsource = "node"\nname = "wards"\npath = "held-out"\n',
            (
                "digits-softmax cannot train on data that stay on nodes."
                ' Fix: choose another workload, or source = "shared"'
            ),
        ),
    ],
)
def test_impossible_combination_says_which_and_the_way_out(text: str, expected: str) -> None:
    assert only_problem_of(HEAD + text).endswith(expected)


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (
            'path = "held-out"\n',
            "owners of nodes must know what is asked of them. Fix: write name =",
        ),
        (
            'name = "Ward 5"\npath = "held-out"\n',
            '"Ward 5" is no name of a data set. Fix: write name',
        ),
        ('name = "wards"\n', "there are no held-out samples to judge the model and the nodes' upd"),
        (
            'name = "wards"\npath = "held-out"\nsharding = "dirichlet"\n',
            "each node trains on its own samples: there is nothing to divide. Fix: remove it",
        ),
    ],
)
def test_a_job_on_nodes_own_data_says_what_it_lacks(rest: str, expected: str) -> None:
    text = f'workload = "text-gpt"\n[data]\nsource = "node"\n{rest}'
    assert expected in only_problem_of(text)


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
    problem = only_problem_of(f'workload = "digits-cnn"\n[options]\n{option}\n')
    assert problem.startswith("job.toml:3 [options] chan")
    assert expected in problem


def test_everything_wrong_is_said_at_once_in_the_order_of_the_lines() -> None:
    problems = problems_of(
        'nme = "x"\nworkload = "digits-cn"\n[training]\nrounds = 0\n[round]\ndeadline = "6"\n'
    )
    assert [line.split(" ")[0] for line in problems] == [
        "job.toml:1",
        "job.toml:2",
        "job.toml:4",
        "job.toml:6",
    ]


def test_broken_toml_says_where() -> None:
    assert "(at line 2, column 10)" in only_problem_of('workload = "x"\nrounds = \n')


def test_unreadable_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match=r"absent\.toml cannot be read") as failure:
        read_job_file(tmp_path / "absent.toml")
    assert failure.value.reason is Reason.FILE_UNUSABLE


def test_name_that_cannot_be_shown_is_refused() -> None:
    assert "characters that cannot be printed" in only_problem_of(HEAD + 'name = "a\\nb"\n')


def test_spec_is_the_same_after_the_wire() -> None:
    spec = parse_job(f'{HEAD}name = "n"\n[training]\nnodes = 3\n')
    assert parse_spec_json(spec_json(spec)) == spec


def test_spec_from_the_wire_is_judged_like_a_file() -> None:
    with pytest.raises(JobFileError) as failure:
        parse_spec_json('{"workload": "digits-softmax", "training": {"rounds": 0}}')
    assert failure.value.reason is Reason.SPEC_INVALID
    assert [problem.key for problem in failure.value.problems] == ["training.rounds"]


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


SPEC = parse_job('workload = "digits-softmax"\n[training]\nrounds = 10\n')


def problem_of(changes: dict[str, str]) -> str:
    with pytest.raises(JobFileError) as failure:
        with_parameters(SPEC, changes)
    assert len(failure.value.problems) == 1
    return str(failure.value.problems[0])


def test_short_names_become_dotted_keys_with_json_values() -> None:
    assert parameter_words(["lr=0.001", "deadline=60s", "outer.momentum = 0.8"]) == {
        "inner.learning_rate": "0.001",
        "round.deadline": '"60s"',
        "outer.momentum": "0.8",
    }


@pytest.mark.parametrize("word", ["lr", "lr=", "=1", ""])
def test_word_without_key_or_value_is_refused(word: str) -> None:
    with pytest.raises(JobFileError, match="not KEY=VALUE"):
        parameter_words([word])


def test_a_word_that_is_nested_without_end_is_text() -> None:
    deep = "[" * 100_000
    assert parameter_words([f"name={deep}"]) == {"name": f'"{deep}"'}


def test_a_word_that_is_no_text_is_refused_as_a_value() -> None:
    words = parameter_words(["lr=\udcff"])
    assert words == {"inner.learning_rate": '"\\udcff"'}
    assert "is not the JSON of a value" in problem_of(words)


def test_changes_reach_the_spec_and_nothing_else_moves() -> None:
    changed_spec = with_parameters(SPEC, {"lr": "0.5", "round.deadline": '"90s"', "rounds": "12"})
    assert changed_spec.inner.learning_rate == 0.5
    assert changed_spec.round.deadline_ms == 90_000
    assert changed_spec.training.rounds == 12
    assert changed_spec.outer == SPEC.outer


@pytest.mark.parametrize("key", SETTABLE)
def test_every_settable_key_can_be_set_to_what_it_is(key: str) -> None:
    table, _, name = key.partition(".")
    stated_spec = msgspec.structs.replace(SPEC, outer=OuterSettings(0.7, 0.9))
    value = getattr(getattr(stated_spec, table), name)
    assert with_parameters(stated_spec, {key: str(value)}) == stated_spec


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("codec.up", '"int8"', "codec.up: it is fixed once the job exists. Fix: submit a new job"),
        ("inner.learning_rat", "1", "there is no such parameter. Fix: did you mean inner.learning"),
        ("zzz", "1", "Fix: a running job takes training.rounds"),
        ("lr", "0", "inner.learning_rate: 0.0 is outside (0, 100]"),
        ("lr", '"a"', "give a number, for example 0.001"),
        ("lr", "{", "is not the JSON of a value"),
        ("lr", "[" * 100_000, "is not the JSON of a value"),
        ("lr", '{"a":' * 100_000, "is not the JSON of a value"),
        ("deadline", "60", 'say the unit, for example "60s"'),
        ("quorum", "2", "round.quorum: 2.0 is outside (0, 1]"),
    ],
)
def test_bad_change_is_refused_with_its_fix(key: str, value: str, expected: str) -> None:
    assert expected in problem_of({key: value})


def test_all_bad_changes_are_said_at_once() -> None:
    with pytest.raises(JobFileError) as failure:
        with_parameters(SPEC, {"lr": "0", "codec.up": '"int8"', "zzz": "1"})
    assert len(failure.value.problems) == 3


ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs/jobs.md").read_text("utf-8")
EXAMPLES = sorted(
    [*(ROOT / "examples").glob("*.toml"), *(ROOT / "examples/finetune").glob("*.toml")]
)
TYPE_NAMES = {int: "whole number", float: "number", str: "text", tuple: "list of texts"}


def rows() -> dict[str, list[str]]:
    rows_by_key = {}
    for line in REFERENCE.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows_by_key[cells[0].strip("`* ") + (cells[1] if cells[1].startswith("`") else "")] = (
                cells
            )
    return rows_by_key


def range_of(key: str) -> str:
    if key == "training.seed":
        return "[0, 2^63)"
    if key in CHOICES:
        return ", ".join(CHOICES[key])
    return str(LIMITS[key]) if key in LIMITS else ""


@pytest.mark.parametrize("key", KEYS)
def test_reference_has_each_key_with_type_default_and_range(key: str) -> None:
    name, kind, default, limits, meaning = rows()[key]
    table, _, bare = key.partition(".")
    assert name == f"`{key}` *" if key in SETTABLE else f"`{key}`"
    assert kind == TYPE_NAMES[KEYS[key]]
    stated_default = getattr(SECTIONS[table](), bare)
    stated_default = MUON_RATIO if stated_default is msgspec.UNSET else stated_default
    assert default == ("chosen" if stated_default is None else f"`{json.dumps(stated_default)}`")
    assert limits == range_of(key)
    assert meaning


def test_a_job_of_muon_has_its_settings_and_others_have_the_text_that_they_had() -> None:
    text = 'workload = "digits-cnn"\n[inner]\noptimizer = "muon"\n'
    rule = parse_job(text).inner.rule
    assert (rule.name, rule.momentum, rule.hidden_ratio) == ("muon", 0.95, 1.0)
    spec = parse_job(text + "momentum = 0.9\nmuon_ratio = 2.0\n")
    assert (spec.inner.rule.momentum, spec.inner.rule.hidden_ratio) == (0.9, 2.0)
    assert parse_spec_json(spec_json(spec)) == spec
    assert "muon" not in spec_json(parse_job('workload = "digits-softmax"\n'))
    # Digests of updates in simulated worlds are of the task's bytes.
    assert b"muon" not in msgspec.json.encode(JobSpec("digits-cnn").inner.rule)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ('workload = "text-gpt"\n', "muon"),
        ('workload = "digits-cnn"\n', "adamw"),
        ('workload = "digits-mlp"\n[inner]\nlearning_rate = 0.01\n', "muon"),
        ('workload = "text-gpt"\n[inner]\noptimizer = "adamw"\n', "adamw"),
        ('workload = "digits-mlp"\n[data]\nsharding = "dirichlet"\n', "adamw"),
        ('workload = "digits-softmax"\n', "adamw"),
        ('workload = "cifar10-resnet18"\n', "adamw"),
    ],
)
def test_a_file_without_an_optimizer_has_that_of_its_workload(text: str, optimizer: str) -> None:
    spec = parse_job(text)
    assert spec.inner.optimizer == optimizer
    # What a user states stays, and so does a job that was stored before.
    assert parse_spec_json(spec_json(spec)).inner == spec.inner
    assert JobSpec(spec.workload).inner.optimizer == "adamw"


def test_reference_has_no_key_that_is_gone() -> None:
    documented_keys = {key for key in rows() if "`" not in key}
    assert documented_keys == {*KEYS, "workload", "name", "strategy"}


def option_rows() -> list[tuple[str, Option]]:
    return [(entry.name, option) for entry in BUILT_IN for option in entry.options]


@pytest.mark.parametrize(("workload", "option"), option_rows())
def test_reference_has_each_option(workload: str, option: Option) -> None:
    _, _, default, _, meaning = rows()[f"{workload}`{option.name}`"]
    assert default == f"`{json.dumps(option.default)}`"
    assert meaning == option.meaning


def test_reference_names_every_alias() -> None:
    missing_aliases = [alias for alias in ALIASES if f"`{alias}`" not in REFERENCE]
    assert missing_aliases == []


def test_job_file_in_the_reference_is_a_job() -> None:
    text = REFERENCE.split("```toml\n")[1].split("```")[0]
    assert parse_job(text).round.deadline_ms == 60_000


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_job(path: Path) -> None:
    if (sweep := read_sweep_file(path)) is not None:
        assert len(sweep.plan.points) > 1
    else:
        assert read_job_file(path).name


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_the_readme_submits_a_job_that_one_node_can_begin_and_five_may_be_paid_for(
    tmp_path: Path,
) -> None:
    (name,) = re.findall(r"job submit (examples/\S+)", (ROOT / "README.md").read_text("utf-8"))
    job = read_job_file(ROOT / name)
    assert job.training.nodes == 1
    assert job.pay.unit_price == 0
    text = (ROOT / name).read_text("utf-8")
    paid_file = tmp_path / "paid.toml"
    paid_file.write_text(re.sub(r"^# (\[pay\]|\w+ = )", r"\1", text, flags=re.MULTILINE), "utf-8")
    job = read_job_file(paid_file)
    assert job.pay.escrow == job.pay.most_for(5 * job.stated_samples) > 0
