"""What `hypergpu doctor --for MODEL` says: how much of a model this machine holds, and how fast."""

from hypergpu.rings.stage_work import CutSizes, LayerSpeed, layers_in
from hypergpu.units import Bytes, several
from hypergpu.user.cli.verdicts import FAIL, OK, WARN, Check
from hypergpu.user.serving.plan import missing_bytes
from hypergpu.user.serving.stage_files import read_sizes, read_speed
from hypergpu.user.terminal.output import size
from hypergpu.user.training.bases import find_model


def model_checks(model: str, dtype: str) -> list[Check]:
    """Measure this machine with layers of a model, of which its ``config.json`` is enough.

    Raises:
        HyperGPUError: There is no such model, or it cannot be cut or measured, with the reason.
    """
    path = find_model(model)
    sizes, speed = read_sizes(path, dtype), read_speed(path, dtype)
    return [memory_check(sizes, speed.memory_bytes), speed_check(sizes, speed)]


def memory_check(sizes: CutSizes, memory_bytes: int) -> Check:
    """How much of a model this machine could hold."""
    layers = layers_in(sizes, Bytes(memory_bytes))
    whole = f"{sizes.kind}, {several(sizes.layers, 'layer')}, {size(sizes.total_bytes)}"
    if layers == sizes.layers:
        return Check("model", OK, f"{whole}: it fits whole into {size(memory_bytes)} here")
    lack = size(missing_bytes(sizes, Bytes(memory_bytes)))
    if not layers:
        what = f"{whole}: {size(memory_bytes)} here hold no layer of it; {lack} more hold it whole"
        return Check("model", FAIL, what, "take a smaller model, or --dtype bfloat16")
    layers_text = several(layers, "layer")
    what = f"{whole}: {size(memory_bytes)} here hold {layers_text}; {lack} more hold it whole"
    return Check("model", WARN, what, "serve it in stages: hypergpu plan FOLDER names the nodes")


def speed_check(sizes: CutSizes, speed: LayerSpeed) -> Check:
    """How fast this machine would compute what it could hold of a model."""
    layers = layers_in(sizes, Bytes(speed.memory_bytes)) or 1
    token_ms, read_ms = speed.token_us(layers) / 1000, layers * speed.read_us / 1000
    is_whole = layers == sizes.layers
    part = "the whole model" if is_whole else f"a stage of {several(layers, 'layer')} and the head"
    what = f"{part} on {speed.device}: {token_ms:.1f} ms a token, {read_ms:.2f} ms a prompt token"
    return Check("speed", OK, what)
