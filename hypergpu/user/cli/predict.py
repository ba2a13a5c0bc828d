"""`hypergpu predict`: what a trained classifier or program says of a few rows."""

import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    TokenFile,
    usage_error,
    with_options,
)
from hypergpu.user.terminal.output import say

_SCORE_DIGITS = 4
_NUMBERS_SHOWN = 8


class PredictOptions(NamedTuple):
    """Rows, and what is asked of the model."""

    text: Annotated[
        list[str] | None, typer.Option("--text", help="A text in place of data; repeatable.")
    ] = None
    base: Annotated[
        str, typer.Option(metavar="FOLDER|NAME", help="What the JOB of a classifier fine-tunes.")
    ] = ""
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Download the base from the hub if need be.")
    ] = False
    output: Annotated[
        str, typer.Option(metavar="NAME", help="Of a program, the output; else its first one.")
    ] = ""
    best: Annotated[
        bool, typer.Option("--best", help="The JOB's best evaluated model, not its newest.")
    ] = False
    text_field: Annotated[
        str, typer.Option(help="Field that is the text; else text or the only one.")
    ] = ""
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="What nodes must have, as gpu >= 8GB; repeatable."),
    ] = None


@with_options(PredictOptions)
def predict_command(
    options: PredictOptions,
    model: Annotated[
        str, typer.Argument(metavar="JOB|FOLDER", help="What trained it, an export, or a model.")
    ],
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DATA]", help="A .jsonl, .csv, .npz or .parquet file, or a folder."
        ),
    ] = None,
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Say what a trained classifier or program gives for a few rows: nodes compute it."""
    from hypergpu.user.client import connect
    from hypergpu.user.farm.predicting import predict

    if (source is None) == (not options.text):
        raise usage_error("predict takes data or texts", 'name a file, or give --text "..."')
    rows: Any = source if source is not None else [{"text": text} for text in options.text or []]
    with connect(address, token_file=token_file) as coordinator:
        values = predict(
            model,
            rows,
            coordinator=coordinator,
            base=options.base,
            allow_hub=options.allow_hub,
            output=options.output,
            which="best" if options.best else "latest",
            text_field=options.text_field,
            requirements=tuple(options.require or ()),
        )
    _say_values(values, as_json=as_json)


def _say_values(values: Any, *, as_json: bool) -> None:
    """Say a row a line: labels with their shares, or numbers."""
    import msgspec
    import numpy as np

    if isinstance(values, np.ndarray):
        rows = [{"id": number, "output": row.tolist()} for number, row in enumerate(values)]
    else:
        rows = msgspec.json.decode(values.to_json(orient="records"))
    for row in rows:
        if as_json:
            sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        else:
            say(_row_text(row))


def _row_text(row: dict[str, Any]) -> str:
    if row.get("label") is not None:
        return f"{row['id']}  {row['label']}  {round(float(row['score']), _SCORE_DIGITS)}"
    if "label" in row:
        return f"{row['id']}  no label: {row.get('error') or 'see docs/farm.md'}"
    numbers = row["output"] if isinstance(row["output"], list) else [row["output"]]
    text = " ".join(
        f"{each:.6g}" if isinstance(each, float) else str(each) for each in numbers[:_NUMBERS_SHOWN]
    )
    return f"{row['id']}  {text}" + (" ..." if len(numbers) > _NUMBERS_SHOWN else "")
