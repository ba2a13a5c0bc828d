"""Which job, node or token a person means."""

from collections.abc import Sequence

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client.values import JobView, NodeView, TokenView


def job_named(jobs: Sequence[JobView], name: str | None) -> str:
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
        return jobs[-1].id
    if any(job.id == name for job in jobs):
        return name
    matches = [job.id for job in jobs if job.name == name]
    ids_by_prefix = [job.id for job in jobs if job.id.removeprefix("job-").startswith(name)]
    ids_by_prefix += [job.id for job in jobs if name != "" and job.id.startswith(name)]
    return _only(matches or sorted(set(ids_by_prefix)), f"job {name!r}", Reason.JOB_UNKNOWN)


def node_named(nodes: Sequence[NodeView], name: str) -> NodeView:
    """The node called ``name``, or whose id begins with it, with or without its 0x.

    Raises:
        HyperGPUError: NODE_UNKNOWN, no node is meant or several are.
    """
    bare = name.lower().removeprefix("0x")
    begin = [each.id for each in nodes if bare and each.id.removeprefix("0x").startswith(bare)]
    matches = [each.id for each in nodes if name and each.name == name]
    node_id = _only(matches or begin, f"node {name!r}", Reason.NODE_UNKNOWN)
    return next(each for each in nodes if each.id == node_id)


def token_named(tokens: Sequence[TokenView], name: str) -> str:
    """The token whose id is or begins with ``name``.

    Raises:
        HyperGPUError: TOKEN_UNKNOWN, no token is meant or several are.
    """
    matches = [each.id for each in tokens if each.id.startswith(name)]
    return _only(matches if name else [], f"token {name!r}", Reason.TOKEN_UNKNOWN)


def _only(found: Sequence[str], what: str, reason: Reason) -> str:
    if len(found) == 1:
        return found[0]
    detail = f"{what} may be {', '.join(found)}" if found else f"there is no {what}"
    raise HyperGPUError(reason, detail)
