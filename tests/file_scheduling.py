"""Which tests one of several processes gets together."""

from xdist.scheduler import LoadFileScheduling

SOURCE_READERS = ("tests/architecture/", "tests/kinds/echo/test_traces.py")
"""Tests that parse all sources, once for each process."""


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Keeps a file's tests in one process, and all that parse the sources in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        """Name of the part that a test is handed out with."""
        file: str = super()._split_scope(nodeid)
        return "sources" if file.startswith(SOURCE_READERS) else file
