"""`hypergpu job ...`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.terminal.commands import group
from hypergpu.terminal.options import Address, AsJson, JobName, NoConfirmation, TokenFile

if TYPE_CHECKING:
    from hypergpu.client.calls import Coordinator

app = group("Submit jobs, watch them and take their models.")


def _found(coordinator: "Coordinator", name: str | None) -> str:
    from hypergpu.client.selection import job_named

    return job_named(coordinator.jobs(), name)


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Check a job file, upload its data and create the job."""
    from hypergpu.client.calls import connect
    from hypergpu.client.values import Submitted
    from hypergpu.jobfile import check_data_folder, read_job_file
    from hypergpu.terminal.submission import submit_file

    spec = read_job_file(file)
    check_data_folder(spec, file)
    with connect(address, token_file) as coordinator:
        job_id = submit_file(coordinator, spec, file.parent)
        _say_submitted(Submitted(job_id), as_json=as_json, is_watched=watch)
        if watch:
            _follow(coordinator, job_id, as_json=as_json)


def _say_submitted(submitted: "object", *, as_json: bool, is_watched: bool) -> None:
    from hypergpu.client.values import Submitted
    from hypergpu.terminal.output import note, say, say_json_line

    if not isinstance(submitted, Submitted):
        return
    if as_json:
        say_json_line(submitted)
    else:
        say(submitted.job)
        if not is_watched:
            note(f"watch it: hypergpu job watch {submitted.job}")


@app.command()
def ls(*, as_json: AsJson = False, address: Address = None, token_file: TokenFile = None) -> None:
    """List the jobs."""
    from hypergpu.cli.show.tables import JOB_COLUMNS, job_row
    from hypergpu.client.calls import connect
    from hypergpu.client.values import Jobs, job_view
    from hypergpu.terminal.output import say_json, say_table

    with connect(address, token_file) as coordinator:
        jobs = [job_view(job) for job in coordinator.jobs()]
    if as_json:
        say_json(Jobs(jobs))
    else:
        empty = "no jobs yet; submit one: hypergpu job submit FILE.toml"
        say_table(JOB_COLUMNS, [job_row(job) for job in jobs], empty=empty)


@app.command()
def show(
    job: JobName = None,
    *,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Show one job: phase and why, figures, settings, who works on it."""
    from hypergpu.cli.show.tables import PARTICIPANT_COLUMNS, job_lines, participant_rows
    from hypergpu.client.calls import connect
    from hypergpu.client.values import job_detail
    from hypergpu.terminal.output import say, say_json, say_table

    with connect(address, token_file) as coordinator:
        detail = job_detail(coordinator.job(_found(coordinator, job)))
    if as_json:
        say_json(detail)
        return
    for line in job_lines(detail):
        say(line)
    say()
    empty = "no round is open"
    say_table(PARTICIPANT_COLUMNS, participant_rows(detail), empty=empty)


@app.command()
def watch(
    job: JobName = None,
    *,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Follow a job until it ends; survives restarts of the coordinator."""
    from hypergpu.client.calls import connect

    with connect(address, token_file) as coordinator:
        _follow(coordinator, _found(coordinator, job), as_json=as_json)


def _follow(coordinator: "Coordinator", job_id: str, *, as_json: bool) -> None:
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.terminal.output import note
    from hypergpu.terminal.views import shown
    from hypergpu.terminal.watch import follow

    try:
        with shown(as_json=as_json) as view:
            progress = follow(coordinator, job_id, view)
    except KeyboardInterrupt:
        note(f"the job goes on; watch it again: hypergpu job watch {job_id}")
        raise
    job = progress.job
    if job is not None and job.phase == "failed":
        raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, f"{job_id} failed: {job.reason}")


@app.command()
def pause(job: JobName = None, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Let the open round finish and open no other."""
    from hypergpu.client.calls import connect
    from hypergpu.terminal.output import say

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        coordinator.pause(job_id)
    say(f"{job_id} paused; go on with: hypergpu job resume {job_id}")


@app.command()
def resume(job: JobName = None, *, address: Address = None, token_file: TokenFile = None) -> None:
    """Go on with a paused job."""
    from hypergpu.client.calls import connect
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.terminal.output import say

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        coordinator.resume(job_id)
        after = coordinator.job(job_id).job
    if after.phase == "paused":
        detail = f"{job_id} is paused again at once: {after.reason}"
        raise HyperGPUError(Reason.JOB_PHASE, detail, fix="mend that as said, then resume it again")
    say(f"{job_id} goes on")


@app.command()
def stop(
    job: JobName = None,
    *,
    yes: NoConfirmation = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """End a job for good, with the model it has."""
    from hypergpu.client.calls import connect
    from hypergpu.terminal.output import confirm, say

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        confirm(f"stop {job_id} for good?", yes=yes)
        coordinator.stop(job_id)
    say(f"{job_id} stopped; take its model: hypergpu job export {job_id}")


@app.command(name="set")
def change(
    words: Annotated[list[str], typer.Argument(metavar="[JOB] KEY=VALUE...")],
    *,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Change settings from the next round on, for example: hypergpu job set lr=0.0005."""
    import msgspec

    from hypergpu.client.calls import connect
    from hypergpu.jobfile import parameter_words, with_parameters
    from hypergpu.jobfile.spec import JobSpec
    from hypergpu.terminal.failure import usage_error
    from hypergpu.terminal.output import say

    named = None if "=" in words[0] else words[0]
    changes = parameter_words(words[1:] if named else words)
    if not changes:
        raise usage_error("there is nothing to set", "add KEY=VALUE, for example lr=0.001")
    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, named)
        spec = msgspec.json.decode(coordinator.job(job_id).spec_json, type=JobSpec)
        with_parameters(spec, changes)
        coordinator.change(job_id, changes)
    for key, value in changes.items():
        say(f"{job_id}  {key} = {value} from the next round on")


@app.command()
def rm(
    job: Annotated[str, typer.Argument(help="A job's id, or its name.")],
    *,
    yes: NoConfirmation = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Delete an ended job with its journal and blobs."""
    from hypergpu.client.calls import connect
    from hypergpu.terminal.figures import size
    from hypergpu.terminal.output import confirm, say

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        confirm(f"delete {job_id} and its models?", yes=yes)
        freed = coordinator.remove(job_id)
    say(f"{job_id} removed, {size(freed)} freed")


@app.command()
def export(  # noqa: PLR0913 - each is an option
    job: JobName = None,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder; else the job's id.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best evaluated, not the newest.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also what no export of this job wrote.")
    ] = False,
    as_json: AsJson = False,
    address: Address = None,
    token_file: TokenFile = None,
) -> None:
    """Write the model as safetensors, and its card. An interrupted export goes on where it was."""
    from hypergpu.client.calls import connect
    from hypergpu.client.export import Order, export_model
    from hypergpu.client.values import Exported
    from hypergpu.terminal.figures import size
    from hypergpu.terminal.output import say, say_json
    from hypergpu.terminal.transfer import transfer

    with connect(address, token_file) as coordinator:
        job_id = _found(coordinator, job)
        which = "best" if best else "latest"
        order = Order(job_id, out or Path(job_id), which, is_overwriting=overwrite)
        with transfer(f"model of {job_id}") as report:
            made = export_model(coordinator, order, report)
    if as_json:
        say_json(Exported(str(made.model), str(made.card), made.digest, made.size_bytes))
    else:
        say(f"{made.model}  {size(made.size_bytes)}, model {made.digest}")
        say(f"{made.card}")
