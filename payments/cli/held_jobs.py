"""Jobs whose newest receipts lie in this machine's folders."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Domain, JobTerms, Terms
from hypergpu.statements import SignedReceipt, receipt_fault

_Content = TypeVar("_Content")


class WorkerFacts(msgspec.Struct, frozen=True):
    """File ``worker.json`` of a node, as far as the ledger states it."""

    device: str
    memory_bytes: int


class HeldJob(NamedTuple):
    """A job whose receipts a node holds."""

    job_id: JobId
    terms: Terms
    newest: SignedReceipt | None


def held_jobs(state_dir: Path, job: str | None) -> list[HeldJob]:
    """Jobs of a node that a ledger pays, in order of their ids.

    Args:
        state_dir: The node's folder.
        job: Id of one, or its beginning; None: all.
    """
    root = state_dir / "ledger"
    all_jobs = [_held_job(folder) for folder in sorted(root.glob("*")) if folder.is_dir()]
    matching_jobs = [
        candidate
        for candidate in all_jobs
        if candidate
        and (
            job is None or candidate.job_id.startswith(job) or candidate.job_id[4:].startswith(job)
        )
    ]
    on_ledger = [candidate for candidate in matching_jobs if candidate.terms.domain.chain_id]
    if on_ledger and (job is None or len({candidate.job_id for candidate in on_ledger}) == 1):
        return sorted(on_ledger, key=lambda held: held.job_id)
    description = f"{job!r}" if job else "that a ledger pays"
    jobs = ", ".join(candidate.job_id for candidate in all_jobs if candidate) or "none"
    detail = f"no one job {description} in {root}; its jobs: {jobs}"
    if matching_jobs and not on_ledger:
        detail = f"{matching_jobs[0].job_id} is signed for no chain: no ledger pays it"
    raise HyperGPUError(
        Reason.JOB_UNKNOWN, detail, fix="name a job of this node, or its folder: --state-dir FOLDER"
    )


def one_ledger(held: list[HeldJob]) -> Domain:
    """The ledger that all of these jobs are signed for."""
    domains = sorted({each.terms.domain for each in held}, key=lambda domain: domain.contract)
    if len(domains) == 1:
        return domains[0]
    ledger_list = ", ".join(f"{each.contract} on chain {each.chain_id}" for each in domains)
    raise HyperGPUError(
        Reason.ARGUMENT_INVALID,
        f"this node works for several ledgers: {ledger_list}",
        fix="name a job of the one that is meant: hypergpu ledger COMMAND --job JOB",
    )


def worker_facts(state_dir: Path) -> tuple[WorkerFacts, bytes]:
    """What the node's worker said of its device, and the file's bytes."""
    path = state_dir / "worker.json"
    facts = _read(path, WorkerFacts)
    if facts is None:
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"there is no {path}: what the node can do is not known yet",
            fix="let the node join once: hypergpu join; or name its folder: --state-dir FOLDER",
        )
    return facts, path.read_bytes()


def _held_job(folder: Path) -> HeldJob | None:
    terms = _read(folder / "terms.json", JobTerms)
    if terms is None:
        return None
    newest = _read(folder / "newest.json", SignedReceipt)
    if newest and (fault := receipt_fault(newest, terms.terms.domain, terms.terms.coordinator)):
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"the receipt in {folder}: {fault}")
    return HeldJob(terms.job_id, terms.terms, newest)


def _read(path: Path, kind: type[_Content]) -> _Content | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        detail = f"{path} cannot be read: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"{path} is damaged: {error}"
        fix = "the node puts it aside when it starts, and its coordinator sends it again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
