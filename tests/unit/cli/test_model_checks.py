"""`doctor --for MODEL`: how much of it this machine holds, and how fast, by its settings alone."""

from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.rings.stage_work import CutSizes, LayerSpeed
from hypergpu.user.cli.model_checks import memory_check, model_checks, speed_check
from tests.tiny_bases import save_base

GB = 10**9
SIZES = CutSizes("llama", 10, 64, layer_bytes=GB, end_bytes=GB, total_bytes=12 * GB, token_bytes=4)


@pytest.mark.parametrize(
    ("memory_bytes", "verdict", "text"),
    [
        (16 * GB, "ok", "it fits whole"),
        (8 * GB, "warn", "hold 4 layers; 7.71 GB more hold it whole"),
        (2 * GB, "fail", "hold no layer of it"),
    ],
)
def test_what_it_holds_is_told_with_what_is_missing(
    memory_bytes: int, verdict: str, text: str
) -> None:
    check = memory_check(SIZES, memory_bytes)
    assert check.verdict == verdict
    assert text in check.what


def test_its_speed_is_that_of_the_layers_that_it_would_hold() -> None:
    speed = LayerSpeed("cpu", 8 * GB, layer_us=2_000.0, end_us=500.0, read_us=250.0)
    text = "a stage of 4 layers and the head on cpu: 8.5 ms a token, 1.00 ms a prompt token"
    assert speed_check(SIZES, speed).what == text


def test_layers_are_measured_by_a_model_s_settings_alone(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    for path in base.glob("*.safetensors"):
        path.unlink()
    fit, speed = model_checks(str(base), "float32")
    assert fit.verdict == "ok"
    assert speed.what.startswith("the whole model on ")
    (base / "config.json").unlink()
    with pytest.raises(HyperGPUError, match=r"config\.json"):
        model_checks(str(base), "float32")
