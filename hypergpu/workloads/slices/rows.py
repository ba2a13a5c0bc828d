"""`python -m hypergpu.workloads.slices.rows FOLDER OPTIONS OUT` writes the training rows of a
fine-tuning as tokens, each row by itself: rows of a ring need no packing.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypergpu.rings.token_rows import LabelledRow, write_rows
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionValue


def training_rows(folder: Path, options: dict[str, OptionValue]) -> Iterator[LabelledRow]:
    """Rows of a job's folder, without those that are held out.

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
    train, _, _ = read_rows(folder)
    for row in train:
        for each in token_rows(row, tokenizer, rules):
            if len(each.tokens) > 1:
                yield LabelledRow(each.tokens, each.labels)


def main(arguments: list[str]) -> int:
    """Write the file; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    if len(arguments) != 3:
        sys.stderr.write("usage: python -m hypergpu.workloads.slices.rows FOLDER OPTIONS OUT\n")
        return 2
    try:
        options = msgspec.json.decode(arguments[1], type=dict[str, OptionValue])
        count = write_rows(training_rows(Path(arguments[0]), options), Path(arguments[2]))
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[hf]'\n")
        return 1
    except (DatasetError, msgspec.MsgspecError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not count:
        sys.stderr.write(
            "error: no row has a token to predict. Fix: raise options.sequence_length\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
