"""`python -m hypergpu.workloads.slices.rows FOLDER OPTIONS TRAIN HELD_OUT MOST` writes the rows of
a fine-tuning as tokens, each row by itself: rows of a ring need no packing. Of the rows that are
held out so many at most are written, 0 being all.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hypergpu.rings.token_rows import LabelledRow, write_rows
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionValue

if TYPE_CHECKING:
    from hypergpu.workloads.finetuning.rows import DataRow


class LabelledParts(NamedTuple):
    """Rows of a job's folder."""

    train: list[LabelledRow]
    held_out: list[LabelledRow]


def labelled_rows(folder: Path, options: dict[str, OptionValue]) -> LabelledParts:
    """Rows of a job's folder, and those of it that are held out.

    Raises:
        DatasetError: Base or rows cannot be used.
    """
    from transformers import AutoModelForCausalLM

    from hypergpu.workloads.finetuning.base_model import (
        base_folder,
        check_base,
        check_length,
        check_task,
        load_config,
        load_tokenizer,
        positions_most,
    )
    from hypergpu.workloads.finetuning.rows import read_rows
    from hypergpu.workloads.finetuning.tokens import RowRules, token_rows

    base = base_folder(str(folder))
    check_base(base, str(options["base_digest"]))
    config = load_config(base)
    check_task(AutoModelForCausalLM, config, "write text")
    rules = RowRules(
        int(options["sequence_length"]),
        packing=False,
        loss_on=str(options["loss_on"]),
        vocabulary=int(getattr(config, "vocab_size", 0) or 0),
    )
    check_length(rules.sequence_length, positions_most(AutoModelForCausalLM, config))
    tokenizer = load_tokenizer(base)

    def label_rows(rows: "Sequence[DataRow]") -> Iterator[LabelledRow]:
        for row in rows:
            for each in token_rows(row, tokenizer, rules):
                if len(each.tokens) > 1:
                    yield LabelledRow(each.tokens, each.labels)

    train, held_out, _ = read_rows(folder)
    return LabelledParts([*label_rows(train)], [*label_rows(held_out)])


def spread_rows(rows: Sequence[LabelledRow], most: int) -> list[LabelledRow]:
    """So many rows at most, from all over; 0: all."""
    count = min(most or len(rows), len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def main(arguments: list[str]) -> int:
    """Write the file; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    if len(arguments) != 5:
        sys.stderr.write(
            "usage: python -m hypergpu.workloads.slices.rows FOLDER OPTIONS TRAIN HELD_OUT MOST\n"
        )
        return 2
    folder, options_json, train, held_out, most = arguments
    try:
        options = msgspec.json.decode(options_json, type=dict[str, OptionValue])
        parts = labelled_rows(Path(folder), options)
        counts = [
            write_rows(parts.train, Path(train)),
            write_rows(spread_rows(parts.held_out, int(most)), Path(held_out)),
        ]
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[hf]'\n")
        return 1
    except (DatasetError, msgspec.MsgspecError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    for part, count in zip(("row", "row that is held out"), counts, strict=True):
        if not count:
            sys.stderr.write(
                f"error: no {part} has a token to predict. Fix: raise options.sequence_length\n"
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
