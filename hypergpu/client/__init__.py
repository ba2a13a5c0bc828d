"""Python API of a coordinator: everything that `hypergpu job`, `node` and `token` do.

Without arguments ``connect`` takes the coordinator that the environment, the settings file or
`hypergpu up` on this machine name:

>>> from hypergpu.user.client import connect
>>> with connect() as coordinator:
...     job = coordinator.submit("job.toml")
...     for update in coordinator.watch(job):
...         if isinstance(update, JobEvent) and update.kind == "RoundRecorded":
...             print("round", update.body["round"] + 1)
...     detail = coordinator.job(job)
...     exported = coordinator.export(job, Path("model"))
round 1
round 2
>>> detail.job.phase
'finished'
>>> exported.model.name
'model.safetensors'

The same calls without blocking:

>>> async def list_jobs():
...     async with await connect_async() as coordinator:
...         return [job.phase for job in await coordinator.jobs()]
>>> asyncio.run(list_jobs())
['finished']

Errors have a number, a message and a fix:

>>> with connect() as coordinator:
...     try:
...         coordinator.find_job("nothing")
...     except HyperGPUError as error:
...         print(error.reason.number, error.detail, "-", error.fix)
2001 there is no job 'nothing' - list the jobs: hypergpu job ls
"""

from hypergpu.user.client import (
    ENDED,
    AsyncCoordinator,
    BlockingStream,
    ConnectionTarget,
    Coordinator,
    ExportedModel,
    History,
    HyperGPUError,
    JobDetail,
    JobEvent,
    JobLedger,
    JobUpdate,
    JobView,
    NodeLevelsView,
    NodeView,
    ParticipantView,
    Reached,
    RemoteFailureError,
    Role,
    RoundProgress,
    TokenMade,
    TokenView,
    connect,
    connect_async,
)

__all__ = [
    "ENDED",
    "AsyncCoordinator",
    "BlockingStream",
    "ConnectionTarget",
    "Coordinator",
    "ExportedModel",
    "History",
    "HyperGPUError",
    "JobDetail",
    "JobEvent",
    "JobLedger",
    "JobUpdate",
    "JobView",
    "NodeLevelsView",
    "NodeView",
    "ParticipantView",
    "Reached",
    "RemoteFailureError",
    "Role",
    "RoundProgress",
    "TokenMade",
    "TokenView",
    "connect",
    "connect_async",
]
