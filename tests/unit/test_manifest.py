from pathlib import PurePosixPath

import pytest

from hypergpu.dataset.manifest import ENTRIES_MAX, checked_paths
from hypergpu.errors import HyperGPUError, Reason


def refusal_of(*texts: str) -> str:
    """Why a manifest of these paths is refused."""
    with pytest.raises(HyperGPUError) as refused:
        checked_paths(texts)
    assert refused.value.reason is Reason.MANIFEST_INVALID
    return refused.value.detail


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
