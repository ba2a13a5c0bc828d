"""What a ledger is made with, once and for all, and what of it does not fit."""

import re
from typing import NamedTuple

import msgspec

from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.typed import address_bytes
from hypergpu.refusal import Reason, RefusalError

NOBODY = Address("0x" + 40 * "0")
WINDOW_S_LEAST = 30
AMOUNT_MAX = 2**96 - 1
_QUORUM_MAX = 255
_SECONDS_MAX = 2**32 - 1
_DAY_S = 86_400
_UPPER_FROM = 8
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)


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
        RefusalError: ARGUMENT_INVALID, something is no address.
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


def faults(options: LedgerOptions) -> list[str]:
    """What the ledger would refuse, in words."""
    arbiters, quorum = options.arbiters, options.quorum
    found = {
        f"--window {options.window_s} is not in the range from {WINDOW_S_LEAST} to"
        f" {_SECONDS_MAX} seconds": not WINDOW_S_LEAST <= options.window_s <= _SECONDS_MAX,
        f"--unbonding {options.unbonding_s} is not in the range from the window,"
        f" {options.window_s}, to {_SECONDS_MAX} seconds": not options.window_s
        <= options.unbonding_s
        <= _SECONDS_MAX,
        f"--minimum-bond {options.minimum_bond} is more than 2^96 - 1": options.minimum_bond
        > AMOUNT_MAX,
        f"--quorum {quorum} is not in the range from 1 to {min(len(arbiters), _QUORUM_MAX)}, the"
        " number of arbiters": not 1 <= quorum <= min(len(arbiters), _QUORUM_MAX),
        "an --arbiter is named twice": len(set(arbiters)) < len(arbiters),
        "an --arbiter is nobody (0x0): it can sign nothing": NOBODY in arbiters,
        "the --treasury is nobody (0x0)": options.treasury == NOBODY,
    }
    return [words for words, is_so in found.items() if is_so]


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


def address_of(text: str, what: str) -> Address:
    """An address as people write it; where its letters differ in case they are its checksum.

    Raises:
        RefusalError: ARGUMENT_INVALID, it is none, or mistyped.
    """
    if not _ADDRESS.fullmatch(text):
        detail = f"{what} {text!r} is no address: 0x and 40 hex digits"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail)
    digits = text[2:]
    is_mixed = digits not in {digits.lower(), digits.upper()}
    if is_mixed and digits != _with_checksum(digits.lower()):
        detail = f"{what} {text} is mistyped: its capital letters do not fit it (EIP-55)"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix="copy it once more")
    return Address(text.lower())


def _with_checksum(digits: str) -> str:
    """EIP-55: a letter is a capital where the hash of the digits has 8 or more."""
    told = keccak(digits.encode()).hex()
    return "".join(
        each.upper() if int(mark, 16) >= _UPPER_FROM else each
        for each, mark in zip(digits, told, strict=False)
    )
