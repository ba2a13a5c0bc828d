"""An owner's workloads beside sweeps, whose points are trainings."""

from pathlib import Path
from typing import Any

import pytest

from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.owner.gate import OwnerGate
from gpu_node.shell.transfer.cache import BlobCache
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.farm.bundles import Bundle
from hypergpu.ids import JobId, Slot
from hypergpu.packed_work import pack_work
from hypergpu.sandbox.sandbox import SandboxKind
from hypergpu.units import Bytes


def refusal_detail(folder: Path, limits: OwnerLimits, **parameters: Any) -> str:
    """Why an owner without a sandbox refuses a bundle of a sweep; empty: it does not."""
    paths = StatePaths(folder)
    gate = OwnerGate(limits, paths, BlobCache(paths, Bytes(1 << 20)), SandboxKind.OFF)
    work = pack_work("map/sweep", Bundle(start=0, items=1, parameters=parameters))
    lease = Lease(JobId("job-1"), 0, 1)
    refusal = gate.refusal(PackedAssignment(lease=lease, slot=Slot(0), work=work, reason=""))
    return refusal.detail if refusal else ""


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"workload": "digits-mlp"}, ""),
        ({"workload": "text-gpt"}, "text-gpt is none of its workloads"),
        ({}, "does not say which workload"),
    ],
)
def test_a_sweep_trains_what_the_owner_allows_alone(
    tmp_path: Path, parameters: dict[str, Any], reason: str
) -> None:
    limits = OwnerLimits(kinds=("training", "sweep"), workloads=("map/sweep", "digits-mlp"))
    detail = refusal_detail(tmp_path, limits, **parameters)
    assert reason in detail
    assert bool(detail) is bool(reason)


def test_a_program_is_swept_without_a_sandbox_only_where_the_owner_names_it(tmp_path: Path) -> None:
    limits = OwnerLimits(kinds=("training", "sweep"))
    detail = refusal_detail(tmp_path, limits, workload="program")
    assert "program is not among its workloads by name" in detail
    assert "no work of kind sweep" in refusal_detail(
        tmp_path / "other", OwnerLimits(), workload="digits-mlp"
    )
