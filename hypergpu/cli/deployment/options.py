"""What a ledger is made with, once and for all, and what of it does not fit."""

from typing import NamedTuple

import msgspec

from hypergpu.chain.addresses import address_of
from hypergpu.chain.profiles import WINDOW_S_LEAST
from hypergpu.ids import Address
from hypergpu.ledger.pay import AMOUNT_MOST
from hypergpu.ledger.typed import address_bytes

NOBODY = Address("0x" + 40 * "0")
_QUORUM_MAX = 255
_SECONDS_MAX = 2**32 - 1
_DAY_S = 86_400
_NOT_BELOW = "seconds, the window at least"


class LedgerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The constructor's words, in its order."""

    token: Address
    window_s: int
    unbonding_s: int
    minimum_bond: int
    quorum: int
    treasury: Address
    guardian: Address
    arbiters: tuple[Address, ...]

    @property
    def values(self) -> tuple[object, ...]:
        """For the constructor."""
        return (
            address_bytes(self.token),
            self.window_s,
            self.unbonding_s,
            self.minimum_bond,
            self.quorum,
            address_bytes(self.treasury),
            address_bytes(self.guardian),
            [address_bytes(each) for each in self.arbiters],
        )


class Given(NamedTuple):
    """The options as somebody typed them; None and empty: not at all."""

    token: str
    minimum_bond: int
    window_s: int | None = None
    unbonding_s: int | None = None
    quorum: int | None = None
    treasury: str = ""
    guardian: str = ""
    arbiters: tuple[str, ...] = ()


def options_of(given: Given, own: Address, window_s: int) -> LedgerOptions:
    """The options with what was left out.

    Args:
        given: By the operator.
        own: The coordinator's address, which is everybody who is not named.
        window_s: The usual one of the chain.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, something is no address.
    """
    arbiters = tuple(address_of(each, "--arbiter") for each in given.arbiters) or (own,)
    window_s = window_s if given.window_s is None else given.window_s
    unbonding_s = max(window_s, _DAY_S) if given.unbonding_s is None else given.unbonding_s
    return LedgerOptions(
        token=address_of(given.token, "--token"),
        window_s=window_s,
        unbonding_s=unbonding_s,
        minimum_bond=given.minimum_bond,
        quorum=len(arbiters) // 2 + 1 if given.quorum is None else given.quorum,
        treasury=address_of(given.treasury, "--treasury") if given.treasury else own,
        guardian=address_of(given.guardian, "--guardian") if given.guardian else own,
        arbiters=arbiters,
    )


class Fault(NamedTuple):
    """What the ledger would refuse, in words."""

    what: str
    fix: str


def faults(options: LedgerOptions) -> list[Fault]:
    """Everything about the options that the ledger would refuse."""
    arbiters = options.arbiters
    in_ranges = (
        ("--window", options.window_s, WINDOW_S_LEAST, _SECONDS_MAX, "seconds"),
        ("--unbonding", options.unbonding_s, options.window_s, _SECONDS_MAX, _NOT_BELOW),
        ("--minimum-bond", options.minimum_bond, 0, AMOUNT_MOST, "smallest units"),
        ("--quorum", options.quorum, 1, min(len(arbiters), _QUORUM_MAX), "of the arbiters"),
    )
    found = [
        Fault(
            f"{option} {given} is not in the range from {least} to {most} {what}",
            f"{option} from {least} to {most}",
        )
        for option, given, least, most, what in in_ranges
        if not least <= given <= most
    ]
    if len(set(arbiters)) < len(arbiters):
        found.append(Fault("an --arbiter is named twice", "name each --arbiter once"))
    if NOBODY in arbiters:
        what = "an --arbiter is nobody (0x0): it can sign nothing"
        found.append(Fault(what, "name an --arbiter that has a key"))
    if options.treasury == NOBODY:
        fix = "name a --treasury, or leave it out: then it is the coordinator"
        found.append(Fault("the --treasury is nobody (0x0)", fix))
    return found


def remarks(options: LedgerOptions, own: Address, final_s: int) -> list[str]:
    """What nodes will look at, where it is in the coordinator's own hand or makes no sense.

    Args:
        options: Of the ledger.
        own: The coordinator's address.
        final_s: How long a transaction takes to be final.
    """
    found = {
        f"the window of {options.window_s} s is over before what is paid in it is final, which"
        f" takes {final_s} s": options.window_s < final_s,
        "this coordinator alone is the arbiter: nobody else can void what it pays": (
            options.arbiters == (own,)
        ),
        "the treasury is this coordinator: what its bond loses comes back to it, a tenth aside": (
            options.treasury == own
        ),
        "no bond is asked for: signing two receipts of one number costs nothing": (
            not options.minimum_bond
        ),
    }
    return [words for words, is_so in found.items() if is_so]
