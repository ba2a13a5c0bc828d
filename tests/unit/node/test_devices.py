"""Devices of a machine: which get a node, and what each may take."""

import pytest
from structlog.testing import capture_logs

from gpu_node.config import NodeSettings
from gpu_node.core.devices import chosen_devices, device_limits
from gpu_node.core.limits import LimitValueError, OwnerLimits, owner_limits
from gpu_node.shell.daemon.chosen_settings import worker_variables
from gpu_node.shell.daemon.machine import serving_devices
from gpu_node.shell.owner.interpreter import WorkerPython
from gpu_node.shell.worker.protocol import SHARES, Limits

FREE = OwnerLimits()
TWO = ("0", "1")


def test_every_gpu_gets_a_node_and_a_lone_device_stays_as_it_was() -> None:
    assert chosen_devices("", FREE, TWO) == TWO
    assert chosen_devices("", FREE, ("0",)) == chosen_devices("", FREE, ()) == ()


def test_the_owner_and_the_operator_choose() -> None:
    assert chosen_devices("", OwnerLimits(gpu="0,2"), ("0", "1", "2")) == ("0", "2")
    assert chosen_devices("", OwnerLimits(gpu="none"), TWO) == ()
    assert chosen_devices("cpu,cpu", FREE, TWO) == ("cpu", "cpu")
    assert chosen_devices("1", FREE, TWO) == ("1",)


def test_gpus_that_torch_is_not_built_for_get_one_node_and_a_warning_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    usual, processors = (
        WorkerPython("torch", "/opt/python", torch=version)
        for version in ("2.15.0+cu132", "2.15.0+cpu")
    )
    with capture_logs() as logs:
        assert serving_devices("", FREE, usual) == TWO
        assert logs == []
        assert serving_devices("", FREE, processors) == ()
        assert serving_devices("cpu,cpu", FREE, processors) == ("cpu", "cpu")
    assert logs[0]["gpus"] == 2
    assert logs[0]["fix"].startswith("/opt/python -m pip install --force-reinstall 'torch")


@pytest.mark.parametrize(
    ("stated", "gpu", "what"),
    [
        ("cuda:0", "", "is no device"),
        ("0,0", "", "given twice"),
        ("1", "0", "the limit gpu allows 0, and not 1"),
        ("0", "none", "the limit gpu allows none, and not 0"),
        (",".join(["cpu"] * 65), "", "there are 65 devices"),
    ],
)
def test_what_is_no_device_or_not_allowed_is_refused(stated: str, gpu: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        chosen_devices(stated, OwnerLimits(gpu=gpu), TWO)


def test_devices_share_the_machines_limits() -> None:
    limit_table = {
        "disk": "30GB",
        "memory": "9GB",
        "threads": 4,
        "upload": "6Mbit/s",
        "gpu": [0, 1, 2],
    }
    limits = owner_limits(limit_table, "node.toml")
    assert limits.gpu == "0,1,2"
    each = device_limits(limits, "2", 3)
    assert (each.gpu, each.disk_bytes, each.memory_bytes) == ("2", 10 * 10**9, 3 * 10**9)
    assert (each.threads, each.upload_bits_per_s, each.download_bits_per_s) == (1, 2_000_000, 0)
    assert device_limits(FREE, "cpu", 2) == OwnerLimits(gpu="none")


def test_an_owner_divides_each_device_among_nodes() -> None:
    shared_limits = OwnerLimits(shares=2)
    assert chosen_devices("", shared_limits, TWO) == ("0", "0", "1", "1")
    assert chosen_devices("", shared_limits, ("0",)) == ("0", "0")
    assert chosen_devices("", shared_limits, ()) == ("cpu", "cpu")
    assert chosen_devices("", OwnerLimits(shares=2, gpu="none"), TWO) == ("cpu", "cpu")
    assert chosen_devices("1", shared_limits, TWO) == ("1", "1")
    with pytest.raises(ValueError, match="80 nodes would share the devices"):
        chosen_devices(",".join(["cpu"] * 40), shared_limits, TWO)


def test_nodes_of_one_device_have_even_parts_of_its_memory() -> None:
    assert Limits(1, 0).memory_of(8_000) == 8_000
    assert Limits(1, 0, shares=4).memory_of(8_000) == 2_000
    assert Limits(1, 1_500, shares=4).memory_of(8_000) == 1_500
    assert worker_variables(NodeSettings(), OwnerLimits(shares=4))[SHARES] == "4"
    assert SHARES not in worker_variables(NodeSettings(), FREE)


@pytest.mark.parametrize("value", [0, 17, "a", True, -1])
def test_shares_that_are_none_are_refused(value: object) -> None:
    with pytest.raises(LimitValueError, match=r"shares is .* a whole number of 1 to 16"):
        owner_limits({"shares": value}, "node.toml")
    assert owner_limits({"shares": 4}, "node.toml").shares == 4
