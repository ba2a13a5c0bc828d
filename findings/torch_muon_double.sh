#!/usr/bin/env bash
# PyTorch: `torch.optim.Muon` steps float64 and float32 weights by numbers of 8 significant bits.
#
# Seen with torch 2.13.0 on Linux, CPU: the momentum is kept in the weight's type, but the
# orthogonalisation is computed in bfloat16 whatever that type is, so every value of a step (learning
# rate 1, no decay) is a bfloat16 number times the step's scale. The same iteration in float64 gives
# values that differ by about 1 % of their norm. The documentation does not say so: whoever checks a
# Muon step against another implementation in double precision finds errors of a percent.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'numpy==2.3.5'
cat >"$folder/try.py" <<'PYTHON'
import sys

import torch

COEFFICIENTS, STEPS = (3.4445, -4.775, 2.0315), 5


def step_by_torch(gradient):
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    optimizer.step()
    return -weight.detach()


def step_in_double(gradient):
    a, b, c = COEFFICIENTS
    x = gradient.double() / gradient.double().norm()
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


torch.manual_seed(7)
gradient = torch.randn(64, 64, dtype=torch.float64)
print("torch", torch.__version__)
wanted = step_in_double(gradient)
changed = False
for kind in (torch.float64, torch.float32):
    step = step_by_torch(gradient.to(kind))
    is_bfloat16 = torch.equal(step, step.bfloat16().to(kind))
    error = float((step.double() - wanted).norm() / wanted.norm())
    print(f"{kind}: the step has type {step.dtype}, all values are bfloat16: {is_bfloat16}, off by {error:.2%}")
    changed |= not (step.dtype == kind and is_bfloat16 and 0.001 < error < 0.05)
if changed:
    sys.exit("the behaviour has changed")
PYTHON
"$folder/venv/bin/python" "$folder/try.py"
