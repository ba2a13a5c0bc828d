"""What `doctor` says of what it measured, congestion control included."""

import json
import socket
from pathlib import Path

import pytest

from hypergpu.user.cli.probe import DeviceFound, TorchFound, probe
from hypergpu.user.cli.verdicts import (
    FAIL,
    OK,
    WARN,
    blobs_check,
    blobs_failure,
    clock_check,
    control_check,
    dial_failure,
    folder_check,
    is_supported,
    joined_ports,
    port_check,
    proxy_check,
    reach_check,
    torch_checks,
    uplink_check,
    way_of,
)
from hypergpu.wire.congestion import Controls, RouteSettings, controls
from tests.unit.cli.conftest import Hypergpu

WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "compute_90")


def cuda(capability: str, failure: str = "") -> TorchFound:
    device = DeviceFound("cuda:0", "a card", capability, 8 << 30, failure)
    return TorchFound("2.15.0", cuda="13.2", architectures=WHEEL, devices=(device,))


def test_probe_runs_a_real_kernel_on_the_processor() -> None:
    report = probe()
    assert not report.failure
    if report.version:
        assert next((each.device, each.failure) for each in report.devices) == ("cpu", "")


@pytest.mark.parametrize(
    ("capability", "is_good"),
    [
        ("sm_61", False),
        ("sm_70", False),
        ("sm_75", True),
        ("sm_87", True),
        ("sm_89", True),
        ("sm_90", True),
        ("sm_120", True),
    ],
)
def test_wheel_supports_its_major_versions_and_newer_by_compilation(
    capability: str,
    is_good: bool,  # noqa: FBT001
) -> None:
    assert is_supported(capability, WHEEL) is is_good


def test_pascal_card_gets_the_wheel_that_runs_on_it() -> None:
    check = torch_checks(cuda("sm_61", "no kernel image is available"))[1]
    assert check.verdict == FAIL
    assert "built for sm_75" in check.what
    assert "https://download.pytorch.org/whl/cu126" in check.fix


def test_missing_torch_is_a_warning_since_numpy_trains_too() -> None:
    (check,) = torch_checks(TorchFound())
    assert check.verdict == WARN
    assert "pip install 'hypergpu[torch]'" in check.fix


def test_broken_torch_is_a_failure_with_its_words() -> None:
    (check,) = torch_checks(TorchFound(failure="libcudart.so.13: cannot open"))
    assert check.verdict == FAIL
    assert "libcudart.so.13" in check.what


@pytest.mark.parametrize(("state", "verdict"), [(True, OK), (None, OK), (False, WARN)])
def test_clock_that_nothing_keeps_right_is_a_warning(state: bool | None, verdict: str) -> None:  # noqa: FBT001
    assert clock_check(2e9, is_synchronised=state).verdict == verdict


def test_taken_port_names_the_way_around() -> None:
    assert "--port 0" in port_check(7700, is_free=False, is_ours=False).fix
    assert port_check(7700, is_free=False, is_ours=True).verdict == OK


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "none is set"),
        ({"HTTPS_PROXY": "http://p"}, "HTTPS_PROXY set, and not used"),
        ({"http_proxy": "http://p", "no_proxy": "10.0.0.1"}, "http_proxy set, and not used"),
    ],
)
def test_a_proxy_is_named_and_passed_by(variables: dict[str, str], told: str) -> None:
    check = proxy_check(variables)
    assert check.verdict == OK
    assert told.lower() in check.what.lower()


def test_secret_that_others_may_read_is_a_failure_with_its_fix() -> None:
    check = folder_check("state_dir", "/state", is_writable=True, open_files=("node.key",))
    assert (check.verdict, check.fix) == (FAIL, "chmod -R go= /state")


def test_environment_block_leaves_secrets_out(alone: Hypergpu) -> None:
    result = alone(
        "env",
        "--json",
        HYPERGPU_JOIN_TOKEN="hgpu1.abc",
        HTTPS_PROXY="http://me:secret@proxy:3128",
        HYPERGPU_CHAIN="https://chain.example/v3/secret",
    )
    answer = json.loads(result.stdout)
    assert answer["schema"] == "hypergpu/env/1"
    assert "digits-cnn" in answer["workloads"]
    assert answer["variables"]["HTTPS_PROXY"] == "http://<redacted>@proxy:3128"
    assert answer["variables"]["HYPERGPU_CHAIN"] == "https://chain.example/<redacted>"
    assert "abc" not in result.stdout
    assert "secret" not in result.stdout


LOADED = Controls("cubic", ("reno", "cubic", "bbr"), is_bbr_loadable=False)
LOADABLE = Controls("cubic", ("reno", "cubic"), is_bbr_loadable=True)
LACKING = Controls("cubic", ("reno", "cubic"), is_bbr_loadable=False)
BBR = Controls("bbr", ("reno", "cubic", "bbr"), is_bbr_loadable=False)
UNKNOWN = Controls("", (), is_bbr_loadable=False)
WAY = RouteSettings("203.0.113.5", "eth0", "192.168.1.1", "192.168.1.7", "", is_local=False)
ROUTE = "ip route replace 203.0.113.5/32 via 192.168.1.1 dev eth0 src 192.168.1.7 congctl bbr"
FOR_ALL = "sysctl -w net.ipv4.tcp_congestion_control=bbr"


@pytest.mark.parametrize(
    ("found", "verdict", "fix"),
    [
        (BBR, OK, ""),
        (UNKNOWN, OK, ""),
        (LOADED, WARN, f"for all connections: {FOR_ALL}"),
        (LOADABLE, WARN, f"for all connections: modprobe tcp_bbr && {FOR_ALL}"),
        (LACKING, WARN, "use a kernel with tcp_bbr: Linux 4.9 or later, its modules installed"),
    ],
)
def test_a_machine_is_told_what_its_connections_get(
    found: Controls, verdict: str, fix: str
) -> None:
    check = control_check(found)
    assert (check.verdict, check.fix) == (verdict, fix)


def test_a_node_gets_the_command_for_the_route_to_its_coordinator() -> None:
    check = uplink_check("example.org", WAY, LOADED)
    assert check.what.startswith("updates to example.org leave through eth0 by cubic")
    assert check.fix.endswith(f"or by hand: {ROUTE}")
    assert "--congestion-control bbr" in check.fix
    assert f"modprobe tcp_bbr && {ROUTE}" in uplink_check("example.org", WAY, LOADABLE).fix


def test_a_route_that_has_bbr_already_is_good_whatever_the_default() -> None:
    check = uplink_check("example.org", WAY._replace(congestion_control="bbr"), LOADED)
    assert (check.verdict, check.fix) == (OK, "")


def test_a_coordinator_on_this_machine_needs_no_route() -> None:
    assert uplink_check("127.0.0.1", way_of("127.0.0.1"), LACKING).verdict == OK


def test_the_ports_are_those_of_the_coordinator_that_the_node_joined(tmp_path: Path) -> None:
    assert joined_ports(tmp_path) == ("", ())
    coordinator_json = '{"address": "[2001:db8::1]:7701", "is_plaintext": false, "bulk_port": 7702}'
    (tmp_path / "coordinator.json").write_text(coordinator_json)
    assert joined_ports(tmp_path) == ("2001:db8::1", (7701, 7702))
    (tmp_path / "coordinator.json").write_text('{"address": "host:7701"}')
    assert joined_ports(tmp_path) == ("host", (7701,))
    (tmp_path / "coordinator.json").write_bytes(b'{"address": "\xff"}')
    assert joined_ports(tmp_path) == ("", ())


def test_a_port_that_nobody_answers_at_is_named_with_its_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert reach_check("127.0.0.1", port, dial_failure("127.0.0.1", port)).verdict == OK
    check = reach_check("127.0.0.1", port, dial_failure("127.0.0.1", port))
    assert check.verdict == WARN
    assert f"open TCP port {port}" in check.fix


def test_this_kernel_tells_what_its_connections_get() -> None:
    tcp_controls = controls()
    assert tcp_controls.default in tcp_controls.available


def test_an_object_store_that_fails_has_a_fix() -> None:
    assert blobs_check("s3://bucket", "").verdict == OK
    check = blobs_check("s3://bucket", "it does not answer")
    assert check.verdict == FAIL
    assert "AWS_ENDPOINT_URL_S3" in check.fix
    assert "s3://BUCKET/PREFIX" in blobs_failure("https://bucket")
