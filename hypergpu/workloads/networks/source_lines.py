"""Lines of the user's own code, for messages: never one of torch's, where there is another."""

import inspect
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')
_CODE_MOST = 100
_TEXT_MOST = 200


class CodeLine(NamedTuple):
    """One line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        if len(code) > _CODE_MOST:
            code = code[:_CODE_MOST].rpartition(" ")[0] + " ..."
        place = f"{_short(self.file)}:{self.line}"
        return f"{place}: {code}" if code else place


def traced_line(stack: str | None) -> CodeLine | None:
    """The user's innermost line of the stack that torch noted for a call; None: it noted none."""
    matches = (_FRAME.match(line) for line in (stack or "").splitlines())
    return _own_line(CodeLine(each["file"], int(each["line"])) for each in matches if each)


def raised_line(error: BaseException) -> CodeLine | None:
    """The user's innermost line of an error's traceback; None: it passed none."""
    return _line_of(error.__traceback__)


def called_line() -> CodeLine | None:
    """The user's innermost line that is being executed."""
    return _own_line(
        CodeLine(each.filename, each.lineno or 0) for each in traceback.extract_stack()
    )


def _line_of(trace: TracebackType | None) -> CodeLine | None:
    return _own_line(
        CodeLine(each.filename, each.lineno or 0) for each in traceback.extract_tb(trace)
    )


def definition_line(kind: type, names: Sequence[str]) -> CodeLine | None:
    """The line of a class that assigns one of these attributes, the first of them that any does;
    else its first line. None: its source is not there.
    """
    try:
        file = inspect.getsourcefile(kind) or ""
        lines, first = inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    if file.startswith((_PACKAGE, _TORCH, *_LIBRARIES)):
        return None
    for name in names:
        assigns = re.compile(rf"self\.{re.escape(name)}\b[^=]*(?<![=!<>])=(?!=)")
        for number, line in enumerate(lines):
            if assigns.search(line):
                return CodeLine(file, first + number)
    return CodeLine(file, first)


_PACKAGE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_HIDDEN = (_PACKAGE, _TORCH, "<frozen", "torch/")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def _own_line(lines: Iterable[CodeLine]) -> CodeLine | None:
    """The last line outside of installed packages; else outside of torch and of this package."""
    others = [each for each in lines if not each.file.startswith(_HIDDEN)]
    own = [each for each in others if not each.file.startswith(_LIBRARIES)]
    nearest = own or others
    return nearest[-1] if nearest else None


def _short(file: str) -> str:
    """A file's path from here, where it is below; else as it is."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


def short(text: str) -> str:
    """The first sentence of an error's text, of whole words."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    first = re.split(r"(?<=[a-z)])\. ", first)[0].rstrip(".:")
    return first if len(first) <= _TEXT_MOST else first[:_TEXT_MOST].rpartition(" ")[0] + " ..."
