"""`hypergpu convert`: a GGUF file's model as a folder of transformers."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hypergpu.user.terminal.commands import usage_error


def convert_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The model.")],
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Made; it must not be there yet.")
    ],
    dtype: Annotated[
        str, typer.Option(help="What weights are written as: float32, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Write a GGUF file's model as a folder that transformers loads, to fine-tune it and for all
    else that takes folders. One layer is in memory at a time.
    """
    if out.exists():
        raise usage_error(f"{out} is there already", "name a folder that is not, or remove it")
    # A process of its own: this one needs neither torch nor transformers.
    command = [
        sys.executable,
        "-m",
        "hypergpu.workloads.gguf",
        "--read",
        str(file),
        str(out),
        dtype,
    ]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
