"""Find a learning rate and a width on the nodes of a cluster, each point a training by one node.

Start a cluster first: `hypergpu up`, and a node with `hypergpu join LINE --kinds training,sweep`.
Then run this file: `python sweep_digits.py JOB.toml`, with `examples/first-job.toml` for one.
"""

import sys

import hypergpu

run = hypergpu.sweep(
    sys.argv[1],
    grid={"inner.learning_rate": [0.001, 0.01, 0.1], "training.batch_size": [32, 64]},
    metric="accuracy",
    stop_early=3,
)
run.watch()
print(run.result().sort_values("metric", ascending=False).to_string())  # a DataFrame
print("best:", run.best()["inner.learning_rate"])
