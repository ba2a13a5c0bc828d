"""Checks that packed work is what its user signed, by keys that the owner pinned or that were seen
first. Its calls block.

Without pinned keys the first key of a user at a coordinator is kept in ``spec-keys.json``, and a
later one counts only where the chain of successions leads to it. Work that nobody signed is done
where the owner pinned no key: users of earlier versions sign nothing.
"""

import msgspec
import structlog

from gpu_node.core.limits import OwnerLimits, Refusal
from gpu_node.shell.folder.state import StatePaths
from hypergpu.assignment import PackedAssignment
from hypergpu.clock import unix_s
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.spec_keys import key_line, read_spec
from hypergpu.farm.work_spec import WorkSpec, bundle_conflict
from hypergpu.packed_work import unpack_work
from hypergpu.signed_spec import SignedSpec

log = structlog.get_logger()
_USERS_MOST = 10_000
"""Users of whom the first key is kept; of more, the oldest are forgotten."""


class SignedWork:
    """Knows keys of users. One daemon uses it."""

    def __init__(self, paths: StatePaths, limits: OwnerLimits) -> None:
        self._file = paths.spec_keys
        self._pinned_keys = frozenset(map(bytes.fromhex, limits.spec_keys))
        self._first_keys = self._read()
        """Newest key that is trusted of each user at a coordinator."""

    def refusal(self, assignment: PackedAssignment) -> Refusal | None:
        """Why the work is not done for what its user signed or did not; None: it is."""
        if assignment.spec is None:
            if self._pinned_keys:
                detail = "its owner pinned keys, and the work is signed by no user"
                return Refusal("OWNER_SPEC", detail)
            return None
        try:
            reason = self._conflict(assignment, assignment.spec)
        except HyperGPUError as error:
            reason = error.detail
        return Refusal("OWNER_SPEC", reason) if reason else None

    def _conflict(self, assignment: PackedAssignment, signed_spec: SignedSpec) -> str:
        spec = read_spec(signed_spec)
        work = assignment.work
        bundle = unpack_work(work, work.kind, Bundle)
        terms = assignment.terms
        if terms is not None and terms.unit is not spec.unit:
            return f"it is counted in {terms.unit.value}, and its user signed {spec.unit.value}"
        return bundle_conflict(spec, work.kind, bundle, unix_s()) or self._key_conflict(
            signed_spec, spec, "" if terms is None else terms.coordinator
        )

    def _key_conflict(self, signed_spec: SignedSpec, spec: WorkSpec, coordinator: str) -> str:
        keys = key_line(signed_spec)
        newest_key = keys[-1]
        if self._pinned_keys:
            if self._pinned_keys.isdisjoint(keys):
                return f"it is signed by key {newest_key.hex()}, which node.toml does not name"
            return ""
        name = f"{coordinator}/{spec.user}"
        first_key = self._first_keys.get(name)
        if first_key == newest_key.hex():
            return ""
        if first_key is not None and bytes.fromhex(first_key) not in keys:
            return (
                f"user {spec.user} signed by key {first_key[:16]}... before, and now by another"
                f' that it did not name; where that is right: spec_keys = ["{newest_key.hex()}"]'
            )
        self._keep(name, newest_key.hex())
        return ""

    def _keep(self, name: str, key: str) -> None:
        self._first_keys.pop(name, None)
        self._first_keys[name] = key
        while len(self._first_keys) > _USERS_MOST:
            self._first_keys.pop(next(iter(self._first_keys)))
        try:
            write_durably(self._file, msgspec.json.encode(self._first_keys))
        except OSError as error:
            log.warning("the first key of a user is not kept", reason=str(error))

    def _read(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            log.warning("first keys of users cannot be read", reason=str(error))
            return {}
