"""Long computing beside the event loop: this process's threads, or the engine for large models."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hypergpu.engine.engine import Engine
from hypergpu.process import make_way

_Result = TypeVar("_Result")


class HeavyWork:
    """Threads for long computing, as many as there are cores, that make way for the event loop.

    Args:
        engine: Computes what is cut into tasks; None: these threads do.
        parameters_least: Size from which models are worth asking it.
    """

    def __init__(self, engine: Engine | None = None, parameters_least: int = 0) -> None:
        self._engine = engine
        self._parameters_least = parameters_least
        self._threads = ThreadPoolExecutor(
            os.cpu_count() or 1, thread_name_prefix="heavy", initializer=make_way
        )

    def engine_for(self, parameters_count: int) -> Engine | None:
        """Who folds a model of that size; None: these threads do."""
        return self._engine if parameters_count >= self._parameters_least else None

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in one of them. Cancelling the caller does not end it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self) -> None:
        """End the processes of the engine."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
