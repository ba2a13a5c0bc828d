"""Rows of people's files as tokens: masks, packing, and the ends of what counts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.rows import DataRow, read_rows
from hypergpu.workloads.finetuning.tokens import (
    IGNORED,
    RowRules,
    Tokenizer,
    TokenRow,
    TokenSamples,
    pack_rows,
    token_rows,
    token_samples,
)
from tests.tiny_bases import trained_tokenizer

RULES = RowRules(64, packing=True, loss_on="completion")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trained_tokenizer()


def row(**values: Any) -> DataRow:
    return DataRow(values, 0, "rows.jsonl, row 1")


def counted_text(tokenizer: Any, found: TokenRow) -> str:
    return str(tokenizer.decode(found.tokens[found.labels != IGNORED]))


def test_only_the_completion_of_a_prompt_counts_with_its_end(tokenizer: Any) -> None:
    (token_row,) = token_rows(row(prompt="what is 7?", completion=" number 8"), tokenizer, RULES)
    assert counted_text(tokenizer, token_row) == " number 8<|eos|>"
    assert tokenizer.decode(token_row.tokens) == "what is 7? number 8<|eos|>"


def test_a_token_that_reaches_from_the_prompt_into_the_completion_counts(tokenizer: Any) -> None:
    (token_row,) = token_rows(row(prompt="what is 7? ", completion="number 8"), tokenizer, RULES)
    assert counted_text(tokenizer, token_row) == " number 8<|eos|>"


def test_only_what_an_assistant_says_counts_in_a_chat(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "number 1"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "number 2"},
    ]
    (token_row,) = token_rows(row(messages=chat), tokenizer, RULES)
    assert counted_text(tokenizer, token_row) == "number 1<|end|>number 2<|end|>"
    (answer,) = token_rows(row(prompt=chat[:3], completion=chat[3:]), tokenizer, RULES)
    assert counted_text(tokenizer, answer) == "number 2<|end|>"


def test_every_token_but_the_first_counts_where_all_is_asked_for(tokenizer: Any) -> None:
    rules = RULES._replace(loss_on="all")
    (token_row,) = token_rows(row(prompt="what is 7?", completion=" number 8"), tokenizer, rules)
    assert (token_row.labels == IGNORED).tolist() == [True, *[False] * (len(token_row.tokens) - 1)]


def test_a_long_text_is_cut_into_pieces_and_loses_no_token(tokenizer: Any) -> None:
    text = "number 1 comes before number 2. " * 40
    token_pieces = token_rows(row(text=text), tokenizer, RULES)
    assert len(token_pieces) > 1
    assert max(len(each.tokens) for each in token_pieces) <= 64
    joint = np.concatenate([each.tokens for each in token_pieces])
    assert tokenizer.decode(joint) == text + "<|eos|>"


def test_a_prompt_that_leaves_no_room_for_its_answer_is_left_out(tokenizer: Any) -> None:
    assert token_rows(row(prompt="é" * 90, completion="number"), tokenizer, RULES) == []
    with pytest.raises(DatasetError, match=r"options\.sequence_length = 64\. Fix: raise it above"):
        token_samples("train", [row(prompt="é" * 90, completion="x")], tokenizer, RULES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"question": "a"}, "has the fields question. Fix: give text, or prompt and completion"),
        ({"messages": "hello"}, "messages are a list of objects with role and content"),
        ({"messages": [{"role": "user"}]}, "messages are a list of objects"),
    ],
)
def test_rows_of_no_known_form_are_named(
    tokenizer: Tokenizer, values: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(DatasetError, match=r"rows\.jsonl, row 1.*" + said.replace(".", r"\.")):
        token_rows(row(**values), tokenizer, RULES)


def test_packs_hold_each_row_once_and_fit() -> None:
    lengths = [1 + number * 7 % 40 for number in range(200)]
    packs = pack_rows(lengths, 64)
    assert sorted(row for pack in packs for row in pack) == list(range(200))
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= 64
    assert len(packs) <= 1.1 * sum(lengths) / 64


def test_positions_begin_anew_with_each_row_of_a_pack() -> None:
    rows = [TokenRow(np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)) for n in (3, 2, 4)]
    samples = TokenSamples(rows, [0, 0, 1], [[0, 1], [2]])
    tokens, labels, positions = samples.batch(np.array([0, 1]))
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert tokens.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert labels[1].tolist() == [0, 1, 2, 3, IGNORED]
    assert samples.labels.tolist() == [0, 1]


def test_a_tenth_of_the_rows_is_held_out_unless_a_part_is(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {number}"}) for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("no row", encoding="utf-8")
    row_parts = read_rows(tmp_path)
    assert [each.values["text"] for each in row_parts.held_out] == ["row 8", "row 11"]
    table = pa.table({"text": ["kept"]})
    (tmp_path / "held_out").mkdir()
    parquet.write_table(table, tmp_path / "held_out" / "part.parquet")
    row_parts = read_rows(tmp_path)
    assert [each.values["text"] for each in row_parts.held_out] == ["kept"]
    assert len(row_parts.train) == 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{', r"rows\.jsonl, row 2 is no JSON"),
        (b"[1]", "row 1 is no object. Fix: write each row as an object"),
        (b"", r"holds 0 rows to train on"),
    ],
)
def test_files_that_hold_no_rows_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=said):
        read_rows(tmp_path)
