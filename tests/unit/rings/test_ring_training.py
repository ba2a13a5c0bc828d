"""Settings, rows and forecast of a training through a ring."""

from pathlib import Path

import numpy as np
import pytest

from coordinator.shell.kinds.serving.training_batches import TrainingBatches
from hypergpu.errors import HyperGPUError
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import IGNORED, LabelledRow, TokenRows, rows_of_step, write_rows
from hypergpu.rings.training_forecast import StageLine, sent_token_bytes, training_forecast

ROWS = [
    LabelledRow(np.arange(3, 9, dtype=np.int32), np.full(6, 7, np.int32)),
    LabelledRow(np.arange(2, dtype=np.int32), np.array([IGNORED, 1], np.int32)),
]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert write_rows(ROWS, tmp_path / "rows") == 2
    rows = TokenRows(tmp_path / "rows")
    assert (len(rows), rows.longest, rows.mean_tokens) == (2, 6, 4.0)
    for number, row in enumerate(ROWS):
        assert all(map(np.array_equal, rows.row(number), row))
    assert [rows.row(number).counted_tokens for number in (0, 1)] == [5, 1]


def test_a_file_that_is_none_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(ROWS, path)
    whole = path.read_bytes()
    short_row = whole[:12] + bytes([0]) + whole[13:]
    for content in (b"", whole[:-1], b"x" + whole[1:], whole[:8] + b"\xff" * 4, short_row):
        path.write_bytes(content)
        with pytest.raises(HyperGPUError, match="malformed"):
            TokenRows(path)


def test_each_pass_takes_every_row_once_in_an_order_of_its_own() -> None:
    steps = [tuple(rows_of_step(10, 4, step, seed=1)) for step in range(5)]
    numbers = [number for step in steps for number in step]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
    assert numbers[:10] != numbers[10:]
    assert steps[3] == tuple(rows_of_step(10, 4, 3, seed=1))


@pytest.mark.parametrize("rings", [1, 2, 3])
def test_no_row_is_taken_twice_by_any_ring_in_a_pass_over_all(tmp_path: Path, rings: int) -> None:
    count = 4 * rings * 3
    rows = [
        LabelledRow(np.array([1, 5 + each], np.int32), np.array([1, 5 + each], np.int32))
        for each in range(count)
    ]
    write_rows(rows, tmp_path / "rows")
    training = RingTraining(rounds=6, inner_steps=1, batch_rows=4, rings=rings)
    batches = [TrainingBatches(tmp_path / "rows", training, ring) for ring in range(rings)]
    passes = [
        [int(row.tokens[1]) for step in steps for each in batches for row in each.rows_of(step)]
        for steps in (range(3), range(3, 6))
    ]
    for numbers in passes:
        assert sorted(numbers) == [5 + each for each in range(count)]
    assert passes[0] != passes[1]


def test_a_middle_stage_sends_both_ways_and_the_ends_one() -> None:
    assert sent_token_bytes(3, 4096, "int8o", "int8o") == (4114, 8228, 4114)
    assert sent_token_bytes(2, 64, "float32", "int8o") == (256, 82)
    assert sent_token_bytes(1, 64, "float32", "int8o") == (0,)


def test_lines_that_do_not_carry_a_training_are_refused_with_the_figure() -> None:
    stage_bytes = sent_token_bytes(3, 4096, "int8o", "int8o")
    stages = [StageLine(f"node-{number}", 200.0, 20e6) for number in range(3)]
    forecast = training_forecast(stages, stage_bytes)
    assert round(forecast.compute_tokens_per_s) == 1667
    assert round(forecast.tokens_per_s) == 304
    assert "node-1 can send 304 tokens/s of 8,228 bytes each" in forecast.refusal
    assert "27.4 Mbit/s up would do" in forecast.refusal
    faster = training_forecast([each._replace(up_bits_per_s=30e6) for each in stages], stage_bytes)
    assert faster.refusal == ""
    unmeasured_forecast = training_forecast(
        [each._replace(up_bits_per_s=0.0) for each in stages], stage_bytes
    )
    assert unmeasured_forecast.refusal == ""
    assert unmeasured_forecast.summary == "3 stages compute 1,667 tokens/s, no line is measured"


def test_a_rate_rises_and_falls_over_all_steps() -> None:
    training = RingTraining(
        rounds=5, inner_steps=2, batch_rows=4, warmup_steps=2, schedule="linear", learning_rate=1.0
    )
    assert [round(training.rate_of(step), 3) for step in (0, 1, 5, 9)] == [0.5, 0.9, 0.5, 0.1]
    assert [rule for is_right, _, rule in training.faults() if not is_right] == []
