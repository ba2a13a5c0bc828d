"""Job files of trainings through a ring."""

from pathlib import Path

import pytest

from benchmarks.ours.stages.trained_ring import random_rows
from hypergpu.jobfile.toml import JobFileError
from hypergpu.rings.stage_work import CutSizes
from hypergpu.user.serving.ring_file import RingJob, read_ring_file
from hypergpu.user.serving.ring_submitting import ring_notes
from hypergpu.workloads.slices.rows import spread_rows
from tests.architecture.tree import ROOT

FILE = """\
workload = "hf-causal-lm"
[training]
batch_size = 32
[data]
path = "text"
[stages]
count = 3
"""


def read(folder: Path, text: str) -> RingJob | None:
    (folder / "job.toml").write_text(text)
    return read_ring_file(folder / "job.toml")


def test_a_fine_tuning_with_stages_is_trained_through_a_ring(tmp_path: Path) -> None:
    job = read(tmp_path, FILE)
    assert job is not None
    assert job.data == tmp_path / "text"
    assert (job.stages.count, job.stages.codec, job.dtype) == (3, "int8o", "float32")
    assert (job.training.batch_rows, job.training.micro_rows) == (32, 2)
    assert read(tmp_path, FILE.partition("[stages]")[0]) is None


def test_the_example_of_the_document_is_one(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "stages.md").read_text("utf-8").partition("## Fine-tune")[2]
    job = read(tmp_path, section.partition("```toml\n")[2].partition("```")[0])
    assert job is not None
    assert job.training.steps == 200


def test_several_rings_take_the_outer_step_of_every_training(tmp_path: Path) -> None:
    one = read(tmp_path, FILE)
    text = FILE + "rings = 2\n[outer]\nmomentum = 0.5\n"
    job = read(tmp_path, text)
    assert one is not None
    assert job is not None
    assert (one.training.rings, one.training.outer_momentum) == (1, None)
    assert (job.training.rings, job.training.outer_learning_rate) == (2, None)
    assert job.training.outer_momentum == 0.5
    sizes = CutSizes("llama", 6, 64, 100, 50, 10**6, 8)
    notes = ring_notes(job, sizes, [])
    assert any("2 rings of 3 stages take 6 nodes, and 0 are there" in note for note in notes)
    assert not any("rings" in note for note in ring_notes(one, sizes, []))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("[stages]", "[outer]\nmomentum = 0.5\n[stages]"), "where the training has one ring"),
        (("count = 3", "count = 3\nrings = 9"), "[stages] rings: it is not 1 to 8"),
        (("causal-lm", "text-classifier"), "a ring trains no hf-text-classifier"),
        (("[stages]", "[trust]\nrule = 'mean'\n[stages]"), "it does nothing beside [stages]"),
        (("[stages]", "[inner]\noptimizer = 'sgd'\n[stages]"), "step by AdamW"),
        (("[stages]", "[inner]\nmicro_batch = 64\n[stages]"), "no more of them at a time"),
        (("[stages]", "[options]\nbase_dtype = '4bit'\n[stages]"), "not held in four bits"),
        (("count = 3", "cuont = 3"), "cuont"),
        (
            ("[stages]", "[evaluation]\ntarget = 1.5\n[stages]"),
            "[evaluation] target: it does nothing",
        ),
        (("[stages]", "[evaluation]\nevery = 2\n[stages]"), "it does nothing beside [stages]"),
        (("count = 3", "count = 3\ngradient_codec = 'int2'"), "float32, int8o"),
    ],
)
def test_what_a_ring_has_no_use_for_is_refused_with_its_line(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    with pytest.raises(JobFileError) as refusal:
        read(tmp_path, FILE.replace(*change))
    assert problem in str(refusal.value)
    assert "job.toml:" in str(refusal.value)


def test_a_fourth_of_a_round_s_rows_is_evaluated_where_the_file_states_none(
    tmp_path: Path,
) -> None:
    job = read(tmp_path, FILE)
    assert job is not None
    assert job.held_out_rows_most == job.training.inner_steps * 32 // 4
    job = read(tmp_path, FILE.replace("[stages]", "[evaluation]\nsamples = 7\n[stages]"))
    assert job is not None
    assert job.held_out_rows_most == 7


def test_rows_to_evaluate_are_from_all_over() -> None:
    rows = random_rows(10, 40)
    assert spread_rows(rows, 3) == [rows[0], rows[3], rows[6]]
    assert spread_rows(rows, 0) == spread_rows(rows, 11) == rows


def test_submitting_says_what_lines_will_have_to_carry(tmp_path: Path) -> None:
    job = read(tmp_path, FILE)
    assert job is not None
    sizes = CutSizes("llama", 32, 4_096, 1 << 28, 1 << 28, 1 << 33, 0)
    (note,) = ring_notes(job, sizes, [])
    assert "8,228 bytes a token: 65.8 Mbit/s up for 1,000 tokens/s" in note
