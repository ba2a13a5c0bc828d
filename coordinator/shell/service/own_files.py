"""Which files a user may name in a job: those that they sent themselves, and those of their jobs.

Users read the digests of others' models, data and manifests in events: to know a digest is no right
to its bytes. What was sent is known to this process alone: after a restart it is sent again.
"""

from collections.abc import Set

from coordinator.core.training.job.state import Job
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.service.calls import Caller
from hypergpu.ids import Digest, TokenId

_NOBODY = TokenId("")
_FILES_MOST = 100_000
"""Files of each token that are remembered; no manifest names more."""


class OwnFiles:
    """Files that users may name."""

    def __init__(self, driver: Driver) -> None:
        self._jobs = driver.runtimes_of(JobRuntime)
        self._sent: dict[TokenId, dict[Digest, None]] = {}

    def note(self, caller: Caller, digest: Digest) -> None:
        """Remember that the caller sent a file whole."""
        if caller.token is None:
            return
        sent_digests = self._sent.setdefault(caller.token.token_id, {})
        sent_digests.pop(digest, None)
        sent_digests[digest] = None
        if len(sent_digests) > _FILES_MOST:
            del sent_digests[next(iter(sent_digests))]

    def foreign(self, caller: Caller, digests: Set[Digest]) -> frozenset[Digest]:
        """Those that the caller has not shown to have; an operator may name any file."""
        if caller.token is None or caller.may_change(_NOBODY):
            return frozenset()
        user = caller.token.token_id
        left_digests = digests - self._sent.get(user, {}).keys()
        for runtime in self._jobs.values():
            if left_digests and runtime.job.owner == user:
                left_digests = (
                    left_digests
                    - (runtime.entries_of_manifest or frozenset())
                    - _weights(runtime.job)
                )
        return frozenset(left_digests)


def _weights(job: Job) -> frozenset[Digest]:
    return frozenset() if job.weights is None else frozenset([job.weights.blob.digest])
