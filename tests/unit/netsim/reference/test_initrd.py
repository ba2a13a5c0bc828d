import subprocess
import sys
from pathlib import Path

from netsim.reference import guest_program, initrd


def test_an_archive_has_every_file_and_ends_as_cpio_wants_it() -> None:
    content = b"hello"
    entry = initrd._entry("/etc/greeting", initrd.S_FILE, content)
    assert entry.startswith(b"070701")
    assert len(entry) % 4 == 0
    assert b"etc/greeting\0" in entry
    assert entry.rstrip(b"\0").endswith(content)
    assert int(entry[14:22], 16) == 0o100755
    assert int(entry[54:62], 16) == len(content)


def test_the_interpreter_of_the_guest_has_all_that_the_program_imports() -> None:
    # As bare as in the guest: no site packages, no environment.
    program = Path(guest_program.__file__)
    argv = [sys.executable, "-S", "-E", "-s", "-B", "-X", "importtime", str(program), "none"]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    listed = dict(initrd._interpreter())
    for module in ("socket", "select", "struct", "pathlib"):
        assert module in imported
        path = getattr(sys.modules[module], "__file__", None)
        assert path is None or path in listed


def test_the_same_files_give_the_same_bytes() -> None:
    assert dict(initrd._interpreter()) == dict(initrd._interpreter())
