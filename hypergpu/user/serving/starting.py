"""Has a model served: its files are sent, a job is created, and its replicas are waited for."""

import math
import re
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.gguf.header import read_gguf_header
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut
from hypergpu.serving.serve_request import (
    EMBED_KIND,
    ENGINE_KIND,
    GGUF_FILE,
    GGUF_KIND,
    IDLE_MS_MOST,
    PRICED_TOKENS,
    PRICED_UNITS,
    SERVER_KIND,
    TUNED_KIND,
    ServeRequest,
)
from hypergpu.serving.tuned_model import TuningSource
from hypergpu.units import Bytes, Milliseconds, Wei
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import ServedModelView
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.farm.base_parts import base_parts
from hypergpu.user.serving.stage_choice import choose_stages, parameter_bytes
from hypergpu.user.serving.stage_files import read_sizes, write_stage_files
from hypergpu.user.training.bases import GGUF_SUFFIX, find_base
from hypergpu.work_units import WorkUnit

_STEP = "sending the model"
_LOOK_S = 0.5


class ServeOrder(NamedTuple):
    """A model that is to be served."""

    base: str
    """Folder of the model, a GGUF file, or its name on the hub."""
    name: str = ""
    """Name that calls ask for; empty: the folder's or the file's."""
    replicas: int = 1
    dtype: str = "float32"
    context_most: int = 0
    conversations_most: int = 8
    requirements: tuple[str, ...] = ()
    allow_hub: bool = False
    on_servers: bool = False
    """Whether ``base`` names a model of servers that owners of nodes run already."""
    stages: int | None = None
    """Nodes that hold the model together, each some of its layers; 0: each holds it whole; None:
    as few as can, where no node holds it whole.
    """
    codec: str = "float32"
    """How hidden states travel between stages: ``float32``, or ``int8o`` in a quarter."""
    standby: bool = True
    """Whether one node more, if it is free, holds a stage ready for one that is lost."""
    price: str = ""
    """Price of 1,000 tokens, a whole number of the smallest unit of money; empty: none. In stages
    it follows from it what 1,000 layer-tokens cost.
    """
    budget: str = ""
    """The most that it may cost, as the price."""
    trusted: tuple[str, ...] = ()
    """Labels that operators must have given a node."""
    idle_minutes: float = 0.0
    """Time without a call after which nodes let go of the model; 0: they never do."""

    @property
    def idle_ms(self) -> Milliseconds:
        """The same in milliseconds.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is below 0 or no time.
        """
        if not 0 <= self.idle_minutes * 60_000 <= IDLE_MS_MOST:
            detail = f"idle is {self.idle_minutes:g} minutes"
            fix = f"give 0 to {IDLE_MS_MOST // 60_000} minutes; 0: nodes never let go of the model"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        return Milliseconds(math.ceil(self.idle_minutes * 60_000))

    def request(self, model: str, engine: str, **more: Any) -> ServeRequest:
        """The request of a model.

        Args:
            model: Name that calls ask for.
            engine: What computes it.
            more: What is sent of the model, or where the coordinator has it.

        Raises:
            HyperGPUError: A setting is not right.
        """
        cut: ModelCut | None = more.get("cut")
        request = ServeRequest(
            model=model,
            engine=engine,
            dtype=self.dtype,
            context_most=self.context_most,
            conversations_most=self.conversations_most,
            replicas=self.replicas,
            requirements=self.requirements,
            unit=WorkUnit.TOKENS if cut is None else WorkUnit.LAYER_TOKENS,
            unit_price=self.unit_price(1 if cut is None else cut.layers),
            budget=self.budget_amount,
            idle_ms=self.idle_ms,
            trusted=self.trusted,
            **{"files": {}, **more},
        )
        request.check()
        return request

    def unit_price(self, layers: int = 1) -> Wei:
        """Price of `PRICED_UNITS` units.

        Args:
            layers: Layers that are paid by themselves, as in stages; 1: tokens are.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is no such number, or does not divide.
        """
        price, divisor = _amount("price", self.price), PRICED_TOKENS // PRICED_UNITS * layers
        if price % divisor:
            detail = f"the price of 1,000 tokens is {price}"
            fix = f"give a multiple of {divisor}"
            if layers > 1:
                detail = f"{detail}, which {layers} layers do not share in whole numbers"
                fix = f"{fix}: {' or '.join(map(str, _nearest_multiples(price, divisor)))}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        if price and not self.budget:
            fix = "state the most that it may cost: --budget AMOUNT"
            detail = "a model with a price needs a budget"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        return Wei(price // divisor)

    @property
    def budget_amount(self) -> Wei:
        """The most that it may cost.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is no such number, or there is no price.
        """
        budget = _amount("budget", self.budget)
        if budget and not self.price:
            fix = "state what 1,000 tokens cost: --price AMOUNT; or leave the budget out"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, "a budget needs a price", fix=fix)
        return Wei(budget)


def _nearest_multiples(number: int, divisor: int) -> list[int]:
    """Those above 0 around a number."""
    below = number - number % divisor
    return [each for each in (below, below + divisor) if each]


def _amount(name: str, text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and int(text)):
        detail = f"{name} is {text!r}"
        fix = "give a whole number above 0 of the smallest unit of money, or leave it out"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return int(text)


def start_serving(
    coordinator: Coordinator,
    order: ServeOrder,
    *,
    report: ReportProgress = ignore,
    tell: Callable[[str], None] = lambda _: None,
) -> ServedModelView:
    """Send a model's files and create its job. Returns before a node holds it.

    Args:
        coordinator: An open connection.
        order: The model.
        report: Told how much was sent.
        tell: Told why it is served in stages, where its user did not state them.

    Raises:
        HyperGPUError: There is no model that can be served, or the job is refused.
    """
    order.request("unnamed", SERVER_KIND)  # settings are wrong before anything is read
    order = _with_stages(coordinator, order, tell)
    with tempfile.TemporaryDirectory(prefix="hypergpu-serve-") as scratch:
        files = _model_files(order, Path(scratch))
        # A server is asked for its model by the name that it has for it.
        name = files.usual_name if order.on_servers else order.name or files.usual_name
        blobs = {name: _blob(path) for name, path in files.paths.items()}
        request = order.request(name, files.engine, files=blobs, cut=files.cut)
        if files.paths:
            coordinator.send_blobs([*files.paths.values()], step=_STEP, report=report)
    job_id = coordinator.create_serve(request, request_id=uuid.uuid4().hex)
    return model_named(coordinator, job_id)


def _with_stages(
    coordinator: Coordinator, order: ServeOrder, tell: Callable[[str], None]
) -> ServeOrder:
    """The order with stages, where none are stated and no node holds the model whole."""
    is_file = Path(order.base).suffix.lower() == GGUF_SUFFIX
    if order.stages is not None or order.on_servers or is_file or order.replicas > 1:
        return order
    folder = _model_folder(find_base(order.base, allow_hub=order.allow_hub))
    model_bytes = parameter_bytes(folder, order.dtype)
    choice = choose_stages(
        _usual_name(order, folder),
        model_bytes,
        coordinator.nodes(),
        lambda: read_sizes(folder, order.dtype),
    )
    if choice.reason:
        tell(choice.reason)
    return order._replace(stages=choice.stages)


def start_tuned(
    coordinator: Coordinator, source: TuningSource, order: ServeOrder
) -> ServedModelView:
    """Have the model of a fine-tuning served: the coordinator has base and adapter, so that nothing
    is sent. Returns before a node holds it.

    Args:
        coordinator: An open connection.
        source: The training, by its id.
        order: Its ``base`` is not used; its name is the job's id where it has none.

    Raises:
        HyperGPUError: There is no such model, or the job is refused.
    """
    request = order.request(order.name or source.job, TUNED_KIND, source=source)
    job_id = coordinator.create_serve(request, request_id=uuid.uuid4().hex)
    return model_named(coordinator, job_id)


class ModelFiles(NamedTuple):
    """The files of a model, by their names in a request."""

    paths: dict[str, Path]
    engine: str
    usual_name: str
    cut: ModelCut | None = None
    """How the model is cut into stages; None: it is not."""


def _model_files(order: ServeOrder, scratch: Path) -> ModelFiles:
    if order.on_servers:
        return ModelFiles({}, SERVER_KIND, order.base)
    path = Path(order.base).expanduser()
    is_gguf = path.suffix.lower() == GGUF_SUFFIX
    if is_gguf and not order.stages:
        return _gguf_files(path)
    if is_gguf:
        return _stage_files(order, path, scratch, _gguf_files(path).usual_name)
    folder = _model_folder(find_base(order.base, allow_hub=order.allow_hub))
    if order.stages:
        return _stage_files(order, folder, scratch, _usual_name(order, folder))
    parts = base_parts(folder)
    index = scratch / BASE_INDEX
    index.write_bytes(parts.index_content)
    files = {BASE_INDEX: index, **parts.large_files}
    # sentence-transformers writes it, and transformers alone does not.
    engine = EMBED_KIND if (folder / "modules.json").is_file() else ENGINE_KIND
    return ModelFiles(files, engine, _usual_name(order, folder))


def _stage_files(order: ServeOrder, path: Path, scratch: Path, usual_name: str) -> ModelFiles:
    """Files of layers of a folder, or of a GGUF file."""
    if order.price:  # A price that does not divide is refused before all is written.
        order.unit_price(read_sizes(path, order.dtype).layers)
    stage_files = write_stage_files(path, scratch, order.dtype)
    cut = stage_files.cut(order.stages or 0, order.codec)
    cut = replace(cut, has_standby=order.standby)
    return ModelFiles(stage_files.paths, STAGE_KIND, usual_name, cut)


def _gguf_files(path: Path) -> ModelFiles:
    """A GGUF file, checked as nodes will check it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is none that may be opened, or a part of one.
    """
    header = read_gguf_header(path)
    if header.number("split.count") not in {None, 0, 1}:
        detail = f"{path.name} is one of {header.number('split.count')} parts of a model"
        fix = "join them first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")
    return ModelFiles({GGUF_FILE: path}, GGUF_KIND, name)


def _usual_name(order: ServeOrder, folder: Path) -> str:
    """Name of the folder that was given, or the model's on the hub."""
    given_folder = Path(order.base).expanduser()
    return given_folder.resolve().name if given_folder.is_dir() else order.base or folder.name


def _model_folder(folder: Path) -> Path:
    """The model of a folder: an export of a fine-tuning has it beside its adapter."""
    merged_folder = folder / "merged"
    if merged_folder.is_dir():
        return merged_folder
    if (folder / "adapter_config.json").exists() or (folder / "adapter").is_dir():
        detail = f"{folder} holds an adapter and not the model that it changes"
        fix = f"merge it first: hypergpu job merge {folder} --data FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return folder


def _blob(path: Path) -> BlobRef:
    try:
        return BlobRef(digest_of_file(path), Bytes(path.stat().st_size))
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error


def model_named(coordinator: Coordinator, name: str) -> ServedModelView:
    """The served model of a name, or of a job.

    Raises:
        HyperGPUError: JOB_UNKNOWN, this token may call no such model.
    """
    models = coordinator.models()
    matches = [each for each in models if name in {each.model, each.job}]
    if not matches:
        names = ", ".join(sorted(each.model for each in models)) or "none"
        detail = f"no model {name!r} is served: {names}"
        raise HyperGPUError(Reason.JOB_UNKNOWN, detail, fix="hypergpu serve FOLDER serves one")
    return matches[-1]


def wait_until_ready(
    coordinator: Coordinator,
    job_id: str,
    *,
    tell: Callable[[ServedModelView], None] = lambda _: None,
) -> ServedModelView:
    """Wait until a replica answers.

    Args:
        coordinator: An open connection.
        job_id: The served model's.
        tell: Called with the model whenever what it waits for changes.

    Raises:
        HyperGPUError: JOB_PHASE, the model is paused or stopped, with the reason.
    """
    reason = ""
    while True:
        model = model_named(coordinator, job_id)
        if model.ready_replicas:
            return model
        if model.phase != "serving":
            detail = f"{model.model} is {model.phase}: {model.reason}"
            fix = f"mend that, then hypergpu job resume {job_id}"
            raise HyperGPUError(Reason.JOB_PHASE, detail, fix=fix)
        if model.reason != reason:
            reason = model.reason
            tell(model)
        time.sleep(_LOOK_S)


class ServedModels(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/models/1"):
    """Models that a token may call, as JSON has them."""

    models: list[ServedModelView]
