"""One account on one ledger, for as long as a command runs: its key, its receipts, what it sends.

Keys and receipts lie in this machine's folders. A coordinator's key belongs to its queue
(`payments.shell.transactions`): two senders would spend the same nonce on different transactions.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from eth_account import Account
from eth_utils.address import to_checksum_address
from web3.exceptions import ContractLogicError, TimeExhausted, Web3RPCError
from web3.middleware import SignAndSendRawMiddlewareBuilder

from hypergpu.client.settings import resolve_settings
from hypergpu.crypto import IdentityKey
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.keys import passphrase_beside, passphrase_of_file, stored_secret
from hypergpu.node_report import DEVICE_FOLDERS
from hypergpu.statements import (
    Domain,
    JobTerms,
    SignedReceipt,
    Terms,
    address_bytes,
    receipt_fault,
    word_bytes,
)
from hypergpu.terminal.output import amount_text
from payments.cli.show import LedgerAct
from payments.core.transactions import TotalsEntry
from payments.core.verify import BatchRecord, LedgerRecords, SingleRecord
from payments.shell.chains import ChainProfile, check_url, profile_of_id
from payments.shell.ethereum import (
    ChainBlock,
    Contract,
    ContractView,
    Ethereum,
    ledger_contract,
    token_contract,
)
from payments.shell.ledger_choice import check_chain, recognise_ledger
from payments.shell.ledger_reader import JobReader, job_on_ledger

_GAS_PERCENT = 130
"""Share of the estimated gas: state may change between the estimate and the block."""
_LOOK_EACH_S = 0.2
_WITHIN_S = 180.0


class ContractCall(NamedTuple):
    """A call that an account wants to make."""

    contract: Contract
    address: Address | None
    """None: the contract is created."""
    data: bytes


class Wallet:
    """One key on one chain."""

    def __init__(self, chain: Ethereum, key: IdentityKey) -> None:
        self.address = key.address
        self._chain = chain
        if key.address not in chain.web3.middleware_onion:
            signing = SignAndSendRawMiddlewareBuilder.build(Account.from_key(key.secret))
            chain.web3.middleware_onion.inject(signing, name=key.address, layer=0)

    async def send(self, call: ContractCall) -> int:
        """Make a call; the height of the block that has it.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, the account has no gas money; REQUEST_INVALID, a
                contract refuses a call, with its reason;
                CHAIN_UNREACHABLE, a transaction is in no block after three minutes.
            ChainUnreachableError: The RPC does not answer.
        """
        if not await self._chain.balance_wei(self.address):
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID,
                f"{self.address} has no gas money on chain {await self._chain.chain_id()}",
                fix="send it some of the chain's coin",
            )
        wanted: Any = {"from": to_checksum_address(self.address), "data": call.data}
        if call.address is not None:
            wanted["to"] = to_checksum_address(call.address)
        try:
            with self._chain.guard():
                return await self._send(wanted)
        except ContractLogicError as refused:
            revert = bytes.fromhex(str(refused.data or "0x")[2:])
            words = call.contract.describe_error(revert) if revert else str(refused)
            detail = f"the contract would refuse this: {words}"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail) from None

    async def _send(self, wanted: Any) -> int:
        eth = self._chain.web3.eth
        wanted["gas"] = await eth.estimate_gas(wanted) * _GAS_PERCENT // 100
        sent = await eth.send_transaction(wanted)
        try:
            mined = await eth.wait_for_transaction_receipt(sent, _WITHIN_S, _LOOK_EACH_S)
        except TimeExhausted:
            raise HyperGPUError(
                Reason.CHAIN_UNREACHABLE,
                f"0x{sent.hex()} is in no block after {_WITHIN_S:.0f} s; it may still be taken",
                fix="look it up on the chain before you try again",
            ) from None
        if not mined["status"]:
            detail = f"0x{sent.hex()} failed: the ledger changed before it was in a block"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        return int(mined["blockNumber"])


class OpenLedger:
    """A ledger that commands read, at one block unless it is refreshed."""

    def __init__(self, chain: Ethereum, domain: Domain, token: Address, block: ChainBlock) -> None:
        self.chain, self.domain, self.token, self.block = chain, domain, token, block
        self.decimals = 0

    async def refresh(self) -> None:
        """Read from the newest block on."""
        self.block = await self.chain.head()

    async def read(self, function: str, *arguments: object) -> Any:
        """One view of the ledger."""
        found = await self.read_or_none(function, *arguments)
        if found is None:
            raise HyperGPUError(Reason.REQUEST_INVALID, f"the ledger refuses {function}")
        return found

    async def read_or_none(self, function: str, *arguments: object) -> Any:
        """One view of the ledger; None where the ledger refuses it."""
        view = ContractView(ledger_contract(), self.domain.contract, function, arguments)
        (found,) = await self.chain.read([view], self.block)
        return found

    async def token_number(self, function: str, *arguments: object) -> int:
        """A number that the token answers; 0 where it has no such view."""
        view = ContractView(token_contract(), self.token, function, arguments)
        (found,) = await self.chain.read([view], self.block)
        return int(found or 0)

    def amount(self, units: int) -> str:
        """An amount for people."""
        return amount_text(units, self.decimals)


class LedgerAccount:
    """An account that acts on a ledger, and what it did so far."""

    def __init__(self, ledger: OpenLedger, key: IdentityKey) -> None:
        self.ledger, self.address = ledger, key.address
        self._wallet = Wallet(ledger.chain, key)
        self._blocks: list[int] = []
        self.done: list[str] = []
        self.amounts: dict[str, str] = {}
        self.again_at_s: list[int] = []

    async def act(self, function: str, *arguments: object) -> None:
        """Have the ledger carry out a call; what is read afterwards is after it."""
        calldata = ledger_contract().encode(function, *arguments)
        await self._send(ContractCall(ledger_contract(), self.ledger.domain.contract, calldata))

    async def approve(self, amount: int) -> None:
        """Let the ledger take an amount of the token."""
        balance = await self.ledger.token_number("balanceOf", self.address)
        if balance < amount:
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID,
                f"{self.address} has {self.ledger.amount(balance)} of the token"
                f" {self.ledger.token}, not {self.ledger.amount(amount)}",
                fix="send the token to this account, or name a smaller amount",
            )
        calldata = token_contract().encode("approve", self.ledger.domain.contract, amount)
        await self._send(ContractCall(token_contract(), self.ledger.token, calldata))

    def result(self) -> LedgerAct:
        """Everything that was done."""
        return LedgerAct(
            account=self.address,
            chain_id=self.ledger.domain.chain_id,
            ledger=self.ledger.domain.contract,
            blocks=self._blocks,
            done=self.done,
            amounts=self.amounts,
            again_at_unix_s=min(self.again_at_s, default=0),
        )

    async def _send(self, call: ContractCall) -> None:
        self._blocks.append(await self._wallet.send(call))
        await self.ledger.refresh()


@asynccontextmanager
async def open_ledger(domain: Domain, chain_url: str) -> AsyncIterator[OpenLedger]:
    """Connect to a ledger, and see that it is one.

    Args:
        domain: The ledger.
        chain_url: RPC of its chain; empty: the profile's own, or the setting ``chain_url``.
    """
    profile, _ = profile_of_id(domain.chain_id)
    chain = Ethereum(rpc_url(profile, chain_url), profile)
    try:
        await check_chain(chain, profile)
        target = await recognise_ledger(chain, domain)
        ledger = OpenLedger(chain, domain, target.token, await chain.head())
        ledger.decimals = await ledger.token_number("decimals")
        yield ledger
    finally:
        await chain.close()


@asynccontextmanager
async def open_account(
    domain: Domain, chain_url: str, key: IdentityKey
) -> AsyncIterator[LedgerAccount]:
    """Connect an account to a ledger; raises as `open_ledger`."""
    async with open_ledger(domain, chain_url) as ledger:
        yield LedgerAccount(ledger, key)


def rpc_url(profile: ChainProfile, given: str) -> str:
    """Address of the RPC to ask."""
    url = given or profile.rpc_url or resolve_settings()["chain_url"].value
    if not url:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"no RPC of chain {profile.chain_id} is known here",
            fix="name one: --chain-url URL; hypergpu ledger show says which the coordinator uses",
        )
    check_url(url)
    return url


def account_address(text: str, option: str) -> Address:
    """An address that a person typed."""
    lowered = text.strip().lower()
    try:
        address_bytes(Address(lowered))
    except ValueError as wrong:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{option}: {wrong}") from wrong
    return Address(lowered)


NODE_KEY = Path("identity.key")
COORDINATOR_KEY = Path("identity/coordinator.key")
Content = TypeVar("Content")


class WorkerFacts(msgspec.Struct, frozen=True):
    """File ``worker.json`` of a node, as far as the ledger states it."""

    device: str
    memory_bytes: int


class HeldJob(NamedTuple):
    """A job whose receipts a node holds."""

    job_id: JobId
    terms: Terms
    newest: SignedReceipt | None


def folder_named(setting: str, given: Path | None) -> Path:
    """A folder by the command's option, else by the settings: ``state_dir`` or ``data_dir``."""
    settings = resolve_settings({setting: str(given) if given else None})
    return Path(settings[setting].value).expanduser()


def device_folders(machine: Path) -> list[Path]:
    """Folders of the nodes of a machine's further devices, each with a key of its own."""
    return sorted(key.parent for key in machine.glob(f"{DEVICE_FOLDERS}/{NODE_KEY}"))


def _folder_with_passphrase(folder: Path) -> Path:
    """The folder beside which a key's passphrase lies: a machine's for all of its devices."""
    machine = folder.absolute().parent
    is_device = folder.absolute() in device_folders(machine) and (machine / NODE_KEY).exists()
    return machine if is_device else folder


def open_key(folder: Path, key: Path, passphrase_file: Path | None) -> IdentityKey:
    """The key in a daemon's folder."""
    path = folder / key
    if not path.exists():
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"there is no key {path}",
            fix="name the folder: --state-dir of a node, --data-dir of a coordinator",
        )
    if passphrase_file:
        passphrase = passphrase_of_file(passphrase_file)
    else:
        passphrase = passphrase_beside(_folder_with_passphrase(folder), path)
    return IdentityKey(stored_secret(path, passphrase))


def open_keystore(path: Path, passphrase_file: Path) -> IdentityKey:
    """The key in a keystore file of its own, as wallets export it."""
    if not path.exists():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"there is no key {path}")
    return IdentityKey(stored_secret(path, passphrase_of_file(passphrase_file)))


def held_jobs(state_dir: Path, job: str | None) -> list[HeldJob]:
    """Jobs of a node that a ledger pays, in order of their ids.

    Args:
        state_dir: The node's folder.
        job: Id of one, or its beginning; None: all.
    """
    root = state_dir / "ledger"
    found = [_held_job(folder) for folder in sorted(root.glob("*")) if folder.is_dir()]
    meant = [
        held
        for held in found
        if held and (job is None or held.job_id.startswith(job) or held.job_id[4:].startswith(job))
    ]
    on_ledger = [held for held in meant if held.terms.domain.chain_id]
    if on_ledger and (job is None or len({held.job_id for held in on_ledger}) == 1):
        return sorted(on_ledger, key=lambda held: held.job_id)
    named = f"{job!r}" if job else "that a ledger pays"
    jobs = ", ".join(held.job_id for held in found if held) or "none"
    detail = f"no one job {named} in {root}; its jobs: {jobs}"
    if meant and not on_ledger:
        detail = f"{meant[0].job_id} is signed for no chain: no ledger pays it"
    raise HyperGPUError(
        Reason.JOB_UNKNOWN, detail, fix="name a job of this node, or its folder: --state-dir FOLDER"
    )


def one_ledger(held: list[HeldJob]) -> Domain:
    """The ledger that all of these jobs are signed for."""
    domains = sorted({each.terms.domain for each in held}, key=lambda domain: domain.contract)
    if len(domains) == 1:
        return domains[0]
    shown = ", ".join(f"{each.contract} on chain {each.chain_id}" for each in domains)
    raise HyperGPUError(
        Reason.ARGUMENT_INVALID,
        f"this node works for several ledgers: {shown}",
        fix="name a job of the one that is meant: hypergpu ledger COMMAND --job JOB",
    )


def worker_facts(state_dir: Path) -> tuple[WorkerFacts, bytes]:
    """What the node's worker said of its device, and the file's bytes."""
    path = state_dir / "worker.json"
    facts = _read(path, WorkerFacts)
    if facts is None:
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"there is no {path}: what the node can do is not known yet",
            fix="let the node join once: hypergpu join; or name its folder: --state-dir FOLDER",
        )
    return facts, path.read_bytes()


def _held_job(folder: Path) -> HeldJob | None:
    terms = _read(folder / "terms.json", JobTerms)
    if terms is None:
        return None
    newest = _read(folder / "newest.json", SignedReceipt)
    if newest and (fault := receipt_fault(newest, terms.terms.domain, terms.terms.coordinator)):
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"the receipt in {folder}: {fault}")
    return HeldJob(terms.job_id, terms.terms, newest)


def _read(path: Path, kind: type[Content]) -> Content | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as broken:
        detail = f"{path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
        detail = f"{path} is damaged: {broken}"
        fix = "the node puts it aside when it starts, and its coordinator sends it again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from broken


_SPAN_MOST = 10_000
"""Blocks of one request: what public RPCs commonly allow."""


async def read_records(ledger: OpenLedger, terms: Terms) -> LedgerRecords:
    """Read a job's records at the ledger's block."""
    found = await ledger.read_or_none("getJob", word_bytes(terms.job))
    if found is None:
        raise HyperGPUError(
            Reason.JOB_UNKNOWN,
            f"the job is not on the ledger {ledger.domain.contract}",
            fix="its coordinator opens it when it has the escrow: hypergpu ledger show JOB",
        )
    with ledger.chain.guard():
        records = await _RecordSearch(ledger, terms).records()
    nodes = sorted({entry.node for each in records for entry in each.entries})
    epochs = sorted({each.epoch for each in records})
    reader = JobReader(ledger.chain, ledger.domain.contract, terms.job, ledger.block)
    window_s = await ledger.read("CHALLENGE_WINDOW")
    view = job_on_ledger(found, ledger.block, window_s)._replace(
        accounts=await reader.accounts(nodes), epochs=await reader.epochs(epochs, nodes)
    )
    return LedgerRecords(ledger.block.number, view, records)


class _RecordSearch:
    """Finds a job's events, and the calls that they are of."""

    def __init__(self, ledger: OpenLedger, terms: Terms) -> None:
        self._block = ledger.block.number
        self._eth = ledger.chain.web3.eth
        address = to_checksum_address(ledger.domain.contract)
        self._contract = self._eth.contract(address=address, abi=ledger_contract().abi)
        events = self._contract.events
        self._opened, self._batch = events.JobOpened(), events.BatchRecorded()
        self._single = events.ContributionRecorded()
        topics = [each.topic for each in (self._opened, self._batch, self._single)]
        self._filter = {"address": address, "topics": [topics, "0x" + terms.job]}

    async def records(self) -> list[BatchRecord | SingleRecord]:
        """The job's records in the chain's order: searched backwards to the job's opening."""
        last, span = self._block, _SPAN_MOST
        found: list[Any] = []
        while last >= 0 and not (found and _topic(found[0]) == self._opened.topic):
            first = max(0, last - span + 1)
            wanted: Any = {**self._filter, "fromBlock": first, "toBlock": last}
            try:
                found[:0] = await self._eth.get_logs(wanted)
            except Web3RPCError:
                if span == 1:
                    raise
                span = max(1, span // 4)
                continue
            last = first - 1
        return [await self._record(each) for each in found if _topic(each) != self._opened.topic]

    async def _record(self, log: Any) -> BatchRecord | SingleRecord:
        """A record from its event; the entries of a batch are in its call."""
        if _topic(log) == self._single.topic:
            single = self._single.process_log(log)["args"]
            node = NodeId(single["node"].lower())
            entry = TotalsEntry(node, single["sequence"] + 1, single["totalScore"])
            return SingleRecord(single["epoch"], entry)
        batch = self._batch.process_log(log)["args"]
        sent = await self._eth.get_transaction(log["transactionHash"])
        _, call = self._contract.decode_function_input(sent["input"])
        entries = tuple(TotalsEntry.from_word(word) for word in call["entries"])
        return BatchRecord(batch["epoch"], batch["seq"], batch["root"], entries)


def _topic(log: Any) -> str:
    return "0x" + bytes(log["topics"][0]).hex()
