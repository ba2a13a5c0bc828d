"""Data and outputs that are refused, each with its fix, before anything is sent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.farm.input_chunks import write_text_chunks
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.items import ItemFields, ItemSource, SourceItem
from hypergpu.user.farm.job_file import read_map_file
from hypergpu.user.farm.output_folder import OutputFolder, RunState
from hypergpu.user.farm.request import parameter_values, settings_of


def items_of(given: Any, form: ItemForm = ItemForm.TEXT, **fields: str) -> list[SourceItem]:
    return list(ItemSource(given, form, ItemFields(**fields)).items())


def refusal(act: Callable[[], object]) -> HyperGPUError:
    with pytest.raises(HyperGPUError) as refusals:
        act()
    return refusals.value


def test_rows_come_from_lists_frames_files_and_folders(tmp_path: Path) -> None:
    rows = [{"id": "a", "text": "one"}, {"id": "b", "text": "two"}]
    expected_items = [SourceItem("a", "one"), SourceItem("b", "two")]
    assert items_of(rows, id="id") == expected_items
    assert items_of(pd.DataFrame(rows), id="id") == expected_items
    (tmp_path / "rows.csv").write_text("id,text\na,one\nb,two\n")
    assert items_of(tmp_path / "rows.csv", id="id") == expected_items
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert items_of(str(tmp_path / "rows.json"), id="id") == expected_items
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    (texts / "b.txt").write_text("two")
    (texts / "deep" / "a.md").write_text("one")
    (texts / "wrong.txt").write_bytes(b"\xff\xfe\xff")
    first, second, third = items_of(texts)
    assert (first, second) == (SourceItem("b.txt", "two"), SourceItem("deep/a.md", "one"))
    assert third.error == "wrong.txt: it is not UTF-8"


def test_a_row_that_is_no_item_is_told_by_itself() -> None:
    rows = [{"text": "a"}, {"text": 3}, {"other": "b", "more": 1}, "plain", {"only": "c"}]
    errors = [item.error for item in items_of(rows)]
    assert errors[0] == errors[3] == errors[4] == ""
    assert errors[1] == "row 2: its text is int, not a text"
    assert errors[2] == "row 3: it has no field 'text'; its fields are other, more"


def test_chats_and_continuations_are_items() -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert items_of([{"messages": chat}], ItemForm.PROMPT)[0].value == chat
    assert "no list of objects" in items_of([{"messages": [3]}], ItemForm.PROMPT)[0].error
    pair = {"context": "a", "continuation": "b"}
    assert items_of([pair], ItemForm.SCORED)[0].value == pair
    assert "not both texts" in items_of([{**pair, "context": 1}], ItemForm.SCORED)[0].error


def test_an_id_that_occurs_twice_is_refused_with_its_row() -> None:
    rows = [{"id": 7, "text": "a"}, {"id": 7, "text": "b"}]
    error = refusal(lambda: items_of(rows, id="id"))
    assert error.reason is Reason.FILE_UNUSABLE
    assert error.detail == "the id 7 occurs twice, the second time in row 2"
    error = refusal(lambda: items_of([{"text": "a"}], id="id"))
    assert error.detail == "row 1 has no id: its field 'id' is NoneType"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    items = ItemSource(path, ItemForm.TEXT, ItemFields()).items()
    next(items)
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    error = refusal(lambda: list(items))
    assert "changed while it was read; nothing was sent" in error.detail


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ([], "the data hold no item"),
        (3, "data of type int"),
        ("missing.jsonl", "missing.jsonl: No such file"),
    ],
)
def test_data_without_items_are_refused(tmp_path: Path, given: Any, detail: str) -> None:
    def write() -> None:
        source = ItemSource(given, ItemForm.TEXT, ItemFields())
        write_text_chunks(source.items(), tmp_path)

    assert detail in refusal(write).detail


def begin(out: Path, *, resume: bool = False, force: bool = False) -> RunState | None:
    folder = OutputFolder(out)
    try:
        return folder.begin(may_resume=resume, may_overwrite=force)
    finally:
        folder.close()


def test_nothing_is_overwritten_unless_it_is_told_so(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert begin(out) is None
    state = RunState(request_id="r", request_digest="d" * 64, job="job-1")  # type: ignore[arg-type]
    OutputFolder(out).write_state(state)
    error = refusal(lambda: begin(out))
    assert error.reason is Reason.FILE_PRESENT
    assert error.fix == "go on with it: --resume, or begin anew: --force"
    assert begin(out, resume=True) == state
    assert begin(out, force=True) is None
    assert begin(out, resume=True) is None
    out.write_text("{}\n")
    assert "is there already" in refusal(lambda: begin(out)).detail
    finished_out = tmp_path / "finished.jsonl"
    finished_out.write_text("{}\n")
    assert "already, finished" in refusal(lambda: begin(finished_out, resume=True)).detail
    assert finished_out.read_text() == "{}\n"


def test_two_programs_do_not_write_one_output(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out.parquet")
    folder.begin(may_resume=False, may_overwrite=False)
    error = refusal(lambda: begin(tmp_path / "out.parquet", resume=True))
    assert "another program works on" in error.detail
    folder.close()
    assert begin(tmp_path / "out.parquet", resume=True) is None


def test_settings_are_checked_with_their_names() -> None:
    assert parameter_values(["temperature=0.5", "prompt=query: "]) == {
        "temperature": 0.5,
        "prompt": "query: ",
    }
    wrong = {
        "embed needs a model": lambda: settings_of("embed", {}).check(),
        "there is no kind of item 'paint'": lambda: settings_of("paint", {}).check(),
        "checks is 2": lambda: settings_of("embed", {"base": "b", "checks": 2.0}).check(),
        "price is '1.5'": lambda: settings_of("embed", {"base": "b", "price": "1.5"}).check(),
        "unknown field `bass`": lambda: settings_of("embed", {"bass": "b"}),
        "is no KEY=VALUE": lambda: parameter_values(["temperature"]),
    }
    for detail, act in wrong.items():
        assert detail in refusal(act).detail


def test_an_output_needs_an_ending_that_is_known(tmp_path: Path) -> None:
    error = refusal(lambda: OutputFolder(tmp_path / "out.csv"))
    assert error.fix == "name it out.parquet"


def test_a_job_file_of_the_kind_map_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    text = 'kind = "map"\ndata = "rows.jsonl"\nout = "sums.jsonl"\n[map]\nitem_kind = "checksum"\n'
    path.write_text(text)
    order = read_map_file(path)
    assert order is not None
    assert order.data == tmp_path / "rows.jsonl"
    assert order.settings.item_kind == "checksum"
    path.write_text(text + 'colour = "red"\n')
    assert "unknown field `colour`" in refusal(lambda: read_map_file(path)).detail
    path.write_text('workload = "digits-mlp"\n')
    assert read_map_file(path) is None
