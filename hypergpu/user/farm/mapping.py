"""`hypergpu.map`: data become the items of a farm job."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import ParameterValue
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.items import FORMS
from hypergpu.user.farm.map_run import MapRun
from hypergpu.user.farm.program_parts import program_parts
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.starting import MapOrder, start_in_scratch, start_map, text_parts
from hypergpu.user.training.connecting import connect_until_exit

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module


class MapJobArguments(TypedDict, total=False):
    """What `map` takes beside the kind and the data."""

    out: Path | str
    """File to write, which ends in ``.jsonl`` or ``.parquet``; without one the values are kept as
    long as the run.
    """
    resume: bool
    """Whether to go on with an unfinished run of the same output."""
    force: bool
    """Whether to replace an output, or an unfinished run."""
    coordinator: Coordinator
    """An open connection; else the one that environment, settings file or `hypergpu up` name."""
    base: str
    """Folder of the model, or its name on the hub."""
    allow_hub: bool
    """Whether a base that is not on this machine is downloaded from the hub."""
    text_field: str
    """Field of a row that is the item; else ``text``, ``prompt``, or the only one."""
    id_field: str
    """Field of a row that is its id; else its position, or the name of its file."""
    parameters: Mapping[str, ParameterValue]
    """Settings of the kind, such as ``{"max_new_tokens": 64}``."""
    name: str
    seed: int
    price: str
    """Price of 100 units, in the smallest unit of money."""
    budget: str
    """The most that the job may cost."""
    checks: float
    """Share of the items that two nodes do, in secret."""
    nodes: int
    """Nodes at most."""
    share: float
    """Share of a device that the work needs, such as 0.25: nodes that have less get none of it."""
    requirements: tuple[str, ...]
    priority: int
    weight: int


class MapArguments(MapJobArguments, total=False):
    """What `map` takes beside the kind. All but the data have defaults."""

    data: Required[Any]
    """A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder of text files or (for
    ``classify`` and ``embed``) of pictures, a DataFrame, a ``datasets.Dataset``, or a list; for a
    module what `hypergpu.train` takes, of which the module gets the fields in order, or a folder of
    pictures, which it gets as ``uint8[items, channels, height, width]`` of the stated parameters.
    """


_OWN = frozenset({"data", "out", "resume", "force", "coordinator"})


def map(kind: "str | Module", **settings: Unpack[MapArguments]) -> MapRun:
    """Have every item of some data done on the nodes that are there. It is `hypergpu.map`.

    Returns as soon as the items are there; `MapRun.result` waits for the values.

    Args:
        kind: ``embed``, ``score``, ``generate``, ``classify`` or ``image``; or a torch module of
            one's own, which is traced, runs forward only, and gives one tensor whose first
            dimension is items.
        settings: Data and settings, see `MapArguments`.

    Raises:
        HyperGPUError: Data or settings cannot be used, the output is there already, or the job is
            refused. The text says what to do.
    """
    if "data" not in settings:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, "there are no data", fix=f"data= takes {FORMS}"
        )
    given_settings = {name: value for name, value in settings.items() if name not in _OWN}
    map_settings = settings_of(kind if isinstance(kind, str) else "program", given_settings)
    read = text_parts if isinstance(kind, str) else functools.partial(program_parts, kind)
    order = MapOrder(
        map_settings,
        settings["data"],
        Path(settings.get("out", "")),
        may_resume=settings.get("resume", False),
        may_overwrite=settings.get("force", False),
        read=read,
    )
    coordinator = settings.get("coordinator") or connect_until_exit()
    return (
        start_map(coordinator, order) if "out" in settings else start_in_scratch(coordinator, order)
    )
