"""Which job, node or token a person means."""

from collections.abc import Sequence

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import job_pb2


def job_named(jobs: Sequence[job_pb2.JobSummary], name: str | None) -> str:
    """The job with this id, name or beginning of an id; without a name the newest.

    Args:
        jobs: As listed, oldest first.
        name: What the person typed.

    Raises:
        HyperGPUError: JOB_UNKNOWN, no job is meant or several are.
    """
    if name is None:
        if not jobs:
            raise HyperGPUError(Reason.JOB_UNKNOWN, "there is no job yet")
        return jobs[-1].job_id
    if any(job.job_id == name for job in jobs):
        return name
    called = [job.job_id for job in jobs if job.name == name]
    beginning = [job.job_id for job in jobs if job.job_id.removeprefix("job-").startswith(name)]
    beginning += [job.job_id for job in jobs if name != "" and job.job_id.startswith(name)]
    return _only(called or sorted(set(beginning)), f"job {name!r}", Reason.JOB_UNKNOWN)


def node_named(nodes: Sequence[job_pb2.NodeSummary], name: str) -> str:
    """The node whose id is or begins with ``name``, with or without its 0x; or that is called so.

    Raises:
        HyperGPUError: NODE_UNKNOWN, no node is meant or several are.
    """
    bare = name.lower().removeprefix("0x")
    found = [each.node_id for each in nodes if each.node_id.removeprefix("0x").startswith(bare)]
    called = [each.node_id for each in nodes if name and each.capabilities.name == name]
    return _only(called or (found if bare else []), f"node {name!r}", Reason.NODE_UNKNOWN)


def token_named(tokens: Sequence[job_pb2.TokenSummary], name: str) -> str:
    """The token whose id is or begins with ``name``.

    Raises:
        HyperGPUError: TOKEN_UNKNOWN, no token is meant or several are.
    """
    found = [each.token_id for each in tokens if each.token_id.startswith(name)]
    return _only(found if name else [], f"token {name!r}", Reason.TOKEN_UNKNOWN)


def _only(found: Sequence[str], what: str, reason: Reason) -> str:
    if len(found) == 1:
        return found[0]
    detail = f"{what} may be {', '.join(found)}" if found else f"there is no {what}"
    raise HyperGPUError(reason, detail)
