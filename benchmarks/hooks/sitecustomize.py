"""Loaded by every Python process whose PYTHONPATH names this folder, before its program starts.

Benchmarks set the variables below in the processes that they start; without them nothing happens.
"""

import os

if os.environ.get("HYPERGPU_WORKER_WARM") or os.environ.get("HYPERGPU_WORKER_LIGHT_WARM"):
    from benchmarks.hooks import warm_client

    warm_client.hand_over()
