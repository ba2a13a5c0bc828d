"""How many threads the numerical libraries of an evaluator take. Sums depend on it: whoever
evaluates for a coordinator takes as many as the coordinator's own evaluator.
"""

import os

LIBRARY_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that libraries read when they are imported."""


def library_threads() -> tuple[str, ...]:
    """Values of those variables here: half the cores, as the coordinator needs some for its rounds,
    unless they are set.
    """
    half = str(max((os.cpu_count() or 2) // 2, 1))
    return tuple(os.environ.get(name, half) for name in LIBRARY_THREADS)
