"""Small parts that all programs share: frames, paths, sites, words, extras, gRPC options."""

import asyncio
import importlib
import io
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path, PurePosixPath

import msgspec
import pytest

from coordinator.shell.app import ports
from gpu_node.shell.link import channel
from hypergpu.data_paths import ENTRIES_MAX, checked_paths
from hypergpu.errors import HyperGPUError, Reason, missing_extra
from hypergpu.frames import FRAME_BYTES_MAX, FrameError, frame, next_frame, read_frame
from hypergpu.sites import SITES_VARIABLE, Site, Sites, told_sites
from hypergpu.units import are, several
from hypergpu.user.client import connection


def stream_of(octets: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(octets)
    reader.feed_eof()
    return reader


def test_payloads_come_back_in_order_and_then_none() -> None:
    stream = io.BytesIO(frame(b"one") + frame(b"") + frame(b"three"))
    assert [read_frame(stream) for _ in range(4)] == [b"one", b"", b"three", None]


async def test_asyncio_reads_the_same_frames() -> None:
    reader = stream_of(frame(b"one") + frame(b""))
    assert [await next_frame(reader) for _ in range(3)] == [b"one", b"", None]


@pytest.mark.parametrize("octets", [b"\0\0", frame(b"payload")[:-1], frame(b"payload")[:4]])
async def test_a_stream_that_breaks_off_inside_a_frame_is_no_clean_end(octets: bytes) -> None:
    with pytest.raises(FrameError, match="ended inside a frame"):
        read_frame(io.BytesIO(octets))
    with pytest.raises(FrameError, match="ended inside a frame"):
        await next_frame(stream_of(octets))


async def test_an_absurd_size_is_not_read() -> None:
    with pytest.raises(FrameError, match="something else wrote to the pipe"):
        read_frame(io.BytesIO(b"Traceback"))
    with pytest.raises(FrameError, match="something else wrote to the pipe"):
        await next_frame(stream_of(b"Traceback"))


def test_a_payload_over_the_limit_is_not_framed() -> None:
    with pytest.raises(FrameError, match="over the"):
        frame(bytes(FRAME_BYTES_MAX + 1))


def refusal_of(*texts: str) -> str:
    """Why a manifest of these paths is refused."""
    with pytest.raises(HyperGPUError) as failure:
        checked_paths(texts)
    assert failure.value.reason is Reason.MANIFEST_INVALID
    return failure.value.detail


def test_good_paths_are_given_back_in_their_order() -> None:
    texts = ["b/c.txt", "a", "b/d e", "b/\u00e9/.x"]
    assert checked_paths(texts) == tuple(PurePosixPath(text) for text in texts)


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a/."]
)
def test_a_path_that_could_leave_its_folder_is_refused(path: str) -> None:
    assert "is not relative" in refusal_of(path)


@pytest.mark.parametrize("path", ["a\\b", "a\0b", "a\nb", "a\x7fb"])
def test_a_path_with_a_backslash_or_a_control_character_is_refused(path: str) -> None:
    assert "control character" in refusal_of(path)


def test_a_name_that_was_no_unicode_on_its_disk_is_refused() -> None:
    assert "is not Unicode" in refusal_of("a\udcff")


@pytest.mark.parametrize("path", ["a" * 256, "\u00e9" * 128, "a/" * 512 + "a"])
def test_a_path_that_some_file_systems_do_not_take_is_refused(path: str) -> None:
    assert "is too long" in refusal_of(path)


def test_a_path_that_occurs_twice_is_refused() -> None:
    assert "occurs twice" in refusal_of("a", "b", "a")


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b/c/d", "a/b"), ("a/b/x", "a/b/c", "a")])
def test_a_path_below_another_file_is_refused(paths: tuple[str, ...]) -> None:
    assert "lies below another file" in refusal_of(*paths)


def test_more_entries_than_the_limit_are_refused() -> None:
    assert "over the limit" in refusal_of(*map(str, range(ENTRIES_MAX + 1)))


SITES = Sites(
    backend="tunnel",
    coordinator=Site(prefix=("ip", "netns", "exec", "x"), dials="10.77.0.1"),
    nodes={"a": Site(dials="127.77.0.1"), "b": Site(dials="10.77.0.1")},
    ports=(7700, 7701),
    control="/run/somewhere",
)


def test_sites_survive_the_environment() -> None:
    text = msgspec.json.encode(SITES).decode()
    assert told_sites({SITES_VARIABLE: text}) == SITES


def test_a_program_that_is_told_nothing_has_no_sites() -> None:
    assert told_sites({}) is None
    assert told_sites({SITES_VARIABLE: ""}) is None


@pytest.mark.parametrize("text", ["{", "{}", '{"backend": 7}', "null", '{"backend": "\udcff"}'])
def test_altered_sites_are_refused_with_the_variable_named(text: str) -> None:
    with pytest.raises(HyperGPUError, match=SITES_VARIABLE) as failure:
        told_sites({SITES_VARIABLE: text})
    assert failure.value.reason is Reason.FILE_UNUSABLE


def test_a_command_goes_behind_the_prefix_of_its_site() -> None:
    assert SITES.coordinator.command(["ls", "-l"]) == ["ip", "netns", "exec", "x", "ls", "-l"]
    assert SITES.nodes["a"].command(["ls"]) == ["ls"]


def test_each_address_of_the_coordinator_is_named_once() -> None:
    assert SITES.addresses == ("10.77.0.1", "127.77.0.1")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 rounds are over"), (1, "1 round is over"), (2, "2 rounds are over")],
)
def test_one_of_something_is_said_as_one(count: int, text: str) -> None:
    assert f"{several(count, 'round')} {are(count)} over" == text


def test_a_noun_may_have_another_ending() -> None:
    assert [several(count, "batch", "es") for count in (1, 2)] == ["1 batch", "2 batches"]


@pytest.mark.parametrize(
    ("detail", "fix", "told"),
    [
        ("transaction 4 failed", "mend it", "transaction 4 failed. Fix: mend it"),
        ("it failed. Fix: mend it", "", "it failed. Fix: mend it"),
    ],
)
def test_whoever_looks_on_is_told_a_sentence_and_one_fix(detail: str, fix: str, told: str) -> None:
    assert HyperGPUError(Reason.SENDING_HALTED, detail, fix=fix).message == told


def test_a_refusal_that_knows_no_closer_fix_tells_its_reasons() -> None:
    refusal = HyperGPUError(Reason.SENDING_HALTED, "transaction 4 failed")
    assert refusal.message == f"transaction 4 failed. Fix: {Reason.SENDING_HALTED.fix}"


PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("package", "extra"),
    [("web3.auto", "chain"), ("psycopg", "postgresql"), ("peft", "hf"), ("torch", "torch")],
)
def test_missing_package_of_an_extra_names_its_pip_line(package: str, extra: str) -> None:
    error = missing_extra(ModuleNotFoundError(name=package))
    assert error
    assert error.fix == f"install the extra: pip install 'hypergpu[{extra}]'"
    assert package.partition(".")[0] in error.detail
    assert extra in PROJECT["project"]["optional-dependencies"]


def test_missing_module_of_no_extra_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError) as failure:
        importlib.import_module("hypergpu.absent")
    assert missing_extra(failure.value) is None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hypergpu.user.cli", "hypergpu"),
        ("coordinator", "hypergpu-coordinator"),
        ("gpu_node", "hypergpu-node"),
        ("dashboard_api", "dashboard_api"),
    ],
)
def test_every_program_tells_its_version(module: str, name: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert process.stdout == f"{name} {version('hypergpu')}\n"


Options = dict[str, str | int]
SERVED: Options = dict(ports.OPTIONS)
DIALLED: dict[str, Options] = {
    "a node": dict(channel.OPTIONS),
    "a user": dict(connection.OPTIONS),
}


@pytest.fixture(scope="module")
def names_of_core() -> bytes:
    """The compiled core, which holds the names of its options as strings."""
    library = import_module("grpc._cython.cygrpc").__file__
    assert library is not None
    return Path(library).read_bytes()


@pytest.mark.parametrize("name", sorted({*SERVED, *DIALLED["a node"], *DIALLED["a user"]}))
def test_an_option_is_one_that_grpc_knows(name: str, names_of_core: bytes) -> None:
    assert name.encode() + b"\0" in names_of_core


def test_a_name_that_only_looks_right_is_found_out(names_of_core: bytes) -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in names_of_core


@pytest.mark.parametrize("who", DIALLED)
def test_pings_on_an_idle_stream_come_no_oftener_than_the_coordinator_allows(who: str) -> None:
    allowed_ms = int(SERVED["grpc.http2.min_ping_interval_without_data_ms"])
    assert int(DIALLED[who]["grpc.keepalive_time_ms"]) > allowed_ms
