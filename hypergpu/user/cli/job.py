"""`hypergpu job`: submit, list, show, watch, pause, resume, stop, set, rm, export."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hypergpu.journal.text import round_from_one
from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    JobName,
    NoConfirmation,
    TokenFile,
    group,
    on_coordinator,
    with_options,
)
from hypergpu.user.terminal.output import (
    confirm,
    name_or_id,
    note,
    say,
    say_json,
    say_json_line,
    say_table,
    size,
)

if TYPE_CHECKING:
    from hypergpu.jobfile.spec import JobSpec
    from hypergpu.user.client import Coordinator
    from hypergpu.user.farm.starting import MapOrder
    from hypergpu.user.farm.sweep_run import SweepRequest
    from hypergpu.user.serving.ring_file import RingJob
    from hypergpu.user.sinks.sink import Sink
from hypergpu.user.cli.job_export import export, merge, publish
from hypergpu.user.cli.job_tables import job_lines, jobs_table, participants_table

Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="SINK",
        help="Write each round to tensorboard:FOLDER, wandb:PROJECT or mlflow:URI; repeatable.",
    ),
]

app = group("Submit jobs, watch them and take their models.")
app.command()(export)
app.command()(merge)
app.command()(publish)


class SubmitOptions(NamedTuple):
    """Whether a job is only estimated, and whether and how it is followed once it is created."""

    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say time, bytes and cost, and create nothing.")
    ] = False
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False
    log: Log = None


@app.command()
@with_options(SubmitOptions)
def submit(
    options: SubmitOptions,
    file: Annotated[Path, typer.Argument(help="The job file (TOML).")],
    *,
    init: Annotated[
        str, typer.Option(metavar="FILE|JOB", help="Weights to begin with, or a job's model.")
    ] = "",
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Check a job file, upload its data and create the job; or estimate what it would take."""
    from hypergpu.jobfile.continuation import initial_weights, is_job_id, with_init
    from hypergpu.jobfile.reading import check_data_folder, read_job_file
    from hypergpu.user.client import connect

    # A wrong file is refused before anybody is called.
    sinks = _checked_sinks(options)
    if (order := _map_order(file)) is not None:
        _submit_map(order, options, (file, address, token_file), as_json=as_json)
        return
    if (sweep := _sweep_order(file)) is not None:
        _submit_sweep(sweep, options, (file, address, token_file), as_json=as_json)
        return
    if (ring := _ring_job(file)) is not None:
        _submit_ring(ring, options, (file, address, token_file), as_json=as_json)
        return
    spec = read_job_file(file)
    check_data_folder(spec, file)
    spec = with_init(spec, init)
    if spec.model.init and not is_job_id(spec.model.init):
        initial_weights(spec, file.parent)
    with connect(address, token_file=token_file) as coordinator:
        if options.estimate:
            _say_estimate(coordinator, spec, as_json=as_json)
            return
        job_id = _create(coordinator, spec, file.parent, as_json=as_json)
        if options.watch:
            _follow(coordinator, job_id, sinks, as_json=as_json)
        elif not as_json:
            note(f"watch it: hypergpu job watch {job_id}")


def _map_order(file: Path) -> "MapOrder | None":
    """The farm job that a file describes; None: it describes a training, or nothing."""
    from hypergpu.user.farm.job_file import read_map_file

    return read_map_file(file) if file.suffix == ".toml" and file.is_file() else None


def _sweep_order(file: Path) -> "SweepRequest | None":
    """The sweep that a file describes; None: it describes another job, or nothing."""
    from hypergpu.user.farm.sweep_file import read_sweep_file

    return read_sweep_file(file) if file.suffix == ".toml" and file.is_file() else None


def _ring_job(file: Path) -> "RingJob | None":
    """The training through a ring that a file describes; None: it describes another job."""
    from hypergpu.user.serving.ring_file import read_ring_file

    return read_ring_file(file) if file.suffix == ".toml" and file.is_file() else None


def _submit_ring(
    ring: "RingJob",
    options: SubmitOptions,
    source: tuple[Path, str | None, str | None],
    *,
    as_json: bool,
) -> None:
    from hypergpu.user.client import connect
    from hypergpu.user.client.values import Submitted
    from hypergpu.user.serving.ring_submitting import submit_ring
    from hypergpu.user.terminal.commands import usage_error
    from hypergpu.user.terminal.output import progress_bars

    if options.estimate:
        raise usage_error(
            "a training through a ring is estimated once its nodes hold their layers",
            "submit it: it is refused before its first step where the lines do not carry it",
        )
    _, address, token_file = source
    with connect(address, token_file=token_file) as coordinator:
        with progress_bars() as report:
            job_id = submit_ring(coordinator, ring, report=report, tell=note)
        if as_json:
            say_json_line(Submitted(job_id))
        else:
            say(job_id)
        if options.watch:
            _follow(coordinator, job_id, _open_sinks(options.log), as_json=as_json)
        elif not as_json:
            note(f"watch it: hypergpu job watch {job_id}; then call it: hypergpu serve {job_id}")


def _submit_sweep(
    order: "SweepRequest",
    options: SubmitOptions,
    source: tuple[Path, str | None, str | None],
    *,
    as_json: bool,
) -> None:
    from hypergpu.user.cli.sweep import run_sweep
    from hypergpu.user.client import connect
    from hypergpu.user.client.values import Submitted
    from hypergpu.user.farm.sweep_run import SweepRun
    from hypergpu.user.terminal.commands import usage_error

    file, address, token_file = source
    if options.estimate:
        raise usage_error("a sweep has no estimate", "estimate its job: hypergpu job submit JOB")
    with connect(address, token_file=token_file) as coordinator:
        if options.watch:
            run_sweep(coordinator, order, as_json=as_json)
            return
        run = SweepRun(coordinator, order)
        if as_json:
            say_json_line(Submitted(run.id))
        else:
            say(run.id)
        note(f"go on and take its output: hypergpu sweep {file} --resume")


def _submit_map(
    order: "MapOrder",
    options: SubmitOptions,
    source: tuple[Path, str | None, str | None],
    *,
    as_json: bool,
) -> None:
    from hypergpu.user.cli.map import run_map, say_map_estimate
    from hypergpu.user.client import connect
    from hypergpu.user.client.values import Submitted
    from hypergpu.user.farm.starting import start_map

    file, address, token_file = source
    with connect(address, token_file=token_file) as coordinator:
        if options.estimate:
            say_map_estimate(coordinator, order, as_json=as_json)
        elif options.watch:
            run_map(coordinator, order, as_json=as_json)
        else:
            run = start_map(coordinator, order)
            if as_json:
                say_json_line(Submitted(run.id))
            else:
                say(run.id)
            note(f"take its output: hypergpu map {file} --resume")


def _checked_sinks(options: SubmitOptions) -> "list[Sink]":
    from hypergpu.user.terminal.commands import usage_error

    if options.estimate and options.watch:
        raise usage_error("--estimate creates no job to watch", "leave one of both out")
    if options.log and not options.watch:
        raise usage_error("--log writes what a watch sees", "add --watch, or log by job watch")
    return _open_sinks(options.log)


def _create(coordinator: "Coordinator", spec: "JobSpec", beside: Path, *, as_json: bool) -> str:
    from hypergpu.jobfile.notes import submit_note
    from hypergpu.user.client.values import Submitted
    from hypergpu.user.terminal.output import progress_bars

    with progress_bars() as report:
        job_id = coordinator.submit(spec, beside=beside, report=report)
    if as_json:
        say_json_line(Submitted(job_id))
        return job_id
    if note_text := submit_note(spec):
        note(note_text)
    say(job_id)
    return job_id


def _say_estimate(coordinator: "Coordinator", spec: "JobSpec", *, as_json: bool) -> None:
    from hypergpu.jobfile.notes import submit_note
    from hypergpu.user.terminal.forecast import forecast_lines

    forecast = coordinator.estimate(spec)
    if as_json:
        say_json(forecast)
        return
    if note_text := submit_note(spec):
        note(note_text)
    for line in forecast_lines(forecast):
        say(line)


@app.command(name="continue")
@on_coordinator
def continue_job(
    coordinator: "Coordinator",
    job: JobName = None,
    *,
    rounds: Annotated[int, typer.Option(help="Rounds to train on.")],
    name: Annotated[str, typer.Option(help="Name of the new job; else the old one's.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a job that goes on from a job's newest model, with its settings and data."""
    from hypergpu.user.client.values import Submitted

    job_id = coordinator.continue_job(coordinator.find_job(job), rounds, name=name)
    if as_json:
        say_json(Submitted(job_id))
    else:
        say(job_id)
        note(f"watch it: hypergpu job watch {job_id}")


@app.command()
@on_coordinator
def ls(coordinator: "Coordinator", *, as_json: AsJson = False) -> None:
    """List all jobs with their phase and the reason for it."""
    from hypergpu.user.client.values import Jobs

    jobs = coordinator.jobs()
    if as_json:
        say_json(Jobs(jobs))
        return
    empty = "no jobs yet; submit one: hypergpu job submit FILE.toml"
    say_table(*jobs_table(jobs), empty=empty)


@app.command()
@on_coordinator
def show(coordinator: "Coordinator", job: JobName = None, *, as_json: AsJson = False) -> None:
    """Show one job: figures, settings, nodes that cannot train it, and those of the open round."""
    from hypergpu.user.cli.lacking_nodes import lacking_lines
    from hypergpu.user.client import ENDED

    detail = coordinator.job(coordinator.find_job(job), wants_forecast=True)
    if as_json:
        say_json(detail)
        return
    for line in job_lines(detail):
        say(line)
    if detail.job.phase not in ENDED:
        workload = str(detail.spec.get("workload", ""))
        for line in lacking_lines(coordinator, detail.job.id, workload):
            say(line)
    for unfit in detail.unfit:
        say(f"  unfit     {name_or_id(unfit.name, unfit.id)}: {unfit.reason}")
    if detail.job.bundles is None:
        say()
        say_table(*participants_table(detail), empty="no round is open")


@app.command()
@on_coordinator
def watch(
    coordinator: "Coordinator", job: JobName = None, *, log: Log = None, as_json: AsJson = False
) -> None:
    """Follow a job until it ends; survives restarts of the coordinator."""
    _follow(coordinator, coordinator.find_job(job), _open_sinks(log), as_json=as_json)


def _open_sinks(log: list[str] | None) -> "list[Sink]":
    if not log:
        return []
    from hypergpu.user.sinks.sink import named_sinks

    return named_sinks(log)


def _follow(
    coordinator: "Coordinator", job_id: str, sinks: "Sequence[Sink]", *, as_json: bool
) -> None:
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.user.sinks.sink import with_sinks
    from hypergpu.user.terminal.watch import follow, open_view

    try:
        with (
            open_view(as_json=as_json) as view,
            with_sinks(view, coordinator.job(job_id), sinks) as both,
        ):
            progress = follow(coordinator, job_id, both)
    except KeyboardInterrupt:
        note(f"the job goes on; watch it again: hypergpu job watch {job_id}")
        raise
    job = progress.job
    if job is not None and job.phase == "failed":
        why = round_from_one(job.reason)
        raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, f"{job_id} failed: {why}")


@app.command()
@on_coordinator
def pause(coordinator: "Coordinator", job: JobName = None) -> None:
    """Stop the job's work now; what was accepted stays, and a resume goes on from it."""
    job_id = coordinator.find_job(job)
    coordinator.pause(job_id)
    say(f"{job_id} paused; go on with: hypergpu job resume {job_id}")


@app.command()
@on_coordinator
def resume(coordinator: "Coordinator", job: JobName = None) -> None:
    """Go on with a paused job."""
    from hypergpu.errors import HyperGPUError, Reason

    job_id = coordinator.find_job(job)
    coordinator.resume(job_id)
    after = coordinator.job(job_id).job
    if after.phase == "paused":
        detail = f"{job_id} is paused again at once: {round_from_one(after.reason)}"
        raise HyperGPUError(
            Reason.JOB_PHASE,
            detail,
            fix="change what paused it (hypergpu job set), then resume it again",
        )
    say(f"{job_id} goes on")


@app.command()
@on_coordinator
def stop(coordinator: "Coordinator", job: JobName = None, *, yes: NoConfirmation = False) -> None:
    """End a job for good, with the model it has."""
    job_id = coordinator.find_job(job)
    confirm(f"stop {job_id} for good?", yes=yes)
    coordinator.stop(job_id)
    say(f"{job_id} stopped; take its model: hypergpu job export {job_id}")


@app.command(name="set")
@on_coordinator
def set_parameters(
    coordinator: "Coordinator",
    words: Annotated[list[str], typer.Argument(metavar="[JOB] KEY=VALUE...")],
) -> None:
    """Change settings from the next round on, for example: hypergpu job set lr=0.0005."""
    from hypergpu.jobfile.reading import parameter_words, with_parameters
    from hypergpu.user.terminal.commands import usage_error

    job_name = None if "=" in words[0] else words[0]
    changes = parameter_words(words[1:] if job_name else words)
    if not changes:
        raise usage_error("there is nothing to set", "add KEY=VALUE, for example lr=0.001")
    job_id = coordinator.find_job(job_name)
    if coordinator.job(job_id).job.bundles is not None:
        _raise_budget(coordinator, job_id, changes)
        return
    # Whatever the job file's checks refuse is refused here already, with every problem named.
    with_parameters(coordinator.spec(job_id), changes)
    coordinator.set_parameters(job_id, changes)
    for key, value in changes.items():
        say(f"{job_id}  {key} = {value} from the next round on")


def _raise_budget(coordinator: "Coordinator", job_id: str, changes: dict[str, str]) -> None:
    """Raise the budget of a farm job, its only setting that can be changed."""
    from hypergpu.user.terminal.commands import usage_error

    budget = changes.get("budget", "")
    if changes.keys() != {"budget"} or not budget.isdecimal():
        raise usage_error(
            "of a farm job the budget alone can be changed, a whole number",
            "write budget=AMOUNT in the smallest unit of money",
        )
    coordinator.raise_budget(job_id, int(budget))
    say(f"{job_id}  may cost {budget}; it is {coordinator.job(job_id).job.phase}")


@app.command()
@on_coordinator
def rm(
    coordinator: "Coordinator",
    job: Annotated[str, typer.Argument(help="A job's id, or its name.")],
    *,
    yes: NoConfirmation = False,
) -> None:
    """Delete an ended job with its journal and blobs."""
    job_id = coordinator.find_job(job)
    confirm(f"delete {job_id} and its models?", yes=yes)
    freed_bytes = coordinator.remove(job_id)
    say(f"{job_id} removed, {size(freed_bytes)} freed")


@app.command()
def export_page(
    job: Annotated[str, typer.Argument(help="A job's id or its beginning, or its name.")],
    out: Annotated[
        Path, typer.Argument(help="The file; a name that ends in .json gets the recording alone.")
    ],
    *,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Write a job's whole course as one page that opens from disk, with replay."""
    import subprocess

    from hypergpu.command_line import program

    # The page's server is a process of its own: this one needs neither it nor its libraries.
    command = program("dashboard_api", "--export-job", job, "--out", str(out))
    command += [*(["--coordinator", address] if address else [])]
    command += [*(["--token-file", token_file] if token_file else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
