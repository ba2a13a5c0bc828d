"""`hypergpu.map`: data become the items of a farm job."""

import functools
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypergpu.user.client import Coordinator
from hypergpu.user.farm.map_run import MapRun
from hypergpu.user.farm.program_parts import program_parts
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.starting import MapOrder, start_map, text_parts
from hypergpu.user.training.train import connect_until_exit

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module


def map(
    kind: "str | Module",
    data: Any,
    *,
    out: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    coordinator: Coordinator | None = None,
    **settings: Any,
) -> MapRun:
    """Have every item of some data done on the nodes that are there. It is `hypergpu.map`.

    Returns as soon as the items are there; `MapRun.result` waits for the values.

    Args:
        kind: ``embed``, ``score``, ``generate`` or ``classify``; or a torch module of one's own,
            which is traced, runs forward only, and gives one tensor whose first dimension is items.
        data: Of texts: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder of text
            files, a DataFrame, a ``datasets.Dataset``, or a list. Of a module: what
            `hypergpu.train` takes; the module gets the fields in order.
        out: File to write, which ends in ``.jsonl`` or ``.parquet``; without one the values are
            kept until the program ends.
        resume: Whether to go on with an unfinished run of the same output.
        force: Whether to replace an output, or an unfinished run.
        coordinator: An open connection; else the one that environment, settings file or
            `hypergpu up` name.
        settings: Fields of `MapSettings`, such as ``base``, ``parameters``, ``seed`` or ``price``.

    Raises:
        HyperGPUError: Data or settings cannot be used, the output is there already, or the job is
            refused. The text says what to do.
    """
    read = text_parts if isinstance(kind, str) else functools.partial(program_parts, kind)
    map_settings = settings_of(kind if isinstance(kind, str) else "program", settings)
    coordinator = coordinator or connect_until_exit()
    if out is not None:
        order = MapOrder(map_settings, data, Path(out), resume, force, read=read)
        return start_map(coordinator, order)
    scratch = Path(tempfile.mkdtemp(prefix="hypergpu-"))
    try:
        order = MapOrder(map_settings, data, scratch / "values.parquet", read=read)
        run = start_map(coordinator, order)
    except BaseException:
        shutil.rmtree(scratch)
        raise
    weakref.finalize(run, shutil.rmtree, scratch, ignore_errors=True)
    return run
