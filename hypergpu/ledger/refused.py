"""What it means that a ledger or its token refuses a call: in words, with what mends it."""

from collections.abc import Mapping
from typing import NamedTuple


class Meaning(NamedTuple):
    """Of one error. Its values, and how much is `lacking`, stand in braces."""

    fix: str
    words: str = ""
    """Empty where the name and the values must do."""
    coordinator_fix: str = ""
    """For whoever runs a coordinator that is refused, where that is another than a command's."""
    is_passing: bool = False
    """It ends by itself, or by somebody else's doing: nobody here has to mend anything."""
    difference: tuple[str, str] | None = None
    """Of which two values `lacking` is the difference."""


_OTHER_KEY = "use the key that it is of: --state-dir for a node's, --data-dir for a coordinator's"
_ALREADY = "nothing is to be done: see hypergpu ledger show"
_OTHER_VERSION = "name a ledger of this version; this one asks for what is not sent from here"
_ARBITERS = "ask the ledger's arbiters"
MEANINGS: Mapping[str, Meaning] = {
    "AlreadyRegistered": Meaning("add to its stake: hypergpu ledger stake AMOUNT"),
    "AlreadyRequested": Meaning("wait until the job's end, then run it again"),
    "AlreadyRetired": Meaning(_ALREADY),
    "AlreadySwept": Meaning(_ALREADY),
    "BadArbiter": Meaning(_ARBITERS),
    "BadOptions": Meaning("deploy it with other options: see contracts/README.md"),
    "BadPacking": Meaning(_OTHER_VERSION),
    "BadSignature": Meaning(
        "have it signed by {signer} for this very ledger: see hypergpu node wallet"
    ),
    "BadTerms": Meaning("correct the job file's [pay]"),
    "BadTotals": Meaning(_OTHER_VERSION),
    "BondMissing": Meaning(
        "post {lacking} more: hypergpu ledger bond",
        "the coordinator's bond on the ledger is {posted}, and the ledger asks for {required}",
        difference=("required", "posted"),
    ),
    "ClaimPending": Meaning("run it again from {releaseAt} on"),
    "EnforcedPause": Meaning(
        "what is due is paid in a pause too: wait until the guardian ends it",
        "the ledger's guardian has paused it",
        is_passing=True,
    ),
    "EpochIsClosed": Meaning("run it again: it takes the next open epoch"),
    "EpochIsOpen": Meaning("wait until it is closed, or redeem the voucher: hypergpu ledger claim"),
    "ExpectedPause": Meaning(_ALREADY),
    "FieldIsFull": Meaning("take a smaller amount: the ledger has no room for it"),
    "JobEnded": Meaning(
        "redeem what was signed before {endedAt}: hypergpu ledger claim",
        "the job has ended on the ledger, at {endedAt}",
        coordinator_fix="submit it again as another job",
    ),
    "JobExists": Meaning(
        "submit it again as another job", "the ledger has such a job of this coordinator already"
    ),
    "JobNotEnded": Meaning("announce its end first: hypergpu ledger reclaim JOB"),
    "JobsRunning": Meaning(
        "take back the escrow of each of its jobs first: hypergpu ledger reclaim JOB"
    ),
    "LimitNotRaised": Meaning("name a limit above the one it has"),
    "NoEquivocation": Meaning(
        "ask for another bundle: this one shows no two receipts of one number"
    ),
    "NoQuorum": Meaning(_ARBITERS),
    "NodeIsBarred": Meaning(
        "ask the ledger's arbiters why: only shares of epochs are paid from now on"
    ),
    "NodesMissing": Meaning(_OTHER_VERSION),
    "NotAscending": Meaning(_OTHER_VERSION),
    "NotCoordinator": Meaning(_OTHER_KEY),
    "NotGuardian": Meaning(_OTHER_KEY),
    "NotNext": Meaning(
        "begin with receipt {counted}: enforce the bundle of the epoch before it first"
    ),
    "NotNode": Meaning(_OTHER_KEY),
    "NotOwner": Meaning(_OTHER_KEY),
    "NotRegistered": Meaning("register it first: hypergpu ledger register"),
    "NothingDue": Meaning("nothing is to be done: all that was promised is paid or pending"),
    "NothingToVoid": Meaning(_ALREADY),
    "NothingToWithdraw": Meaning("nothing is to be done: nothing waits for this key"),
    "OwnerNotAllowed": Meaning(
        "have the job's coordinator call the ledger's allowOwner for {owner} first",
        "the coordinator has not allowed {owner} to open jobs on its bond",
    ),
    "QualityOutOfRange": Meaning(_OTHER_VERSION),
    "ReentrancyGuardReentrantCall": Meaning("do not use this token: it calls the ledger back"),
    "SafeCastOverflowedUintDowncast": Meaning(
        "take a smaller amount", "{value} is more than {bits} bits of the ledger hold"
    ),
    "SafeERC20FailedOperation": Meaning(
        "ask who runs the token why it refuses this transfer",
        "the ledger's token {token} refuses to move it",
    ),
    "SpendLimitExceeded": Meaning(
        "wait for the next challenge window: {spendable} may be reserved in this"
    ),
    "StakeLocked": Meaning(
        "ask for at most {available}; what payments lock is free after their window"
    ),
    "StringTooLong": Meaning(_OTHER_VERSION),
    "TooEarly": Meaning("wait until {until}", "it is not due before {until}", is_passing=True),
    "TooManyNodes": Meaning("name at most {most}"),
    "TransferShort": Meaning(
        "use a ledger whose token takes no fee",
        "of {expected} that the ledger's token was to move only {received} arrived, since it takes"
        " a fee",
        coordinator_fix="use a ledger whose token takes none:"
        " HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS",
    ),
    "UnknownJob": Meaning(
        "name a job that is open on this ledger, and the ledger that it is open on"
    ),
    "WindowOver": Meaning("nothing is to be done: it was over on {closedAt}"),
    "WrongSequence": Meaning("nothing is to be done: it is recorded"),
    "ERC20InsufficientAllowance": Meaning("run it again: something else used the allowance up"),
    "ERC20InsufficientBalance": Meaning(
        "send {sender} {lacking} more of the ledger's token",
        "{sender} has {balance} of the ledger's token left, and {needed} are needed",
        difference=("needed", "balance"),
    ),
    "ERC20InvalidApprover": Meaning(_OTHER_KEY),
    "ERC20InvalidReceiver": Meaning("name another address: --to ADDRESS"),
    "ERC20InvalidSender": Meaning(_OTHER_KEY),
    "ERC20InvalidSpender": Meaning("name the ledger's own address"),
}
"""By the name that the ABI gives the error."""


def meaning(name: str, texts: Mapping[str, str]) -> Meaning | None:
    """What an error means, with its values filled in; None: it is none of the ledger's.

    Args:
        name: Of the error.
        texts: Its values for people, by name.
    """
    found = MEANINGS.get(name)
    if found is None:
        return None
    if found.difference is not None:
        most, less = found.difference
        texts = {**texts, "lacking": str(int(texts[most]) - int(texts[less]))}
    return found._replace(
        fix=found.fix.format_map(texts),
        words=found.words.format_map(texts),
        coordinator_fix=found.coordinator_fix.format_map(texts),
    )
