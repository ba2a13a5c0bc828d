"""Layouts of models of jobs that are not created yet: known from other jobs, or made for this."""

import secrets
from collections import OrderedDict

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.evaluator.process import Initialise
from coordinator.shell.kinds.training.job_runtime import TrainingJobs
from coordinator.shell.kinds.training.workload_versions import catalogue_version
from coordinator.shell.store.blobs.store import BlobStore
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.layout import Layout, LayoutError, TensorSpec, layout_from_json, layout_of

_LAYOUTS_KEPT = 64


class ModelLayouts:
    """Finds the layout of a job's model."""

    def __init__(self, jobs: TrainingJobs, blobs: BlobStore, evaluators: Evaluators) -> None:
        self._jobs = jobs
        self._blobs = blobs
        self._evaluators = evaluators
        self._layouts: OrderedDict[tuple[object, ...], Layout] = OrderedDict()

    async def layout_for(self, spec: JobSpec, parameters: int, owner: TokenId) -> Layout:
        """The layout of the job's model, or one of as many parameters."""
        if parameters:
            return self._known_layout_of(spec, parameters) or _layout_of_count(parameters)
        if (known_layout := self._known_layout(spec)) is not None:
            return known_layout
        key = (spec.workload, catalogue_version(spec.workload), tuple(sorted(spec.options.items())))
        if key not in self._layouts:
            self._layouts[key] = await self._made_layout(spec, owner)
            while len(self._layouts) > _LAYOUTS_KEPT:
                self._layouts.popitem(last=False)
        return self._layouts[key]

    def _known_layout_of(self, spec: JobSpec, parameters: int) -> Layout | None:
        """Layout of the newest job of the workload with so many parameters; None: there is none."""
        runtimes = list(self._jobs.values())
        layouts = (
            each.layout for each in runtimes[::-1] if each.job.spec.workload == spec.workload
        )
        return next(
            (each for each in layouts if each and each.parameters_count == parameters), None
        )

    def _known_layout(self, spec: JobSpec) -> Layout | None:
        """Layout of a job of the same workload, options and data; None: there is none."""
        for runtime in self._jobs.values():
            other_spec = runtime.job.spec
            is_alike = (other_spec.workload, other_spec.options) == (spec.workload, spec.options)
            if is_alike and runtime.layout is not None and other_spec.data.path == spec.data.path:
                return runtime.layout
        return None

    async def _made_layout(self, spec: JobSpec, owner: TokenId) -> Layout:
        """Layout of a model that an evaluator makes for it, and that is thrown away."""
        name = f"estimate-{secrets.token_hex(6)}"
        blobs, evaluator = self._blobs, self._evaluators
        model_path, layout_path = blobs.work_path(f"{name}-initial"), blobs.work_path(name)
        request = Initialise(
            workload=spec.workload,
            options=spec.options,
            seed=spec.training.seed,
            data_dir="",
            is_held_out=spec.data.stays_on_nodes,
            model_path=str(model_path),
            layout_path=str(layout_path),
        )
        job = EvaluatorJob(JobId(name), owner)
        try:
            initial_model = await evaluator.initialise(job, request)
            return layout_from_json(initial_model.layout_json)
        except HyperGPUError as error:
            if not spec.data.path:
                raise
            raise HyperGPUError(
                Reason.MODEL_MISSING,
                f"the size of its model is known only with its data: {error.detail}",
                fix="submit it, and look at `hypergpu job show`",
            ) from error
        except LayoutError as error:
            raise HyperGPUError(Reason.WORKLOAD_UNKNOWN, f"its layout: {error}") from error
        finally:
            evaluator.end_job(job.job_id)
            for path in (model_path, layout_path):
                path.unlink(missing_ok=True)


def _layout_of_count(parameters: int) -> Layout:
    """A layout of so many parameters in one tensor.

    Raises:
        HyperGPUError: SPEC_INVALID, there are too many.
    """
    try:
        return layout_of([TensorSpec("model", (parameters,))])
    except LayoutError as error:
        raise HyperGPUError(Reason.SPEC_INVALID, f"its model: {error}") from error
