"""A served model as its user asks for it, and the part of it that is a node's work."""

import re
from collections.abc import Collection, Iterable

import msgspec
from msgspec.structs import replace

from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.requirements import RequirementError, parse_requirement
from hypergpu.journal.worth import PRICED_SAMPLES
from hypergpu.ledger_terms import AMOUNT_MOST
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import HELD_OUT_ROWS, TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import LAYERS_MOST, STAGE_KIND, ModelCut, StageWork, span_blobs
from hypergpu.serving.tuned_model import Tuning, TuningSource
from hypergpu.trust_labels import check_trust_labels
from hypergpu.units import Milliseconds, Wei
from hypergpu.work_units import WorkUnit

SERVE_KIND = "serve"
"""Kind of the jobs that keep a model on nodes."""
ENGINE_KIND = "serve/transformers"
"""Kind of a node's work, as nodes name it among their workloads."""
GGUF_KIND = "serve/gguf"
"""The same for a GGUF file."""
EMBED_KIND = "serve/embed"
"""The same for a model of sentence-transformers, which gives vectors."""
SERVER_KIND = "serve/server"
"""The same for a server that a node's owner runs already, and names in node.toml."""
TUNED_KIND = "serve/tuned"
"""The same for a base of transformers with the adapter that a job trained."""
ENGINES = (ENGINE_KIND, GGUF_KIND, EMBED_KIND, SERVER_KIND, TUNED_KIND, STAGE_KIND)
ENGINE_VERSION = 1
STAGE_VERSION = 4
"""Version of `STAGE_KIND`: from 2 on hidden states are sealed between stages, from 3 on activations
and gradients, too, and stages show what they computed to whoever computes it again; from 4 on nodes
sign counts of layer-tokens.
"""
GGUF_FILE = "model.gguf"
"""Name of the file among those of a request."""
COUNT_KIND = "serve/count"
"""Kind of what a node sends with its signature of a count."""
DTYPES = ("float32", "bfloat16", "float16")
FILES_MOST = 60
REPLICAS_MOST = 64
CONVERSATIONS_MOST = 64
CONTEXT_MOST = 1 << 20
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REQUIREMENTS_MOST = 16
_WITHOUT_FILES = (SERVER_KIND, TUNED_KIND)
IDLE_MS_MOST = Milliseconds(30 * 24 * 3_600_000)
PRICED_UNITS = PRICED_SAMPLES
"""Units that a request's price is for."""
PRICED_TOKENS = 1_000
"""Tokens that users state a price for."""
_WINDOWS_PER_EPOCH_MOST = 1_000_000


def served_kind_of(kind: str) -> str:
    """What owners allow a node's work of a kind by; empty: it serves no model."""
    return SERVE_KIND if kind.startswith(f"{SERVE_KIND}/") else ""


def engine_version(kind: str) -> int:
    """Version of a kind of `ENGINES` that a node must offer."""
    return STAGE_VERSION if kind == STAGE_KIND else ENGINE_VERSION


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A node's work: hold the model, and answer calls until the lease is void."""

    model: str
    """Name of the model, for people."""
    files: dict[str, BlobRef]
    """Files of the base: see `hypergpu.farm.base_files`."""
    dtype: str = "float32"
    context_most: int = 0
    """Tokens of a prompt and its answer at most; 0: as many as the model takes."""
    conversations_most: int = 8
    """Calls that are answered side by side; further ones wait."""
    tuning: Tuning | None = None
    """What makes the model of the base, for `TUNED_KIND`; its files are named as in the base."""

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """All blobs that the work needs, each once."""
        tuning_blobs = () if self.tuning is None else self.tuning.blobs
        blobs = (*self.files.values(), *tuning_blobs)
        return tuple({blob.digest: blob for blob in blobs}.values())


class SignedCount(msgspec.Struct, frozen=True):
    """What a node says that it signed: the signature says whether it is right."""

    units: int


class ServeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be served. Its blobs were sent by its user before (`OfferData`, `CommitData`)."""

    model: str
    """Name that calls ask for; an owner has each once."""
    files: dict[str, BlobRef]
    """Files of the base: see `hypergpu.farm.base_files`; or one GGUF file, `GGUF_FILE`."""
    engine: str = ENGINE_KIND
    """What computes, one of `ENGINES`."""
    dtype: str = "float32"
    """Type that the weights are held in, one of `DTYPES`; a GGUF file has its own."""
    context_most: int = 0
    """Tokens of a prompt and its answer at most; 0: as many as the model takes."""
    conversations_most: int = 8
    """Calls that a replica answers side by side."""
    replicas: int = 1
    """Nodes that hold the model at a time."""
    requirements: tuple[str, ...] = ()
    """As in job files: ``gpu >= 8GB``."""
    priority: int = 0
    weight: int = 1
    unit_price: Wei = Wei(0)
    """Price of `PRICED_UNITS` units, in the smallest unit of money; 0: receipts are counted only.
    See `hypergpu.token_counts`.
    """
    unit: WorkUnit = WorkUnit.TOKENS
    """What its work is counted in: layer-tokens of a model that is cut, if its user says so; else
    tokens, as of rings before there were layer-tokens.
    """
    budget: Wei = Wei(0)
    """The most that it may cost, which is set aside for it; a model with a price states one."""
    windows_per_epoch: int = 20
    """Accepted windows of answers whose receipts are settled together."""
    source: TuningSource | None = None
    """The training whose model is served, for `TUNED_KIND`: the coordinator has its files."""
    idle_ms: Milliseconds = Milliseconds(0)
    """Time without a call after which nodes let go of the model; 0: they never do."""
    trusted: tuple[str, ...] = ()
    """Labels that operators must have given a node, all of them: texts, checks included, stay on
    such nodes. See `hypergpu.trust_labels`.
    """
    cut: ModelCut | None = None
    """How a model of `STAGE_KIND` is cut; None: each node of it holds it whole."""
    training: RingTraining | None = None
    """The adapter that its ring trains before it answers, on the rows of `TRAINING_ROWS`; None:
    none.
    """

    @property
    def nodes(self) -> int:
        """Nodes that hold the model, or a part of it, at a time."""
        return self.replicas if self.cut is None else self.cut.stages

    @property
    def units_per_token(self) -> int:
        """Units of a token that went through the whole model."""
        if self.cut is None or self.unit is not WorkUnit.LAYER_TOKENS:
            return 1
        return self.cut.layers

    def stage(self, span: LayerSpan) -> StageWork:
        """The work of a node that holds some layers.

        Raises:
            ValueError: The model is not cut.
        """
        if self.cut is None:
            raise ValueError(f"{self.model} is held whole")
        layer_files = frozenset(span_blobs(LayerSpan(0, self.cut.layers), self.cut.layers))
        own_files = frozenset(span_blobs(span, self.cut.layers))
        files = {
            name: blob
            for name, blob in self.files.items()
            if name in own_files or name not in {*layer_files, TRAINING_ROWS, HELD_OUT_ROWS}
        }
        return StageWork(
            model=self.model,
            files=files,
            span=span,
            cut=self.cut,
            dtype=self.dtype,
            context_most=self.context_most,
            training=self.training,
        )

    def standby_stage(self, span: LayerSpan, files_of: Iterable[LayerSpan]) -> StageWork:
        """The work of a node that holds a stage ready, with the files of some others.

        Raises:
            ValueError: The model is not cut.
        """
        stage = self.stage(span)
        files = dict(stage.files)
        for each in files_of:
            files |= self.stage(each).files
        return replace(stage, files=files)

    @property
    def replica(self) -> Replica:
        """The work of each node."""
        return Replica(
            model=self.model,
            files=self.files,
            dtype=self.dtype,
            context_most=self.context_most,
            conversations_most=self.conversations_most,
        )

    def check(self) -> None:
        """Check each field against its limits.

        Raises:
            HyperGPUError: REQUEST_INVALID, with the field and what would be right.
        """
        for is_right, field, rule in _rules(self):
            if not is_right:
                detail = f"{field} of a served model: {rule}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=f"change {field}")
        if self.source is not None:
            self.source.check()
        check_trust_labels(self.trusted)
        for text in self.requirements:
            try:
                parse_requirement(text)
            except RequirementError as error:
                detail = f"requirements of a served model: {error}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=error.fix) from error


def _rules(request: ServeRequest) -> tuple[tuple[bool, str, str], ...]:
    return (
        (
            _MODEL_NAME.fullmatch(request.model) is not None,
            "model",
            "a name of 1 to 100 letters, digits and '._:/-'",
        ),
        (
            (request.engine in _WITHOUT_FILES) == (not request.files),
            "files",
            f"none for {' and '.join(_WITHOUT_FILES)}, else at least one",
        ),
        (
            (request.engine == TUNED_KIND) == (request.source is not None),
            "source",
            f"a training for {TUNED_KIND}, else none",
        ),
        (0 <= request.idle_ms <= IDLE_MS_MOST, "idle_ms", f"0 to {IDLE_MS_MOST}"),
        (len(request.files) <= _files_most(request), "files", f"{_files_most(request)} at most"),
        (all(map(_FILE_NAME.fullmatch, request.files)), "files", "plain names without folders"),
        (request.engine in ENGINES, "engine", f"one of {', '.join(ENGINES)}"),
        (
            request.engine != GGUF_KIND or request.files.keys() == {GGUF_FILE},
            "files",
            f"{GGUF_FILE} alone for {GGUF_KIND}",
        ),
        (request.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}"),
        (0 <= request.context_most <= CONTEXT_MOST, "context_most", f"0 to {CONTEXT_MOST} tokens"),
        (
            0 < request.conversations_most <= CONVERSATIONS_MOST,
            "conversations_most",
            f"1 to {CONVERSATIONS_MOST}",
        ),
        (0 < request.replicas <= REPLICAS_MOST, "replicas", f"1 to {REPLICAS_MOST}"),
        (
            len(request.requirements) <= _REQUIREMENTS_MOST,
            "requirements",
            f"{_REQUIREMENTS_MOST} at most",
        ),
        (1 <= request.weight <= 1_000, "weight", "1 to 1000"),
        (-1_000 <= request.priority <= 1_000, "priority", "-1000 to 1000"),
        *_pay_rules(request),
        *_cut_rules(request),
        *_training_rules(request),
    )


def _files_most(request: ServeRequest) -> int:
    return FILES_MOST if request.cut is None else FILES_MOST + LAYERS_MOST


def _cut_rules(request: ServeRequest) -> tuple[tuple[bool, str, str], ...]:
    cut = request.cut
    if cut is None:
        return ((request.engine != STAGE_KIND, "cut", f"stated for {STAGE_KIND}"),)
    return (
        (request.engine == STAGE_KIND, "cut", f"stated for {STAGE_KIND} alone"),
        (request.replicas == 1, "replicas", f"1 for {STAGE_KIND}: a model has one ring"),
        *cut.faults(),
        (_has_layers(request.files, cut), "files", "one for each layer, embed and head"),
    )


def _training_rules(request: ServeRequest) -> tuple[tuple[bool, str, str], ...]:
    training = request.training
    has_rows = TRAINING_ROWS in request.files
    if training is None:
        has_any = has_rows or HELD_OUT_ROWS in request.files
        return ((not has_any, "files", f"no {TRAINING_ROWS} where nothing is trained"),)
    return (
        (request.cut is not None, "training", f"for {STAGE_KIND} alone"),
        (has_rows, "files", f"{TRAINING_ROWS} among them: the rows that are trained on"),
        (not request.unit_price, "unit_price", "none for a training through a ring"),
        (not request.idle_ms, "idle_ms", "0 for a training through a ring"),
        *training.faults(),
    )


def _has_layers(files: Collection[str], cut: ModelCut) -> bool:
    if not 0 < cut.layers <= LAYERS_MOST:
        return False
    return all(name in files for name in span_blobs(LayerSpan(0, cut.layers), cut.layers))


def _pay_rules(request: ServeRequest) -> tuple[tuple[bool, str, str], ...]:
    price, budget = request.unit_price, request.budget
    return (
        (
            0 <= price <= AMOUNT_MOST and 0 <= budget <= AMOUNT_MOST,
            "unit_price and budget",
            f"0 to {AMOUNT_MOST}",
        ),
        (
            bool(budget) == bool(price),
            "budget",
            "above 0 where unit_price is, and else 0: it is set aside before any call is answered",
        ),
        (
            request.unit is WorkUnit.TOKENS
            or (request.unit is WorkUnit.LAYER_TOKENS and request.cut is not None),
            "unit",
            f"{WorkUnit.TOKENS.value}, or {WorkUnit.LAYER_TOKENS.value} for {STAGE_KIND}",
        ),
        (
            budget * PRICED_UNITS >= price * request.units_per_token,
            "budget",
            "the price of one token at least",
        ),
        (
            1 <= request.windows_per_epoch <= _WINDOWS_PER_EPOCH_MOST,
            "windows_per_epoch",
            f"1 to {_WINDOWS_PER_EPOCH_MOST}",
        ),
    )
