"""A world's job in virtual time: the real cores, no processes and no bytes."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate

from msgspec.structs import replace

from hypergpu.client.history import RoundPoint
from hypergpu.jobfile.spec import SCHEMES, JobSpec
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds
from hypergpu.workloads.registry import build, find
from hypergpu.workloads.workload import numpy_layout
from netsim.link.error import NetsimError
from netsim.measure.lateness import ALWAYS_VALID, LatenessVerdict
from netsim.network.world import WorldDescription
from netsim.run.choices import required_job
from netsim.run.report import NOTHING_TRAINED, RunReport
from netsim.virtual.simulation import Simulation
from netsim.virtual.sizes import TransferSizes
from netsim.virtual.worlds import described_world

WORLD = "world"
_BROKEN = LatenessVerdict(
    is_valid=False, sentence="INVALID: the world broke, its figures mean nothing"
)


def run_virtually(world: WorldDescription) -> RunReport:
    """Simulate a world's job to its end. Equal worlds give equal reports.

    Raises:
        NetsimError: The world has no job or too few nodes for it, or its model cannot be built
            here.
    """
    spec = required_job(world)
    whole = replace(world, job=_without_target(spec))
    outcome = Simulation(described_world(whole, job_sizes(spec))).run()
    spans_ms = [ms for each in outcome.round_ms.values() for ms in each]
    broken = "; ".join(outcome.violations)
    return RunReport(
        world=world.name,
        seed=world.seed,
        backend=WORLD,
        phase="broken" if broken else ", ".join(each.value for each in outcome.phases.values()),
        reason=broken or "; ".join(filter(None, outcome.reasons.values())),
        rounds=_points(spans_ms),
        metric=None,
        verdict=_BROKEN if broken else ALWAYS_VALID,
        journal=",".join(outcome.journals.values()),
        strategy=spec.strategy,
        target=spec.evaluation.target,
        note=NOTHING_TRAINED,
    )


def _without_target(spec: JobSpec) -> JobSpec:
    """Return the job without its target, which the made-up metric would reach."""
    return replace(spec, evaluation=replace(spec.evaluation, target=0.0))


def _points(spans_ms: Sequence[int]) -> tuple[RoundPoint, ...]:
    """Return rounds of these lengths, one after another."""
    return tuple(
        RoundPoint(
            number=number, duration_ms=Milliseconds(span_ms), ended_ms=Milliseconds(ended_ms)
        )
        for number, (span_ms, ended_ms) in enumerate(
            zip(spans_ms, accumulate(spans_ms), strict=True), start=1
        )
    )


def job_sizes(spec: JobSpec) -> TransferSizes:
    """Return the bytes that a participant moves in a round of this job.

    Raises:
        NetsimError: The model takes torch, which is not installed.
    """
    layout = _layout(spec)
    is_whole = spec.codec.down == "fp32"
    return TransferSizes(
        model=layout.model_bytes if is_whole else update_bytes(layout, spec.codec.down),
        update=update_bytes(layout, spec.codec.up),
        whole=layout.model_bytes,
        schemes={scheme: update_bytes(layout, scheme) for scheme in SCHEMES},
    )


def _layout(spec: JobSpec) -> Layout:
    entry = find(spec.workload)
    if entry.kind != "torch":
        return numpy_layout(build(entry, spec.options))
    if find_spec("torch") is None:
        what = f"the size of {spec.workload}'s model is not known without torch"
        raise NetsimError(what, "pip install 'hypergpu[torch]'")
    from hypergpu.workloads.networks.tensors import module_layout

    return module_layout(build(entry, spec.options).model())
