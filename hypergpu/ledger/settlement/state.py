"""What the ledger remembers, and how a call that fails leaves it as it was."""

import copy
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from hypergpu.ids import Address, JobKey
from hypergpu.ledger.packing import NO_DIGEST

AMOUNT_MAX = 2**96 - 1
STAKE_MAX = 2**80 - 1


class RevertedError(Exception):
    """The contract would revert, with the error of this name."""

    def __init__(self, error: str) -> None:
        self.error = error
        super().__init__(error)


def require(condition: object, error: str) -> None:
    """Revert unless ``condition`` holds.

    Raises:
        RevertedError: it does not.
    """
    if not condition:
        raise RevertedError(error)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed at deployment."""

    window_s: int
    unbonding_s: int
    minimum_bond: int
    quorum: int
    treasury: Address


class JobTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of a job states."""

    coordinator: Address
    unit_price: int
    spend_limit: int
    epochs: int = 1
    guaranteed_bps: int = 0


class Job(msgspec.Struct, kw_only=True):
    """A job as it stands."""

    owner: Address
    terms: JobTerms
    spend_limit: int
    free: int
    spent: int = 0
    period: int = 0
    next_seq: int = 0
    ends_at_s: int = 0
    is_retired: bool = False
    digest: bytes = NO_DIGEST


class Epoch(msgspec.Struct, kw_only=True):
    """An epoch as it stands; the times are 0 before."""

    total_score: int = 0
    pool: int = 0
    opened_at_s: int = 0
    closed_at_s: int = 0
    is_swept: bool = False


class ShareState(Enum):
    """Where a node's share of an epoch stands. The numbers are the contract's."""

    NONE = 0
    DUE = 1
    PAID = 2
    VOID = 3


class Share(msgspec.Struct, kw_only=True):
    """A node's share of an epoch."""

    state: ShareState = ShareState.NONE
    receipts: int = 0
    score: int = 0
    paid: int = 0
    paid_in: int = 0
    """The period, where it was paid inside the window."""


class Account(msgspec.Struct, kw_only=True):
    """A node in a job. Of all that it got there, ``earned + advance`` is the sum."""

    counted: int = 0
    samples: int = 0
    earned: int = 0
    advance: int = 0
    """Paid or pending beyond ``earned``; later shares make it good."""
    pending: int = 0
    release_at_s: int = 0
    voided: int = 0
    is_barred: bool = False


class Stake(msgspec.Struct, kw_only=True):
    """A node's stake. Payments inside a window lock it in the bucket of their period."""

    id: int = 0
    staked: int = 0
    recent: int = 0
    older: int = 0
    period: int = 0
    unbonding: int = 0
    release_at_s: int = 0

    @property
    def locked(self) -> int:
        """What payments inside their windows lock."""
        return self.recent + self.older

    @property
    def free(self) -> int:
        """What is not locked."""
        return self.staked - self.locked

    def move_to(self, period: int) -> None:
        """Drop the buckets that are over."""
        passed = (period - self.period) % 2**16
        if passed:
            self.older = self.recent if passed == 1 else 0
            self.recent = 0
            self.period = period


class Bond(msgspec.Struct, kw_only=True):
    """What a coordinator stands for."""

    amount: int = 0
    release_at_s: int = 0
    jobs: int = 0


class State(msgspec.Struct, kw_only=True):
    """Everything. Balances are those of the token, the ledger's own under `LEDGER`."""

    balances: dict[Address, int] = {}
    refusing: set[Address] = set()
    """Accounts that the token transfers nothing to."""
    credit: dict[Address, int] = {}
    bonds: dict[Address, Bond] = {}
    allowed_owners: dict[Address, set[Address]] = {}
    """Who may open jobs on a coordinator's bond, besides itself."""
    stakes: dict[Address, Stake] = {}
    registered: int = 0
    jobs: dict[JobKey, Job] = {}
    epochs: dict[tuple[JobKey, int], Epoch] = {}
    shares: dict[tuple[JobKey, int, Address], Share] = {}
    accounts: dict[tuple[JobKey, Address], Account] = {}
    is_paused: bool = False


LEDGER = Address("0x" + "1e" * 20)
"""Stands for the ledger itself among the holders of the token."""

P = ParamSpec("P")
R = TypeVar("R")


class Holder(Protocol):
    """Whoever has a state."""

    state: State


H = TypeVar("H", bound=Holder)


def atomic(call: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """Let a call that reverts leave no trace. Copies the state: meant for tests, not for speed."""

    @wraps(call)
    def whole(self: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        before = copy.deepcopy(self.state)
        try:
            return call(self, *args, **kwargs)
        except RevertedError:
            self.state = before
            raise

    return whole
