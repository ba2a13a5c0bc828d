"""`hypergpu serve`: a model on the nodes that are there, behind the API that everybody's tools
speak.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    AsJson,
    CoordinatorAddress,
    TokenFile,
    usage_error,
    with_options,
)
from hypergpu.user.terminal.output import (
    Column,
    note,
    numbers,
    progress_bars,
    progress_note,
    say,
    say_json,
    say_table,
)

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator
    from hypergpu.user.client.models import ServedModelView
    from hypergpu.user.client.resume import ReportProgress
    from hypergpu.user.serving.server import ApiPlace
    from hypergpu.user.serving.starting import ServeOrder


class ServeOptions(NamedTuple):
    """Settings of the model, and of the API."""

    name: Annotated[str, typer.Option(help="Name that calls ask for; else the folder's.")] = ""
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Nodes that hold it.")] = 1
    stages: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=64,
            help="Nodes that hold it together, each some layers; 0: whole; else chosen.",
        ),
    ] = None
    codec: Annotated[
        str, typer.Option(help="How hidden states travel between stages: float32 or int8o.")
    ] = "float32"
    standby: Annotated[
        bool,
        typer.Option(help="Whether one more node, if it is free, stands by for a lost stage."),
    ] = True
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; a GGUF has its own.")
    ] = "float32"
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of prompt and answer at most; 0: the model's.")
    ] = 0
    conversations: Annotated[
        int, typer.Option(min=1, max=64, help="Calls that a node answers side by side.")
    ] = 8
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="What nodes must have, as gpu >= 8GB; repeatable."),
    ] = None
    trusted: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL", help="Only nodes that an operator gave this label; repeatable."
        ),
    ] = None
    price: Annotated[
        str,
        typer.Option(help="Price of 1,000 tokens: a multiple of 10, in stages of 10 a layer."),
    ] = ""
    budget: Annotated[
        str, typer.Option(help="The most that the model may cost; a price needs one.")
    ] = ""
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Download the model from the hub if need be.")
    ] = False
    follow: Annotated[
        bool, typer.Option("--follow", help="Nodes take the model of each round of the JOB.")
    ] = False
    round: Annotated[
        int | None,
        typer.Option(min=0, help="The JOB's model after so many rounds, if it is kept."),
    ] = None
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="MINUTES",
            help="Time without a call after which nodes let go of the model; 0: never.",
        ),
    ] = 0.0
    base: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|NAME",
            help="What the JOB fine-tunes: it is merged here, for nodes without peft.",
        ),
    ] = ""
    best: Annotated[
        bool, typer.Option("--best", help="The JOB's best evaluated model, not its newest.")
    ] = False
    on_servers: Annotated[
        bool,
        typer.Option("--on-servers", help="A model of servers that nodes' owners run already."),
    ] = False
    detach: Annotated[
        bool, typer.Option("--detach", help="Only have it served: no API on this machine.")
    ] = False
    listen: Annotated[
        str, typer.Option(metavar="HOST", help="Where the API listens; beyond this machine TLS.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="The API's port; 0: any.")] = 8077
    tls_certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The API's certificate, PEM.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = (
        None
    )


@with_options(ServeOptions)
def serve_command(
    options: ServeOptions,
    model: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|FILE.gguf|JOB|ls|stop|api",
            help="The model's folder or file, or a fine-tuning's job; or what to do.",
        ),
    ],
    name_argument: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The model that stop ends.")
    ] = None,
    *,
    as_json: AsJson = False,
    address: CoordinatorAddress = None,
    token_file: TokenFile = None,
) -> None:
    """Chat with a model on the machines that are there: through the API of OpenAI's form."""
    from hypergpu.user.client import connect

    if (model == "stop") != (name_argument is not None):
        raise usage_error("stop takes a model's name, and nothing else does", "see serve ls")
    with connect(address, token_file=token_file) as coordinator:
        match model:
            case "ls":
                _say_models(coordinator, as_json=as_json)
            case "stop":
                _stop(coordinator, name_argument or "")
            case "api":
                _run_api(coordinator, _place(options))
            case _:
                _serve(coordinator, options, model, as_json=as_json)


def _say_models(coordinator: "Coordinator", *, as_json: bool) -> None:
    from hypergpu.user.serving.starting import ServedModels

    models = coordinator.models()
    if as_json:
        say_json(ServedModels(models))
        return
    columns = (
        Column("MODEL"),
        Column("JOB"),
        Column("STATE"),
        *numbers("READY", "OPEN", "WAITING", "TOKENS", "COST"),
    )
    rows = [
        (
            each.model,
            each.job,
            _state_text(each),
            f"{each.ready_replicas} of {each.replicas}",
            str(each.open_calls),
            str(each.waiting_calls),
            _units_text(each),
            _cost_text(each),
        )
        for each in models
    ]
    say_table(columns, rows, empty="no model is served: hypergpu serve FOLDER")


def _state_text(model: "ServedModelView") -> str:
    """Its phase, with the round that its model is after, or why no node holds it."""
    if model.is_unloaded:
        return f"unloaded: {model.reason}"
    if not model.training:
        return model.phase
    return f"{model.phase}, {'follows' if model.follows else 'at'} round {model.rounds}"


def _units_text(model: "ServedModelView") -> str:
    """What was counted so far; of a model in stages, with its unit."""
    units = f"{model.paid_units + model.due_units:,}"
    return units if model.unit == "tokens" else f"{units} {model.unit}"


def _cost_text(model: "ServedModelView") -> str:
    """What the tokens so far cost, of the budget."""
    from hypergpu.journal.worth import most_for

    if model.unit_price == "0":
        return "-"
    cost = most_for(int(model.unit_price), model.paid_units + model.due_units)
    return f"{cost} of {model.budget}"


def _stop(coordinator: "Coordinator", name: str) -> None:
    from hypergpu.user.serving.starting import model_named

    model = model_named(coordinator, name)
    coordinator.stop(model.job)
    say(f"{model.model} is served no more")


def _serve(coordinator: "Coordinator", options: ServeOptions, base: str, *, as_json: bool) -> None:
    from hypergpu.user.serving.starting import ServedModels, start_serving, wait_until_ready

    place = _place(options)
    place.check_pair()
    with progress_bars() as report:
        if (own := _ring_model(coordinator, base)) is not None:
            model = own
        elif options.base:
            model = _start_job(coordinator, options, base, report)
        elif _is_training(coordinator, options, base):
            model = _start_tuned(coordinator, options, base)
        else:
            model = start_serving(coordinator, _order(options, base), report=report, tell=note)
    if options.detach:
        _say_begun(model, as_json=as_json)
        return
    with progress_note(f"waiting for a node to hold {model.model}"):
        model = wait_until_ready(coordinator, model.job, tell=lambda each: note(each.reason))
    if as_json:
        say_json(ServedModels([model]))
    _run_api(coordinator, place, model)


def _ring_model(coordinator: "Coordinator", name: str) -> "ServedModelView | None":
    """The model of a training through a ring: its own ring answers; None: it is none."""
    if Path(name).expanduser().exists():
        return None
    matches = [each for each in coordinator.models() if name == each.job]
    return matches[-1] if matches else None


def _is_training(coordinator: "Coordinator", options: ServeOptions, name: str) -> bool:
    is_path = Path(name).expanduser().exists()
    is_job = not is_path and any(name in {job.id, job.name} for job in coordinator.jobs())
    if not is_job and (options.follow or options.round is not None):
        raise usage_error(f"{name} is no job, and has no rounds", "hypergpu job ls lists jobs")
    return is_job


def _start_tuned(coordinator: "Coordinator", options: ServeOptions, job: str) -> "ServedModelView":
    from hypergpu.ids import JobId
    from hypergpu.serving.tuned_model import BEST, LATEST, TuningSource
    from hypergpu.user.serving.starting import start_tuned

    source = TuningSource(
        job=JobId(coordinator.find_job(job)),
        which=BEST if options.best else LATEST,
        round=options.round,
        follows=options.follow,
    )
    return start_tuned(coordinator, source, _order(options, ""))


def _start_job(
    coordinator: "Coordinator", options: ServeOptions, job: str, report: "ReportProgress"
) -> "ServedModelView":
    from hypergpu.serving.tuned_model import BEST, LATEST
    from hypergpu.user.serving.adapters import start_adapter

    which = BEST if options.best else LATEST
    order = _order(options, options.base)
    return start_adapter(coordinator, job, order, which=which, report=report)


def _say_begun(model: "ServedModelView", *, as_json: bool) -> None:
    from hypergpu.user.serving.starting import ServedModels

    if as_json:
        say_json(ServedModels([model]))
        return
    say(f"{model.model}  {model.job}")
    note("see it: hypergpu serve ls; call it: hypergpu serve api")


def _order(options: ServeOptions, base: str) -> "ServeOrder":
    from hypergpu.user.serving.starting import ServeOrder

    return ServeOrder(
        base,
        name=options.name,
        replicas=options.replicas,
        dtype=options.dtype,
        context_most=options.context,
        conversations_most=options.conversations,
        requirements=tuple(options.require or ()),
        allow_hub=options.allow_hub,
        on_servers=options.on_servers,
        stages=options.stages,
        codec=options.codec,
        standby=options.standby,
        price=options.price,
        budget=options.budget,
        idle_minutes=options.idle,
        trusted=tuple(options.trusted or ()),
    )


def _place(options: ServeOptions) -> "ApiPlace":
    from hypergpu.user.serving.server import ApiPlace

    return ApiPlace(options.listen, options.port, options.tls_certificate, options.tls_key)


def _run_api(
    coordinator: "Coordinator", place: "ApiPlace", model: "ServedModelView | None" = None
) -> None:
    """Serve the API until Ctrl-C. Models go on being served."""
    from hypergpu.user.serving.api_certificate import certified_place

    with certified_place(coordinator, place) as open_place:
        _answer(coordinator, open_place, "MODEL" if model is None else model.model)


def _answer(coordinator: "Coordinator", place: "ApiPlace", name: str) -> None:
    import asyncio

    from hypergpu.user.serving.server import bound_socket, open_keys, serve_api

    keys = open_keys()
    listener = bound_socket(place)
    base_url = place.base_url(listener.getsockname()[1])

    def tell_ready() -> None:
        say(f"OPENAI_BASE_URL={base_url}")
        if not any(key.is_good for key in keys.all()):
            say(f"OPENAI_API_KEY={keys.add('first').key}")
            note("this key is shown once; others: hypergpu key add")
        if place.certificate is not None:
            say(f"SSL_CERT_FILE={place.authority or place.certificate}")
        note(f"Ctrl-C ends the API and leaves {name} served: hypergpu serve api, serve stop {name}")

    asyncio.run(serve_api(coordinator.target, place, listener, keys, tell_ready, note))
