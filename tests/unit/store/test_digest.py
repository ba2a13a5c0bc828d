from pathlib import Path

import pytest

from hypergpu.digest import (
    RunningDigest,
    digest_from_wire,
    digest_of,
    digest_of_file,
    digest_to_wire,
    is_digest,
    running_digest_of_file,
)
from hypergpu.errors import HyperGPUError, Reason

# The first test vector of the BLAKE3 paper: no input at all.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_digest_is_blake3() -> None:
    assert digest_of(b"") == EMPTY


def test_pieces_give_the_digest_of_the_whole() -> None:
    running = RunningDigest()
    for piece in (b"one", bytearray(b"two"), memoryview(b"three")):
        running.update(piece)
    assert running.digest() == digest_of(b"onetwothree")
    assert running.size_bytes == 11


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest_of_file(path) == digest_of(content)


def test_a_files_running_digest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"stored ")
    running = running_digest_of_file(path)
    running.update(b"later")
    assert running.digest() == digest_of(b"stored later")


def test_a_digest_survives_the_wire() -> None:
    assert digest_from_wire(digest_to_wire(digest_of(b"x"))) == digest_of(b"x")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_other_sizes_are_refused_from_the_wire(size: int) -> None:
    with pytest.raises(HyperGPUError, match=f"32 bytes, not {size}") as caught:
        digest_from_wire(bytes(size))
    assert caught.value.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize("text", ["", EMPTY[:-1], EMPTY.upper(), EMPTY + "\n", "../" + EMPTY[3:]])
def test_text_that_is_no_digest_is_refused(text: str) -> None:
    assert not is_digest(text)
