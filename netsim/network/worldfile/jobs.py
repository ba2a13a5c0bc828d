"""The job of a world file: a path to a job file, or the same keys below ``[job]``."""

from collections.abc import Callable, Mapping

from hypergpu.jobfile import JobFileError, parse_job
from hypergpu.jobfile.schema import quoted_value
from hypergpu.jobfile.spec import JobSpec
from netsim.error import NetsimError
from netsim.network.worldfile.table import Table

ReadFile = Callable[[str], bytes]
"""Bytes of a file beside the world file.

Raises:
    NetsimError: It cannot be read, or is too large.
"""


def read_job(table: Table, read_file: ReadFile) -> JobSpec | None:
    """The job, judged as any job file is; None when the world has none.

    Raises:
        NetsimError: It describes no job.
    """
    if not table.has("job"):
        return None
    given = table.given("job")
    if isinstance(given, str):
        with table.placed("job"):
            return _parsed(read_file(given).decode("utf-8", "replace"), given)
    if not isinstance(given, dict):
        raise table.refused("job", f"it is {quoted_value(given)}", "give a path, or a table [job]")
    try:
        return parse_job(_toml(given))
    except JobFileError as wrong:
        problem = wrong.problems[0]
        raise table.refused(f"job.{problem.key}", problem.what, problem.fix) from None


def _parsed(text: str, source: str) -> JobSpec:
    try:
        return parse_job(text, source=source)
    except JobFileError as wrong:
        problem = wrong.problems[0]
        raise NetsimError(f"{problem.where}: {problem.what}", problem.fix) from None


def _toml(rows: Mapping[str, object]) -> str:
    """A parsed job as text again: the job file's reader takes text and nothing else."""
    lines = [f"{key} = {_value(each)}" for key, each in rows.items() if not isinstance(each, dict)]
    for name, each in rows.items():
        if isinstance(each, dict):
            lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in each.items())]
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # Escapes every character that could end or bend the text.
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    # A list or a date has no place in a job; its reader says so, whatever it holds.
    return repr(value) if isinstance(value, int | float) else "[]"
