"""`hypergpu.serve`: a model of one's own answers on the nodes that are there."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.serving.calls import (
    UNSTATED_SEED,
    AnswerBegun,
    AnswerEnded,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    Sampling,
)
from hypergpu.serving.text_vectors import VectorReader, vector_call
from hypergpu.serving.tuned_model import TuningSource
from hypergpu.user.client import Coordinator
from hypergpu.user.client.models import AnswerRoute, ServedModelView
from hypergpu.user.serving.starting import (
    ServeOrder,
    model_named,
    start_serving,
    start_tuned,
    wait_until_ready,
)
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.finetune import AdapterRun

Prompt = str | Sequence[Mapping[str, Any]]
"""A text to go on with, or the messages of a chat."""


_IDLE_MINUTES = 10.0
"""Time without a call after which nodes let go of a model that nobody asked to be served."""


class ServeArguments(TypedDict, total=False):
    """What `serve` takes beside the model. All have defaults."""

    name: str
    """Name that calls ask for; else the folder's."""
    replicas: int
    """Nodes that hold the model."""
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``; a GGUF file has its own."""
    context_most: int
    """Tokens of a prompt and its answer at most; else as many as the model takes."""
    conversations_most: int
    """Calls that a node answers side by side."""
    requirements: tuple[str, ...]
    stages: int
    """Nodes that hold the model together, each some of its layers; 0: each holds it whole; else as
    few as can, where no node holds it whole.
    """
    codec: str
    """How hidden states travel between stages: ``float32`` or ``int8o``."""
    standby: bool
    """Whether one node more, if it is free, holds a stage ready for one that is lost."""
    price: str
    """Price of 1,000 tokens, a whole number of the smallest unit of money, a multiple of 10."""
    budget: str
    """The most that the model may cost; a price needs one."""
    allow_hub: bool
    """Whether a model that is not on this machine is downloaded from the hub."""
    trusted: tuple[str, ...]
    """Labels that operators must have given a node: texts stay on such nodes, checks included."""
    idle_minutes: float
    """Time without a call after which nodes let go of the model; the next one loads it again."""
    on_servers: bool
    """Whether the model is one of servers that owners of nodes run already, by its name there."""


class AnswerSettings(TypedDict, total=False):
    """How an answer is written. All have defaults."""

    temperature: float
    """0, the default: always the likeliest token."""
    top_p: float
    top_k: int
    seed: int
    """Else the coordinator draws it."""
    new_tokens_most: int
    """Else as many as the context has room for."""
    stops: tuple[str, ...]
    """Texts before which the answer ends."""


class ServedModel:
    """A model that is served. It stays so until `stop`, also after this program."""

    def __init__(self, coordinator: Coordinator, job: str, model: str) -> None:
        self._coordinator = coordinator
        self.job = job
        """Id of its job."""
        self.model = model
        """Name that calls ask for."""

    def __repr__(self) -> str:
        return f"ServedModel({self.model!r}, {self.job})"

    def state(self) -> ServedModelView:
        """Replicas that are ready, and calls."""
        return model_named(self._coordinator, self.job)

    def generate(self, prompt: Prompt, **settings: Unpack[AnswerSettings]) -> str:
        """The whole answer to a prompt.

        Raises:
            HyperGPUError: The prompt does not fit, or no replica is free in time.
        """
        return "".join(self.stream(prompt, **settings))

    def stream(self, prompt: Prompt, **settings: Unpack[AnswerSettings]) -> Iterator[str]:
        """The answer to a prompt as it comes. A caller who stops reading ends it.

        Raises:
            HyperGPUError: As `generate`.
        """
        parts = self._coordinator.answer(self.job, _call(prompt, settings))
        try:
            for part in parts:
                match part:
                    case AnswerToken() | AnswerEnded():
                        if part.text:
                            yield part.text
                    case AnswerRefused():
                        raise HyperGPUError(Reason.REQUEST_INVALID, part.reason)
                    case AnswerRoute() | AnswerBegun() | _:
                        pass
        finally:
            parts.close()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of texts, ``float32[texts, dimension]``, by a model of embeddings.

        Raises:
            HyperGPUError: A text is too long, the model gives no vectors, or it is not free in
                time.
        """
        rows = []
        for text in texts:
            reader = VectorReader()
            for part in self._coordinator.answer(self.job, vector_call(text)):
                reader.note(part)
            rows.append(np.frombuffer(reader.vector().numbers, "<f4"))
        return np.stack(rows) if rows else np.zeros((0, 0), np.float32)

    def stop(self) -> None:
        """Serve it no more."""
        self._coordinator.stop(self.job)


def _call(prompt: Prompt, settings: AnswerSettings) -> ModelCall:
    text = prompt if isinstance(prompt, str) else None
    messages = None if isinstance(prompt, str) else tuple(dict(each) for each in prompt)
    return ModelCall(
        text=text,
        messages=messages,
        sampling=Sampling(
            temperature=settings.get("temperature", 0.0),
            top_p=settings.get("top_p", 1.0),
            top_k=settings.get("top_k", 0),
            seed=settings.get("seed", UNSTATED_SEED),
        ),
        new_tokens_most=settings.get("new_tokens_most"),
        stops=settings.get("stops", ()),
    )


def served_run(run: AdapterRun, coordinator: Coordinator) -> ServedModel:
    """The served model of a fine-tuning, by the job's id: the one that is there, or a new one."""
    for view in coordinator.models():
        if (view.model, view.training) == (run.id, run.id):
            wait_until_ready(coordinator, view.job)
            return ServedModel(coordinator, view.job, view.model)
    return serve(
        run,
        coordinator=coordinator,
        follow=not run.has_ended,
        idle_minutes=_IDLE_MINUTES,
    )


def serve(
    model: str | Path | AdapterRun,
    *,
    coordinator: Coordinator | None = None,
    round: int | None = None,
    follow: bool = False,
    **settings: Unpack[ServeArguments],
) -> ServedModel:
    """Have nodes hold a model and answer calls to it. It is `hypergpu.serve`.

    Returns once a node answers.

    Args:
        model: Folder of a causal language model as transformers saves it, a GGUF file, its name
            on the hub, or a fine-tuning of `hypergpu.finetune`: nodes load its base and its newest
            adapter, which the coordinator has.
        coordinator: An open connection; else the one that environment, settings file or
            `hypergpu up` name.
        round: Of a fine-tuning, the model after so many rounds, if it is kept.
        follow: Of a fine-tuning that runs, whether nodes take the model of each round to come.
        settings: See `ServeArguments`.

    Raises:
        HyperGPUError: The model cannot be served, or no node that is there can hold it.
    """
    coordinator = coordinator or connect_until_exit()
    if isinstance(model, AdapterRun):
        source = TuningSource(job=JobId(model.id), round=round, follows=follow)
        view = start_tuned(coordinator, source, ServeOrder("", **settings))
    elif follow or round is not None:
        detail = "round and follow are of a fine-tuning"
        fix = "give the run that hypergpu.finetune returned"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    else:
        view = start_serving(coordinator, ServeOrder(str(model), **settings))
    wait_until_ready(coordinator, view.job)
    return ServedModel(coordinator, view.job, view.model)
