"""What a ledger or its token says when it refuses, in words, and what to do about it."""

from collections.abc import Mapping
from typing import Any

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.moments import moment
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.refusal import Reason, RefusalError

_TIMES = frozenset({"until", "releaseAt", "endedAt", "closedAt"})
_OTHER_KEY = "use the key that it is of: --state-dir for a node's, --data-dir for a coordinator's"
_ALREADY = "nothing is to be done: see hypergpu ledger show"
_OTHER_VERSION = "name a ledger of this version; this one asks for what is not sent from here"
_ARBITERS = "ask the ledger's arbiters"
_NO_TOKEN = "send {sender} what it lacks of the ledger's token, then run it again"
FIXES: Mapping[str, str] = {
    "AlreadyRegistered": "add to its stake: hypergpu ledger stake AMOUNT",
    "AlreadyRequested": "wait until the job's end, then run it again",
    "AlreadyRetired": _ALREADY,
    "AlreadySwept": _ALREADY,
    "BadArbiter": _ARBITERS,
    "BadOptions": "deploy it with other options: see contracts/README.md",
    "BadPacking": _OTHER_VERSION,
    "BadSignature": "have it signed by {signer} for this very ledger: see hypergpu node wallet",
    "BadTerms": "correct the job file's [pay]",
    "BadTotals": _OTHER_VERSION,
    "BondMissing": "post {required}, of which {posted} is there: hypergpu ledger bond",
    "ClaimPending": "run it again from {releaseAt} on",
    "EnforcedPause": "wait until the guardian ends the pause; what is due is paid in it too",
    "EpochIsClosed": "run it again: it takes the next open epoch",
    "EpochIsOpen": "wait until it is closed, or redeem the voucher: hypergpu ledger claim",
    "ExpectedPause": _ALREADY,
    "FieldIsFull": "take a smaller amount: the ledger has no room for it",
    "JobEnded": "redeem what was signed before {endedAt}: hypergpu ledger claim",
    "JobExists": _ALREADY,
    "JobNotEnded": "announce its end first: hypergpu ledger reclaim JOB",
    "JobsRunning": "take back the escrow of each of its jobs first: hypergpu ledger reclaim JOB",
    "LimitNotRaised": "name a limit above the one it has",
    "NoEquivocation": "ask for another bundle: this one shows no two receipts of one number",
    "NoQuorum": _ARBITERS,
    "NodeIsBarred": "ask the ledger's arbiters why: only shares of epochs are paid from now on",
    "NodesMissing": _OTHER_VERSION,
    "NotAscending": _OTHER_VERSION,
    "NotCoordinator": _OTHER_KEY,
    "NotGuardian": _OTHER_KEY,
    "NotNext": "begin with receipt {counted}: enforce the bundle of the epoch before it first",
    "NotNode": _OTHER_KEY,
    "NotOwner": _OTHER_KEY,
    "NotRegistered": "register it first: hypergpu ledger register",
    "NothingDue": "nothing is to be done: all that was promised is paid or pending",
    "NothingToVoid": _ALREADY,
    "NothingToWithdraw": "nothing is to be done: nothing waits for this key",
    "QualityOutOfRange": _OTHER_VERSION,
    "ReentrancyGuardReentrantCall": "do not use this token: it calls the ledger back",
    "SafeCastOverflowedUintDowncast": "take a smaller amount: the ledger has {bits} bits for it",
    "SafeERC20FailedOperation": "ask who runs the token {token} why it refuses this transfer",
    "SpendLimitExceeded": "wait for the next challenge window: {spendable} may be reserved in this",
    "StakeLocked": "ask for at most {available}; what payments lock is free after their window",
    "StringTooLong": _OTHER_VERSION,
    "TooEarly": "run it again from {until} on",
    "TooManyNodes": "name at most {most}",
    "TransferShort": "use a ledger whose token takes no fee",
    "UnknownJob": "name a job that is open on this ledger, and the ledger that it is open on",
    "WindowOver": "nothing is to be done: it was over on {closedAt}",
    "WrongSequence": "nothing is to be done: it is recorded",
    "ERC20InsufficientAllowance": "run it again: something else used the allowance up",
    "ERC20InsufficientBalance": _NO_TOKEN,
    "ERC20InvalidApprover": _OTHER_KEY,
    "ERC20InvalidReceiver": "name another address: --to ADDRESS",
    "ERC20InvalidSender": _OTHER_KEY,
    "ERC20InvalidSpender": "name the ledger's own address",
}
"""By the name that the ABI gives the error. Its values may be in it."""


def refusal(calls: LedgerCalls, what: str, refused: RpcRefusedError) -> RefusalError:
    """A revert as this program's own refusal: which error, its values, and what mends it.

    Args:
        calls: Of the ledger.
        what: Was asked for.
        refused: By the RPC.
    """
    told = calls.abi.failure(refused.words) or calls.token.failure(refused.words)
    if told is None:
        detail = f"the ledger refuses {what}: {refused.message}"
        fix = "see that it is the ledger and the chain that were meant"
        return RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    name, values = told
    texts = {each: _text(each, value) for each, value in values.items()}
    shown = ", ".join(f"{each} {text}" for each, text in texts.items())
    detail = f"the ledger refuses {what}: {name}({shown})"
    fix = FIXES.get(name, "see docs/pay/settling.md").format_map(texts)
    return RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    return moment(value) if name in _TIMES and isinstance(value, int) else str(value)
