"""Why a coordinator did not start, or ended: an exception as an error that says what to do."""

import errno

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from coordinator.shell.nodes.identity.authority import AuthorityError
from coordinator.shell.store.journal.engines import disk_full_error
from coordinator.shell.store.journal.records import JournalError
from hypergpu.errors import HyperGPUError, Reason, missing_extra

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def start_error(failure: Exception) -> HyperGPUError | None:
    """The error to report for an exception that ended a coordinator; None: it is a defect."""
    match failure:
        case HyperGPUError():
            is_full = isinstance(failure.__cause__, OSError) and failure.__cause__.errno in _FULL
            return HyperGPUError(Reason.DISK_FULL, failure.detail) if is_full else failure
        case ExceptionGroup():
            causes = [
                each if isinstance(each, HyperGPUError) else start_error(each)
                for each in failure.exceptions
            ]
            return causes[0] if all(causes) else None
        case ValidationError():
            return _invalid_settings(failure)
        case ModuleNotFoundError():
            return missing_extra(failure)
        case _:
            return _unusable_storage(failure)


def _unusable_storage(failure: Exception) -> HyperGPUError | None:
    match failure:
        case JournalError() | AuthorityError():
            return HyperGPUError(Reason.FOLDER_UNUSABLE, str(failure))
        case DBAPIError():
            return disk_full_error(failure, "its database") or _database_error(failure)
        case OSError():
            reason = Reason.DISK_FULL if failure.errno in _FULL else Reason.FOLDER_UNUSABLE
            return HyperGPUError(reason, f"{failure.filename or 'a file'}: {failure.strerror}")
        case _:
            return None


def _database_error(failure: DBAPIError) -> HyperGPUError:
    """A database that does not answer, or ends while it is used."""
    failure_text = next(iter(str(failure.orig).splitlines()), "it says nothing").strip()
    is_server = type(failure.orig).__module__.startswith("psycopg")
    fix = "start the database again, then the coordinator" if is_server else ""
    return HyperGPUError(
        Reason.FOLDER_UNUSABLE, f"the journal cannot be used: {failure_text}", fix=fix
    )


def _invalid_settings(wrong: ValidationError) -> HyperGPUError:
    """The settings that are wrong, and how each is set."""
    problems = ((".".join(map(str, each["loc"])), each["msg"]) for each in wrong.errors())
    detail = "; ".join(f"{name}: {problem}" for name, problem in problems)
    names = sorted({str(each["loc"][0]).upper() for each in wrong.errors() if each["loc"]})
    variable_names = " and ".join(f"HYPERGPU_COORDINATOR_{name}" for name in names)
    fix = (
        f"correct {variable_names or 'its settings'}, or the flag: see hypergpu-coordinator --help"
    )
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
