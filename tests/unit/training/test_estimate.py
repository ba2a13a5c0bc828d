"""`hypergpu.estimate` takes what `hypergpu.train` takes and sends settings and a size alone."""

import json

import numpy as np
import pytest
import torch

import hypergpu
from hypergpu.errors import HyperGPUError
from hypergpu.user.client import ConnectionTarget, Coordinator
from hypergpu.wire.credentials import parse_token
from tests.unit.cli.fake_service import FakeService, operator_token, serving

MODEL = torch.nn.Linear(9, 3)
DATA = {"x": np.zeros((8, 9), np.float32), "y": np.zeros(8, np.int64)}


def loss(_model: torch.nn.Module, _batch: dict[str, torch.Tensor]) -> torch.Tensor:
    raise AssertionError("an estimate computes nothing")


def test_estimate_sends_settings_and_the_number_of_parameters() -> None:
    service = FakeService()
    with (
        serving(service) as port,
        Coordinator(
            ConnectionTarget(f"127.0.0.1:{port}", parse_token(operator_token(port)), 5.0)
        ) as coordinator,
    ):
        forecast = hypergpu.estimate(
            MODEL, loss=loss, data=DATA, nodes=3, steps=400, coordinator=coordinator
        )
    assert forecast.left_ms.middle == 250_000
    assert service.called == ["EstimateJob 30"]
    (sent_spec,) = service.specs
    assert (
        json.loads(sent_spec)["training"] | {"nodes": 3, "rounds": 20}
        == json.loads(sent_spec)["training"]
    )


def test_estimate_refuses_what_train_refuses() -> None:
    with pytest.raises(HyperGPUError, match="steps and rounds are both given"):
        hypergpu.estimate(MODEL, loss=loss, data=DATA, steps=4, rounds=4)
