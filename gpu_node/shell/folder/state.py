"""The node's state on disk: its folder's paths, its keys, memory, nonces and joined coordinator."""

import fcntl
import os
import shutil
import socket
import ssl
from collections.abc import Container
from pathlib import Path
from typing import Self, TypeVar

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpu_node.core.memory import Memory
from gpu_node.shell.worker.protocol import RESULT_FILE, WorkerCapabilities, result_file
from hypergpu.assignment import Lease
from hypergpu.clock import unix_ms
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, JobKey, NodeId
from hypergpu.keys import Passphrase, passphrase_beside, stored_secret
from hypergpu.ledger_terms import word_bytes
from hypergpu.node_report import REPORT_FILE
from hypergpu.privacy import require_private_folder


class StatePaths:
    """The state folder. Holding it open is holding its lock: two daemons never share one."""

    def __init__(self, root: Path, *, machine: Path | None = None) -> None:
        self.root = root = root.absolute()  # The worker runs in a folder of its own.
        self.machine = (machine or root).absolute()
        """The folder of the machine's first node, around those of its other devices' nodes."""
        self.identity = root / "identity.key"
        self.tls_key = root / "tls.key"
        self.certificate = root / "tls.crt"
        self.authority = root / "authority.crt"
        self.coordinator = root / "coordinator.json"
        self.memory = root / "memory.json"
        self.worker = root / "worker.json"
        self.name = root / "name"
        self.nonce = root / "nonce"
        self.report = root / REPORT_FILE
        self.log = root / "node.log"
        self.blobs = root / "blobs"
        self.datasets = root / "datasets"
        self.jobs = root / "jobs"
        """A folder for each job, but for the one that is open."""
        self.open_folder = root / "open"
        """Content of the folder of the job that the worker works for: all jobs' that it sees."""
        self.open_name = root / "open-job"
        self.opened: JobId | None = None
        """The job whose folder is open."""
        self.inputs = root / "inputs"
        """Model and data of the work at hand, which the worker reads."""
        self.scratch = root / "scratch"
        """The worker's home and temporary files."""
        self.ledger = root / "ledger"
        """Receipts, which outlive their jobs: see `gpu_node.shell.folder.receipts`."""
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Make the folder, readable by its owner alone, and lock it.

        Raises:
            HyperGPUError: STATE_LOCKED, another daemon uses it; FILE_UNUSABLE, it cannot be made;
                FOLDER_UNUSABLE, others can change it.
        """
        try:
            require_private_folder(self.root)
            for folder in (self.blobs, self.datasets, self.jobs, *self.of_worker):
                folder.mkdir(exist_ok=True, parents=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(self.lock, flags, 0o600)
        except OSError as error:
            detail = f"the state folder {self.root} cannot be used: {error.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            detail = f"another node daemon uses {self.root}"
            raise HyperGPUError(Reason.STATE_LOCKED, detail) from None
        os.ftruncate(lock, 0)  # Who held it before is gone, maybe without a last word.
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def name_daemon(self) -> None:
        """Say in the lock, which it holds, that this process is a daemon, which SIGTERM drains."""
        self.lock.write_text(f"{os.getpid()}\n", "ascii")

    def daemon(self) -> int | None:
        """Id of the daemon that holds the lock; None: another command does, or it begins yet."""
        text = self.lock.read_text("ascii").removesuffix("\n")
        return int(text) if text.isdecimal() else None

    @property
    def lock(self) -> Path:
        """The file that is locked: it names the daemon that holds it."""
        return self.root / "lock"

    @property
    def spec_keys(self) -> Path:
        """First keys of users: see `gpu_node.shell.owner.signed_work`."""
        return self.root / "spec-keys.json"

    @property
    def second_scratch(self) -> Path:
        """Home and temporary files of a worker that takes turns with one whose are `scratch`."""
        return self.root / "scratch-2"

    @property
    def of_worker(self) -> tuple[Path, ...]:
        """Folders that the worker sees."""
        return (self.scratch, self.second_scratch, self.open_folder, self.inputs)

    def job(self, job_id: JobId) -> Path:
        """The folder of one job's end states and updates."""
        if Path(job_id).name != job_id or job_id in {"", ".", ".."}:
            raise HyperGPUError(Reason.REQUEST_INVALID, f"{job_id[:80]!r} is no job's id")
        return self.open_folder if job_id == self.opened else self.jobs / job_id

    def ledger_of(self, job: JobKey) -> Path:
        """The folder of a job's receipts."""
        return self.ledger / word_bytes(job).hex()

    def update(self, job_id: JobId, round_number: int) -> Path:
        """The update of one round."""
        return self.job(job_id) / f"update-{round_number}"

    def result(self, lease: Lease, digest: Digest) -> Path:
        """A blob that the result of packed work names."""
        return self.job(lease.job_id) / result_file(lease, digest)

    def open_results(self, job_id: JobId, unsent: Lease | None = None) -> Path:
        """The folder of a job's results, without those of earlier work.

        Args:
            job_id: The job.
            unsent: Earlier work whose result stays; None: there is none.
        """
        folder = self.job(job_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept_prefix = "" if unsent is None else f"{RESULT_FILE}{unsent.number}-"
        for path in folder.glob(f"{RESULT_FILE}*"):
            if not kept_prefix or not path.name.startswith(kept_prefix):
                remove_entry(path)
        return folder

    def delete_job(self, job_id: JobId) -> None:
        """Delete the end states and updates of a job."""
        if job_id != self.opened:
            shutil.rmtree(self.job(job_id), ignore_errors=True)
            return
        # The folder itself is what a worker's sandbox shows.
        for path in self.open_folder.iterdir():
            remove_entry(path)

    def delete_other_jobs(self, job_ids: Container[JobId]) -> None:
        """Delete the folders of all other jobs than these."""
        for folder in self.jobs.iterdir():
            if folder.name not in job_ids:
                self.delete_job(JobId(folder.name))

    def delete_unfinished(self, job_id: JobId, kept_rounds: tuple[int, ...]) -> None:
        """Delete end states and updates of a job's other rounds, whose training never finished.

        One of them left in place would push out, as the newer one, the end state that a rollback
        needs.
        """
        folder = self.job(job_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept_names = {f"{kind}-{number}" for kind in ("end", "update") for number in kept_rounds}
        for path in folder.iterdir():
            if path.name.partition(".")[0] not in kept_names:
                remove_entry(path)


def remove_entry(path: Path) -> None:
    """Remove a file, a link or a folder: a worker may have made any of them."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_NONCES_RESERVED = 1000
_Content = TypeVar("_Content", bound=msgspec.Struct)


class JoinedCoordinator(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator that the node dials, from its join."""

    address: str
    """``host:port`` of the listener for nodes."""
    bulk_port: int = 0
    """Port of bulk by HTTP when the node joined; 0: not known. Tickets name the present one."""
    others: tuple[str, ...] = ()
    """Listeners for nodes of other coordinators, which may go on with this one's jobs."""
    is_plaintext: bool = False
    """No TLS, which only loopback allows."""
    certificate_life_s: int = 0
    """Life of the certificate, from when it was written."""


def _load(path: Path, kind: type[_Content], *, fix: str) -> _Content | None:
    """A file's content; None: there is no such file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is damaged: {fix}") from error


def load_memory(paths: StatePaths) -> Memory:
    """The memory; empty on the first start.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged. Forgetting silently could send work
        twice.
    """
    fix = f"delete it with {paths.jobs} to start fresh"
    return _load(paths.memory, Memory, fix=fix) or Memory()


def save_memory(paths: StatePaths, memory: Memory) -> None:
    """Make the memory durable. Blocks."""
    write_durably(paths.memory, msgspec.json.encode(memory))


def load_coordinator(paths: StatePaths) -> JoinedCoordinator | None:
    """The coordinator that the node joined; None before the first join.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged.
    """
    return _load(paths.coordinator, JoinedCoordinator, fix="join again")


def authority_digest(paths: StatePaths) -> str:
    """Digest of the joined coordinator's CA, as join tokens name it; empty without TLS.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file is damaged.
    """
    if not paths.authority.exists():
        return ""
    try:
        return digest_of(ssl.PEM_cert_to_DER_cert(paths.authority.read_text("ascii")))
    except (OSError, ValueError) as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{paths.authority}: {error}") from error


def save_coordinator(paths: StatePaths, coordinator: JoinedCoordinator) -> None:
    """Make the joined coordinator durable. Blocks."""
    write_durably(paths.coordinator, msgspec.json.encode(coordinator))


def node_name(paths: StatePaths, given: str) -> str:
    """The node's name: the given one, which is remembered, else the remembered one. Blocks."""
    if given:
        write_durably(paths.name, given.encode())
        return given
    try:
        return paths.name.read_text("utf-8") or socket.gethostname()
    except (OSError, UnicodeDecodeError):
        return socket.gethostname()


def load_capabilities(paths: StatePaths, kind: str) -> WorkerCapabilities | None:
    """Capabilities of the last worker of this kind; None where they are not known."""
    try:
        capabilities = msgspec.json.decode(paths.worker.read_bytes(), type=WorkerCapabilities)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return capabilities if capabilities.kind == kind else None


def save_capabilities(paths: StatePaths, capabilities: WorkerCapabilities) -> None:
    """Remember the worker's capabilities. Blocks."""
    write_durably(paths.worker, msgspec.json.encode(capabilities))


class NonceCounter:
    """Numbers above every one given before, also by earlier processes.

    They start at the time of day, so that a node whose file is lost is not rejected for ever; then
    they only count up, whatever the clock does. A range is reserved durably before its first number
    is taken, so that most uploads wait for no disk.
    """

    def __init__(self, paths: StatePaths) -> None:
        self._path = paths.nonce
        self._next = 0
        self._reserved_below = 0

    def take(self) -> int:
        """The next number. Blocks when a range is used up."""
        if self._next >= self._reserved_below:
            self._next = max(self._stored_nonce(), unix_ms())
            self._reserved_below = self._next + _NONCES_RESERVED
            write_durably(self._path, str(self._reserved_below).encode())
        nonce, self._next = self._next, self._next + 1
        return nonce

    def _stored_nonce(self) -> int:
        try:
            return int(self._path.read_text("ascii"))
        except (OSError, ValueError):
            return 1


def identity_key(paths: StatePaths, passphrase: Passphrase | None = None) -> IdentityKey:
    """The node's secp256k1 key, made on the first start. It lies there encrypted.

    Args:
        paths: The node's state folder.
        passphrase: The key's; None: one that is made for it and kept next to the state folder, so
            that the daemon starts without anybody's doing and a copy of the folder opens nothing.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key or its passphrase is damaged or missing, the
            passphrase is another one, or others can read either.
    """
    if passphrase is None:
        passphrase = passphrase_beside(paths.root, paths.identity)
    return IdentityKey(stored_secret(paths.identity, passphrase))


def tls_key_pem(paths: StatePaths) -> bytes:
    """The P-256 key of the node's TLS connections, made on the first start. PEM."""
    if not paths.tls_key.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_durably(paths.tls_key, pem)
    return paths.tls_key.read_bytes()


def certificate_request_pem(paths: StatePaths, node: NodeId) -> bytes:
    """A PKCS#10 request for the TLS key, PEM. The name is a courtesy; the issuer sets its own.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the TLS key is damaged.
    """
    try:
        key = serialization.load_pem_private_key(tls_key_pem(paths), password=None)
    except ValueError as error:
        detail = f"the TLS key {paths.tls_key} is damaged: delete it and join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        detail = f"the TLS key {paths.tls_key} is not of P-256: delete it and join again"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)
