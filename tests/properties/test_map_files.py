"""Readers of items and writers of outputs, over drawn rows and cuts."""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import Table, parquet

from hypergpu.digests import digest_of
from hypergpu.farm.bundle_results import (
    ItemResult,
    VectorResults,
    json_results,
    vector_results,
)
from hypergpu.farm.item_chunks import manifest_bytes, read_json_lines, read_manifest
from hypergpu.user.client.bundles import DroppedItemView, ResultView
from hypergpu.user.farm.input_chunks import write_text_chunks
from hypergpu.user.farm.item_rules import ItemForm, item_rules
from hypergpu.user.farm.items import ItemFields, ItemSource
from hypergpu.user.farm.output_folder import OutputFolder
from hypergpu.user.farm.pieces import RowContext, write_dropped, write_output, write_piece

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\x00"), min_size=1, max_size=20
)
ROWS = st.lists(TEXTS, min_size=1, max_size=30)
SUFFIXES = st.sampled_from([".jsonl", ".parquet"])


def write_source(path: Path, texts: Sequence[str]) -> Path:
    rows = [{"key": number, "text": text} for number, text in enumerate(texts)]
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


@given(texts=ROWS, suffix=SUFFIXES)
@settings(max_examples=40)
def test_items_of_a_file_come_back_from_their_chunks(texts: list[str], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_source(Path(folder) / f"rows{suffix}", texts)
        source = ItemSource(path, ItemForm.TEXT, ItemFields(id="key"))
        chunks = write_text_chunks(source.items(), Path(folder))
        manifest = read_manifest(manifest_bytes(chunks.manifest))
        lines = [
            json.loads(line)
            for chunk, chunk_path in zip(manifest.chunks, chunks.paths, strict=True)
            for line in read_json_lines(chunk_path.read_bytes(), chunk.items)
        ]
        assert lines == texts
        assert manifest.items == len(texts)
        assert not chunks.ids
        assert chunks.largest_bytes == max(
            len(json.dumps(t, ensure_ascii=False).encode()) + 1 for t in texts
        )


def random_cuts(items: int, draws: random.Random) -> list[tuple[int, int]]:
    cuts, start = [], 0
    while start < items:
        count = draws.randint(1, items - start)
        cuts.append((start, count))
        start += count
    draws.shuffle(cuts)
    return cuts


def accepted_result(start: int, items: int, content: bytes) -> ResultView:
    return ResultView(start, items, digest_of(content), len(content), f"0x{start}", items, 0, 1)


@given(
    errors=st.lists(st.booleans(), min_size=1, max_size=40),
    seed=st.integers(0, 1 << 30),
    suffix=SUFFIXES,
    has_ids=st.booleans(),
)
@settings(max_examples=40)
def test_pieces_in_any_order_become_the_output_in_order(
    errors: list[bool], seed: int, suffix: str, *, has_ids: bool
) -> None:
    rules, draws = item_rules("score"), random.Random(seed)
    ids: list[str | int] = [f"id {place}" for place in range(len(errors))] if has_ids else []
    context = RowContext(ids, {}, seed=9)
    with tempfile.TemporaryDirectory() as name:
        folder = OutputFolder(Path(name) / f"out{suffix}")
        folder.begin(may_resume=False, may_overwrite=False)
        dropped_items = []
        for start, count in random_cuts(len(errors), draws):
            if count == 1 and draws.random() < 0.5:
                dropped_items.append(DroppedItemView(start, "dropped"))
                continue
            results = [
                ItemResult(error="bad")
                if errors[place]
                else ItemResult({"log_likelihood": -float(place), "tokens": place})
                for place in range(start, start + count)
            ]
            content = json_results(results)
            write_piece(folder, rules, context, accepted_result(start, count, content), content)
        write_dropped(folder, rules, context, dropped_items)
        errors_count = write_output(folder)
        rows = read_rows(folder.out)
        assert [row["id"] for row in rows] == (ids or list(range(len(errors))))
        given_up = {item.item for item in dropped_items}
        for place, row in enumerate(rows):
            has_error = errors[place] or place in given_up
            assert row["tokens"] == (None if has_error else place)
            assert bool(row.get("error")) == has_error
            assert row["seed"] == 9
        assert errors_count == sum(bool(row.get("error")) for row in rows)
        assert folder.errors.exists() == bool(errors_count)
        folder.remove()
        assert [path.name for path in Path(name).iterdir() if path.name.endswith(".part")] == []


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@given(seed=st.integers(0, 1 << 30), suffix=SUFFIXES, items=st.integers(1, 20))
@settings(max_examples=20)
def test_vectors_keep_their_numbers_beside_errors(seed: int, suffix: str, items: int) -> None:
    rules, draws = item_rules("embed"), random.Random(seed)
    values = np.random.default_rng(seed).standard_normal((items, 3)).astype(np.float32)
    context = RowContext([], {}, seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = OutputFolder(Path(name) / f"out{suffix}")
        folder.begin(may_resume=False, may_overwrite=False)
        failures = {place for place in range(items) if draws.random() < 0.3}
        for start, count in random_cuts(items, draws):
            errors = {place - start: "bad" for place in failures if start <= place < start + count}
            content = vector_results(VectorResults(values[start : start + count], errors))
            write_piece(folder, rules, context, accepted_result(start, count, content), content)
        write_output(folder)
        for place, row in enumerate(read_rows(folder.out)):
            if place in failures:
                assert row["vector"] is None
            else:
                np.testing.assert_array_equal(np.float32(row["vector"]), values[place])
        folder.close()
