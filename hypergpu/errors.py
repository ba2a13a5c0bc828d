"""The errors that processes report to each other and to people, each with a number and its fix.

A number never changes its meaning: scripts may rely on it.
"""

from enum import Enum

_OWNER = "its owner may change that in node.toml there; else give the work to other nodes"
_NEW_TOKEN = "ask for a new token: hypergpu token create"


class Reason(Enum):
    """Why something failed or was rejected: a number, the gRPC status code's name, and the fix."""

    def __init__(self, number: int, status: str, fix: str) -> None:
        self.number = number
        self.status = status
        self.fix = fix

    # 1xxx: who you are
    VERSION_MISMATCH = 1001, "FAILED_PRECONDITION", "upgrade the older side"
    TOKEN_INVALID = 1101, "UNAUTHENTICATED", _NEW_TOKEN
    TOKEN_EXPIRED = 1102, "UNAUTHENTICATED", _NEW_TOKEN
    TOKEN_REVOKED = 1103, "UNAUTHENTICATED", _NEW_TOKEN
    TOKEN_USED_UP = 1104, "UNAUTHENTICATED", _NEW_TOKEN
    ROLE_FORBIDDEN = 1105, "PERMISSION_DENIED", "use a token of the role that is named"
    AUTHORITY_MISMATCH = (
        1106,
        "UNAUTHENTICATED",
        "the address answers with another CA: take a fresh join line from the operator",
    )
    NODE_REVOKED = 1107, "PERMISSION_DENIED", "ask the operator to admit the node again"
    SIGNATURE_INVALID = 1108, "UNAUTHENTICATED", "the node's identity key does not match its id"
    RATE_LIMITED = 1109, "RESOURCE_EXHAUSTED", "wait and try again"
    LIMIT_REACHED = 1110, "RESOURCE_EXHAUSTED", "end some of them first"
    # 2xxx: jobs
    JOB_UNKNOWN = 2001, "NOT_FOUND", "list the jobs: hypergpu job ls"
    SPEC_INVALID = 2002, "INVALID_ARGUMENT", "change that setting: docs/jobs.md has all of them"
    JOB_PHASE = 2003, "FAILED_PRECONDITION", "see its phase: hypergpu job show"
    WORKLOAD_UNKNOWN = 2004, "INVALID_ARGUMENT", "list the workloads: hypergpu env"
    TORCH_MISSING = (
        2005,
        "FAILED_PRECONDITION",
        "install it where the coordinator runs: pip install 'hypergpu[torch]'",
    )
    MODEL_MISSING = 2006, "FAILED_PRECONDITION", "wait for the job's first model"
    EVALUATOR_LIMIT = (
        2007,
        "RESOURCE_EXHAUSTED",
        "raise the evaluators' limits where the coordinator runs: docs/scale.md",
    )
    PROGRAM_FAILED = 2008, "INVALID_ARGUMENT", "mend the workload's code, and submit the job again"
    NODES_MISSING = 2009, "FAILED_PRECONDITION", "connect nodes: hypergpu join"
    # 3xxx: updates
    UPDATE_TOO_LARGE = 3001, "INVALID_ARGUMENT", "the size must be the one the job's codec gives"
    NONCE_REPLAYED = 3002, "ALREADY_EXISTS", "use a nonce above the last one"
    LEASE_STALE = 3003, "FAILED_PRECONDITION", "drop the work: its lease is no longer current"
    UPDATE_LATE = (
        3004,
        "FAILED_PRECONDITION",
        "its round is closed: return it to the error feedback",
    )
    DIGEST_MISMATCH = 3005, "DATA_LOSS", "send the bytes again from offset 0"
    OFFSET_MISMATCH = 3006, "OUT_OF_RANGE", "go on at the committed offset"
    UPDATE_MALFORMED = 3007, "INVALID_ARGUMENT", "encode it with the job's codec and layout"
    UPDATE_NOT_FINITE = (
        3008,
        "INVALID_ARGUMENT",
        "remove NaN and huge values from the data; lower the learning rate if losses rose before",
    )
    EPOCH_CLOSED = 3009, "FAILED_PRECONDITION", "offer it again, signed for the epoch that is open"
    # 4xxx: data and storage
    BLOB_UNKNOWN = 4001, "NOT_FOUND", "it was collected, or never sent"
    DISK_FULL = 4002, "RESOURCE_EXHAUSTED", "free disk space, raise the quota or remove ended jobs"
    MANIFEST_INVALID = 4003, "INVALID_ARGUMENT", "send every file the manifest names"
    JOURNAL_DAMAGED = (
        4004,
        "DATA_LOSS",
        "its older events are lost; watch from a later sequence number",
    )
    STORE_UNREACHABLE = (
        4005,
        "UNAVAILABLE",
        "see what the object store says where the coordinator runs: hypergpu doctor",
    )
    # 5xxx: the coordinator itself
    NOT_READY = 5001, "UNAVAILABLE", "the coordinator is starting or stopping: try again"
    NODE_UNKNOWN = 5002, "NOT_FOUND", "list the nodes: hypergpu node ls"
    TOKEN_UNKNOWN = 5003, "NOT_FOUND", "list the tokens: hypergpu token ls"
    REQUEST_INVALID = (
        5004,
        "INVALID_ARGUMENT",
        "send what docs/feed.md and the schemas in proto/ describe",
    )
    COORDINATOR_UNREACHABLE = (
        5005,
        "UNAVAILABLE",
        "start it where it belongs: hypergpu up; or correct the address and port",
    )
    STREAM_SILENT = (
        5006,
        "DEADLINE_EXCEEDED",
        "send each message within the time; go on where it broke off",
    )
    ADDRESS_UNUSABLE = (
        5007,
        "FAILED_PRECONDITION",
        "choose another: --listen, --port, --node-port, --bulk-port, --advertise",
    )
    FOLDER_UNUSABLE = (
        5008,
        "FAILED_PRECONDITION",
        "choose another folder: --data-dir FOLDER",
    )
    # 6xxx: the command line itself
    COORDINATOR_UNNAMED = (
        6001,
        "FAILED_PRECONDITION",
        "start one here with: hypergpu up, or name a token: --token-file FILE",
    )
    ARGUMENT_INVALID = 6002, "INVALID_ARGUMENT", "see the command's --help"
    FILE_UNUSABLE = (
        6003,
        "FAILED_PRECONDITION",
        "check the path, its permissions, and that the file is whole",
    )
    CHILD_ENDED = 6004, "INTERNAL", "read what it printed above, or its log"
    MACHINE_UNFIT = 6005, "FAILED_PRECONDITION", "apply the fix of each failed check"
    DEMO_MISSED = 6006, "INTERNAL", "read the logs in the demo's output folder"
    CALL_BROKEN = 6007, "INTERNAL", "read the coordinator's log and try again"
    JOB_UNSUCCESSFUL = 6008, "ABORTED", "see why: hypergpu job show"
    FILE_PRESENT = (
        6009,
        "ALREADY_EXISTS",
        "choose another folder: --out FOLDER; or replace it: --overwrite",
    )
    NETWORK_REFUSED = (
        6010,
        "FAILED_PRECONDITION",
        "see what this machine can do: hypergpu netsim check --help",
    )
    WORKLOAD_UNFIT = 6011, "FAILED_PRECONDITION", "apply the fix of the step that failed"
    FORWARDING_FAILED = 6012, "UNAVAILABLE", "see what it says: ssh -v USER@HOST"
    # 7xxx: the node itself
    NODE_NOT_JOINED = (
        7001,
        "FAILED_PRECONDITION",
        "join first: hypergpu-node join --token-file FILE",
    )
    STATE_LOCKED = (
        7002,
        "FAILED_PRECONDITION",
        "see it: hypergpu status; stop it, or give another folder: --state-dir FOLDER",
    )
    WORKER_UNUSABLE = (
        7003,
        "FAILED_PRECONDITION",
        "for torch: pip install 'hypergpu[torch]'; else read the log",
    )
    NODE_STOPPED = 7004, "FAILED_PRECONDITION", "start it again: hypergpu join"
    # 71xx: limits that the node's owner set
    OWNER_COORDINATOR = 7101, "FAILED_PRECONDITION", _OWNER
    OWNER_WORKLOAD = 7102, "FAILED_PRECONDITION", _OWNER
    OWNER_DISK = 7103, "FAILED_PRECONDITION", _OWNER
    OWNER_MEMORY = 7104, "FAILED_PRECONDITION", _OWNER
    OWNER_HOURS = 7105, "FAILED_PRECONDITION", "it works again by itself at its hours"
    OWNER_BUSY = 7106, "FAILED_PRECONDITION", "it works again by itself once the machine is idle"
    OWNER_POWER = 7107, "FAILED_PRECONDITION", "lower it there: sudo nvidia-smi -pl WATTS"
    OWNER_DATA = (
        7108,
        "FAILED_PRECONDITION",
        "its owner names a folder under [data] in node.toml there, and mends what is said of it",
    )
    OWNER_KIND = 7109, "FAILED_PRECONDITION", "its owner adds the kind to node.toml there"
    OWNER_SPEC = 7110, "FAILED_PRECONDITION", "its owner names the user's key in node.toml there"
    # 8xxx: the chain
    CHAIN_UNREACHABLE = 8001, "UNAVAILABLE", "start the chain, or correct the address of its RPC"
    CHAIN_WRONG = 8002, "FAILED_PRECONDITION", "name an RPC of the chain that is meant"
    LEDGER_WRONG = (
        8003,
        "FAILED_PRECONDITION",
        "name a ledger of this version, or let one be deployed",
    )
    SENDING_HALTED = (
        8005,
        "ABORTED",
        "mend what made the transaction fail, then start once with: hypergpu up --retry-payments",
    )
    ESCROW_SHORT = (
        8006,
        "FAILED_PRECONDITION",
        "raise the job's escrow: hypergpu job set pay.escrow=AMOUNT",
    )

    @property
    def exit_code(self) -> int:
        """Process exit status of a command that fails for this reason; 2 means wrong usage."""
        if self is Reason.ARGUMENT_INVALID:
            return 2
        return 10 + self.number // 1000

    @property
    def is_owner_limit(self) -> bool:
        """Whether a limit that the node's owner set is the reason."""
        return self.number // 100 == 71


class HyperGPUError(Exception):
    """An error with a numbered reason and a fix.

    Args:
        reason: The kind of error.
        detail: What went wrong, with the values.
        fix: What the reader should do, where it is known better than the reason's own fix.
        wait_ms: When to try again, from now on; 0: that is the caller's to choose.
    """

    def __init__(self, reason: Reason, detail: str, *, fix: str = "", wait_ms: int = 0) -> None:
        self.fix = fix or reason.fix
        self.wait_ms = wait_ms
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason.name} ({reason.number}): {self.message}")

    @property
    def message(self) -> str:
        """The error and its fix for people, without name and number."""
        if "Fix: " in self.detail:
            return self.detail
        return f"{self.detail}. Fix: {self.fix}"


class RemoteFailureError(Exception):
    """A numbered error of a coordinator that knows reasons this program does not."""

    def __init__(self, *, number: int, detail: str, fix: str) -> None:
        super().__init__(f"{number}: {detail}. Fix: {fix}")
        self.number = number
        self.detail = detail
        self.fix = fix

    @property
    def exit_code(self) -> int:
        """Exit status by the rule of `Reason.exit_code`."""
        return 10 + self.number // 1000


_PACKAGES = {
    "chain": ("eth_abi", "eth_account", "eth_utils", "hexbytes", "urllib3", "web3"),
    "farm": ("sentence_transformers",),
    "hf": ("huggingface_hub", "jinja2", "peft", "tokenizers", "transformers"),
    "lm-eval": ("lm_eval",),
    "mlflow": ("mlflow",),
    "parquet": ("pyarrow",),
    "postgresql": ("psycopg",),
    "ray": ("ray",),
    "redis": ("redis",),
    "s3": ("boto3", "botocore", "s3transfer"),
    "tensorboard": ("tensorboard",),
    "torch": ("PIL", "torch", "torchvision"),
    "wandb": ("wandb",),
}


def missing_extra(missing: ModuleNotFoundError) -> HyperGPUError | None:
    """The error that names the extra to install; None: the package belongs to none of them."""
    package = (missing.name or "").partition(".")[0]
    for extra, packages in _PACKAGES.items():
        if package in packages:
            detail = f"this needs the package {package}, which is not installed"
            fix = f"install the extra: pip install 'hypergpu[{extra}]'"
            return HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
    return None
