"""`hypergpu job export`, `merge` and `publish`: a job's model as files, for other programs too."""

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    JobName,
    TokenFile,
    usage_error,
    with_options,
)
from hypergpu.user.terminal.output import say, say_json, size

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator
    from hypergpu.user.client.export import ExportedModel

_GGUF_NAME = "model.gguf"
_ONNX_NAME = "model.onnx"
_GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")


class ExportOptions(NamedTuple):
    """Files and forms of an export."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; else the job's id.")] = (
        None
    )
    best: Annotated[bool, typer.Option("--best", help="The best evaluated, not the newest.")] = (
        False
    )
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also what no export of this job wrote.")
    ] = False
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Also model.gguf, which llama.cpp and Ollama load.")
    ] = False
    gguf_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Its numbers: f32, f16, bf16 or q8_0.")
    ] = "f32"
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also model.onnx, of a program of one's own.")
    ] = False
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The job's data: a base for --gguf, samples for --onnx."
        ),
    ] = None

    def check(self) -> None:
        """Refuse options that do not go together, before anything is fetched."""
        if self.gguf_type not in _GGUF_TYPES:
            types = ", ".join(_GGUF_TYPES)
            raise usage_error(f"--gguf-type {self.gguf_type} is none of {types}", "give one")
        if self.gguf and self.data is None:
            detail = "--gguf writes the base with its adapter, and needs the base"
            raise usage_error(detail, "give --data FOLDER, the job's data, which has base/")
        if self.onnx and self.data is None:
            detail = "--onnx compares the file with torch on samples of the job"
            raise usage_error(detail, "give --data FOLDER, with samples as .npz or .parquet files")


@with_options(ExportOptions)
def export(
    options: ExportOptions,
    job: JobName = None,
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Write the model as safetensors, its card and a load.py; of a training through a ring, the
    adapter as peft loads it. An interrupted export goes on.
    """
    from hypergpu.user.client import connect

    options.check()
    with connect(address, token_file=token_file) as coordinator:
        files = _export(coordinator, options, job)
    is_adapter = files.loader.suffix != ".py"
    if is_adapter and (options.gguf or options.onnx):
        detail = f"{files.model} is written, and no other form: a ring trained it"
        raise usage_error(detail, "leave --gguf and --onnx out")
    forms = _write_forms(options, files.model.parent)
    if as_json:
        from hypergpu.user.client.values import Exported

        model, card, loader = map(str, (files.model, files.card, files.loader))
        gguf, onnx = (str(path) if path else "" for path in forms)
        say_json(Exported(model, card, loader, files.digest, files.size_bytes, gguf, onnx))
        return
    say(f"{files.model}  {size(files.size_bytes)}, model {files.digest}")
    say(f"{files.card}")
    if is_adapter:
        folder = files.model.parent
        say(f"{files.loader}  load it: PeftModel.from_pretrained(BASE, {str(folder)!r})")
    else:
        say(f"{files.loader}  try the model: python {files.loader}")
    for path in filter(None, forms):
        say(f"{path}  {size(path.stat().st_size)}")


def _export(coordinator: "Coordinator", options: ExportOptions, job: str | None) -> "ExportedModel":
    from hypergpu.user.terminal.output import progress_bars

    which = "best" if options.best else "latest"
    with progress_bars() as report:
        job_id = coordinator.find_job(job)
        folder = options.out or Path(job_id)
        return coordinator.export(
            job_id, folder, which=which, may_overwrite=options.overwrite, report=report
        )


def _write_forms(options: ExportOptions, folder: Path) -> tuple[Path | None, Path | None]:
    """Write further forms of an export; gives their files."""
    gguf = onnx = None
    if options.gguf:
        gguf = folder / _GGUF_NAME
        _run("hypergpu.workloads.finetuning.export", str(folder), str(options.data))
        merged_folder = str(folder / "merged")
        _run("hypergpu.workloads.gguf", merged_folder, str(gguf), options.gguf_type)
    if options.onnx:
        onnx = folder / _ONNX_NAME
        _run("hypergpu.workloads.onnx", str(folder), str(onnx), str(options.data))
    return gguf, onnx


def _run(module: str, *words: str) -> None:
    """Run a module in a process of its own: this one needs neither torch nor transformers."""
    command = [sys.executable, "-m", module, *words]
    status = subprocess.run(command, check=False, stdout=sys.stderr).returncode
    if status:
        raise typer.Exit(status)


def merge(
    export_folder: Annotated[Path, typer.Argument(help="What `hypergpu job export` wrote.")],
    data_folder: Annotated[Path, typer.Argument(help="The job's data, with its base.")],
) -> None:
    """Write a trained adapter as peft loads it, and merged as transformers loads it."""
    # A process of its own: this one needs neither torch nor transformers.
    module = "hypergpu.workloads.finetuning.export"
    command = [sys.executable, "-m", module, str(export_folder), str(data_folder)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def publish(
    folder: Annotated[Path, typer.Argument(help="An export, or its adapter/ or merged/.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="Seen by its owner alone.")] = False,
    license_name: Annotated[
        str, typer.Option("--license", help="As the hub names it, such as apache-2.0.")
    ] = "",
    base_model: Annotated[
        str, typer.Option("--base-model", help="The base's name on the hub.")
    ] = "",
) -> None:
    """Push an export with its card to the Hugging Face hub, or the one that HF_ENDPOINT names."""
    from hypergpu.user.client.publishing import PublishOrder, publish_export

    say(publish_export(PublishOrder(folder, repository, private, license_name, base_model)))
