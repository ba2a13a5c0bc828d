"""A model of one's own on the nodes of a cluster, from a script or a notebook cell.

The nodes need nothing but HyperGPU with torch: the model and its loss travel as data.
Start a cluster first (`hypergpu up`, and a node with its join line), then run this file.
"""

import torch
from torch import nn
from torch.nn import functional as F

import hypergpu

points = torch.rand(4000, 2) * 2 - 1
labels = (points.norm(dim=1) < 0.75).long()  # inside of a circle, or outside
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def loss(model, batch):
    """The mean loss, and a metric."""
    logits = model(batch["point"])
    hits = (logits.argmax(1) == batch["label"]).float().mean()
    return F.cross_entropy(logits, batch["label"]), {"accuracy": hits}


run = hypergpu.train(
    model, loss=loss, data={"point": points, "label": labels}, name="circle", steps=600
)
run.watch()
model.load_state_dict(run.state_dict())
print("inside of the circle:", model.eval()(torch.zeros(1, 2)).argmax().item() == 1)
