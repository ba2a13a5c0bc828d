"""Checks work against the owner's limits before a byte of it is fetched."""

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from gpu_node.core.limits import (
    STATES_OF_A_JOB,
    TRAINING_KIND,
    OwnerLimits,
    Refusal,
    refusal_of_disk,
    refusal_of_memory,
)
from gpu_node.core.own_server import OwnServer
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.owner.own_data import checked_folder
from gpu_node.shell.owner.signed_work import SignedWork
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.worker.protocol import WorkerCapabilities
from hypergpu.assignment import AnyAssignment, Assignment, PackedAssignment
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.map_request import work_kind
from hypergpu.farm.sweep_points import SWEEP_KIND, SWEEP_WORKLOAD
from hypergpu.ids import JobId
from hypergpu.packed_work import PackedWork, unpack_work
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.serving.serve_request import SERVER_KIND, Replica
from hypergpu.units import Bytes
from hypergpu.wire.bulk import BulkRates, RateLimit

_MODELS_AT_ONCE = 3
"""The newest two in the cache, and one on its way."""


def bulk_rates(limits: OwnerLimits) -> BulkRates:
    """Rates at which the owner lets bytes go each way."""
    return BulkRates(RateLimit(limits.upload_bits_per_s), RateLimit(limits.download_bits_per_s))


class OwnerGate:
    """Lets work through that the owner's limits allow. Its calls block.

    Args:
        limits: The owner's.
        paths: The node's folder.
        cache: Is told how much it may hold beside the work.
        sandbox: The worker's.
    """

    def __init__(
        self, limits: OwnerLimits, paths: StatePaths, cache: BlobCache, sandbox: SandboxKind
    ) -> None:
        self._limits = limits
        self._sandbox = sandbox
        self._paths = paths
        self._cache = cache
        self.workload_kinds: Mapping[str, str] = {}
        """Kinds of the worker's workloads."""
        self.work_kinds: Container[str] = ()
        """Kinds of packed work that the worker does."""
        self._checked: tuple[JobId, Path] | None = None
        self._signed_work = SignedWork(paths, limits)
        self._server_job: JobId | None = None

    def take_capabilities(self, capabilities: WorkerCapabilities) -> None:
        """Know what the worker's workloads are by their names."""
        self.workload_kinds = capabilities.workload_kinds
        self.work_kinds = (*capabilities.work_kinds, SERVER_KIND)

    def data_folder(self, job_id: JobId) -> Path | None:
        """The owner's folder that the job trains on, once its work was let through; else None."""
        return self._checked[1] if self._checked and self._checked[0] == job_id else None

    def refusal(self, assignment: AnyAssignment) -> Refusal | None:
        """Why the owner does not let the node do this work; None: it may."""
        if not isinstance(assignment, Assignment):
            kind = assignment.work.kind
            return (
                self._refusal_of_kind(kind)
                or self._refusal_by_name(kind)
                or self._signed_work.refusal(assignment)
                or self._refusal_of_sweep(assignment.work)
                or self._refusal_of_server(assignment)
            )
        task = assignment.task
        return (
            self.refusal_of_workload(task.workload)
            or refusal_of_memory(self._limits, task.model.size_bytes)
            or self._refusal_of_disk(assignment)
            or self._refusal_of_data(assignment)
        )

    def refusal_of_workload(self, name: str) -> Refusal | None:
        """Why the owner does not let the node train a workload, whatever its size, or do work of a
        kind; None: it may.
        """
        kind = name if name in self.work_kinds else TRAINING_KIND
        return self._refusal_of_kind(kind) or self._refusal_by_name(name)

    def _refusal_of_kind(self, kind: str) -> Refusal | None:
        reason = self._limits.refusal_of_kind(kind)
        return Refusal("OWNER_KIND", reason) if reason else None

    def _refusal_of_sweep(self, work: PackedWork) -> Refusal | None:
        """Why the workload of a sweep is not trained; points of another one are given back."""
        if work.kind != work_kind(SWEEP_KIND):
            return None
        try:
            workload = unpack_work(work, work.kind, Bundle).parameters.get(SWEEP_WORKLOAD)
        except HyperGPUError as error:
            return Refusal(error.reason.name, error.detail)
        if not isinstance(workload, str):
            return Refusal("OWNER_WORKLOAD", "the sweep does not say which workload it trains")
        return self._refusal_by_name(workload)

    def _refusal_of_server(self, assignment: PackedAssignment) -> Refusal | None:
        """Why the owner's server does not answer; it is used for the newest job that it does."""
        if assignment.work.kind != SERVER_KIND:
            return None
        server = self._limits.server
        if server is None:
            detail = "its owner names no server: docs/node.md says how, by [server] in node.toml"
            return Refusal("OWNER_KIND", detail)
        try:
            reason = server.refusal_of(unpack_work(assignment.work, SERVER_KIND, Replica).model)
        except HyperGPUError as error:
            return Refusal(error.reason.name, error.detail)
        if reason:
            return Refusal("OWNER_KIND", reason)
        self._server_job = assignment.lease.job_id
        return None

    def server_of(self, job_id: JobId) -> OwnServer | None:
        """The owner's server, if it answers for a job whose work was let through."""
        return self._limits.server if job_id == self._server_job else None

    def _refusal_by_name(self, name: str) -> Refusal | None:
        if not self._limits.allow_workload(name, self.workload_kinds):
            workload_list = ", ".join(self._limits.workloads)
            return Refusal("OWNER_WORKLOAD", f"{name} is none of its workloads: {workload_list}")
        if self._sandbox is SandboxKind.OFF and not self._limits.allow_unsandboxed(name):
            detail = f"{name} is not among its workloads by name, and its worker has no sandbox"
            return Refusal("OWNER_WORKLOAD", detail)
        return None

    def _refusal_of_data(self, assignment: Assignment) -> Refusal | None:
        """Why a data set cannot be trained on. It is looked at when its job is taken up."""
        job_id, name = assignment.lease.job_id, assignment.task.data_name
        if name and self.data_folder(job_id) is not None:
            return None
        self._checked = None
        try:
            if name:
                self._checked = (job_id, checked_folder(self._limits.data, name))
        except HyperGPUError as error:
            return Refusal(error.reason.name, error.detail)
        return None

    def kept_bytes(self) -> int:
        """Bytes on disk of all that the node keeps and its worker writes."""
        scratches = (self._paths.scratch, self._paths.second_scratch)
        own = (self._paths.jobs, self._paths.open_folder, *scratches)
        return self._cache.size_bytes() + _size(own)

    def _refusal_of_disk(self, assignment: Assignment) -> Refusal | None:
        if not self._limits.disk_bytes:
            return None
        task = assignment.task
        own = self._paths.job(assignment.lease.job_id)
        states = (self._paths.jobs, self._paths.open_folder)
        others_bytes = max(0, _size(states) - _size((own,)))
        states_bytes = STATES_OF_A_JOB * task.model.size_bytes
        need_bytes = states_bytes + _MODELS_AT_ONCE * task.model.size_bytes
        need_bytes += task.manifest.size_bytes if task.manifest else 0
        refusal = refusal_of_disk(self._limits, others_bytes, need_bytes)
        if refusal is None:
            left_bytes = self._limits.disk_bytes - others_bytes - states_bytes
            self._cache.resize(Bytes(left_bytes), Bytes(left_bytes - need_bytes + states_bytes))
        return refusal


def _size(folders: Iterable[Path]) -> int:
    """Bytes of all files beneath some folders; links count as themselves."""
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    total += (Path(parent) / name).lstat().st_size
                except OSError:
                    continue  # it was removed meanwhile
    return total
