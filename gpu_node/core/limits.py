"""Limits that a node's owner sets, and what they leave to be done. Pure.

A text of the owner is read once, at the start of the daemon; whatever is wrong in it is an error
that names the key.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from gpu_node.core.own_server import OwnServer, own_server
from hypergpu.assignment import FailureCause
from hypergpu.errors import Reason
from hypergpu.farm.map_request import item_kind_of
from hypergpu.ids import is_data_name
from hypergpu.jobfile.requirements import LABELS_MOST, RequirementError, parse_label
from hypergpu.serving.serve_request import served_kind_of
from hypergpu.units import Bytes, Milliseconds

BITS_PER_S_MIN = 256_000
"""Transfers that are slower break off by their own time limits."""
OTHERS_SHARE_MAX = 0.25
"""Part of all processors that other programs may use on an idle machine."""
IDLE_AFTER_MS = 60_000
"""A machine counts as idle again once nobody has used it for so long."""
STATES_OF_A_JOB = 7
"""Sizes of the model that a job's end states take: two moments and a residual, of two rounds, and
the update. A job that overlaps rounds keeps its parameters too, in place of one of them.
"""
TRAINING_OF_A_MODEL = 4
"""Sizes of the model that any training takes: parameters, gradients and two moments."""


_KEY = re.compile(r"[0-9a-f]{64}")
TRAINING_KIND = "training"
"""The kind of work that every node does unless its owner names others."""


class LimitValueError(ValueError):
    """A limit is not what it must be. The text names the key, what is wrong and what is right."""


class HourSpan(msgspec.Struct, frozen=True):
    """Minutes of the local day from ``start`` up to ``end``; over midnight where end is less."""

    start: int
    end: int

    def hold(self, minute: int) -> bool:
        """Whether a minute of the day lies in them."""
        if self.start <= self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{each // 60:02}:{each % 60:02}" for each in (self.start, self.end))


SHARES_MOST = 16
"""Nodes of one device."""


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's limits. Empty and 0: no limit."""

    coordinators: tuple[str, ...] = ()
    """Hosts, ``host:port`` or digests of CAs."""
    workloads: tuple[str, ...] = ()
    """Names and kinds."""
    kinds: tuple[str, ...] = (TRAINING_KIND,)
    """Kinds of work that it does: ``training``, item kinds of farm jobs, ``serve``. A node does no
    more than training until its owner says so.
    """
    disk_bytes: Bytes = Bytes(0)
    """Size of cache, end states and updates together."""
    memory_bytes: Bytes = Bytes(0)
    """Memory of the worker with all that it starts."""
    threads: int = 0
    shares: int = 1
    """Nodes that each device is divided among, evenly."""
    gpu: str = ""
    """Indices or UUIDs as nvidia-smi has them, with commas; ``none``: workers see no GPU."""
    upload_bits_per_s: int = 0
    download_bits_per_s: int = 0
    hours: tuple[HourSpan, ...] = ()
    only_when_idle: bool = False
    power_w: int = 0
    """Power limit above which the GPU must not be set."""
    labels: dict[str, str] = {}
    """What the owner calls the node by, for jobs that require it."""
    spec_keys: tuple[str, ...] = ()
    """Keys of users, 64 hex digits each: packed work that none of them signed is not done."""
    data: dict[str, str] = {}
    """Folders of the data sets that jobs may train on where they are."""
    server: OwnServer | None = None
    """A server of the owner's that answers calls to served models; no job and no call names it."""

    def allow_workload(self, name: str, kinds: Mapping[str, str]) -> bool:
        """Whether a workload of a kind that ``kinds`` gives may be trained."""
        return not self.workloads or name in self.workloads or kinds.get(name) in self.workloads

    def refusal_of_kind(self, kind: str) -> str:
        """Why work of a kind is not done, with the line that allows it; empty: it is done.

        Args:
            kind: ``training``, or a kind of packed work, such as ``map/embed``.
        """
        name = item_kind_of(kind) or served_kind_of(kind) or kind
        if name in self.kinds:
            return ""
        names = ", ".join(f'"{each}"' for each in (*self.kinds, name))
        return (
            f"its owner allows no work of kind {name} here; this line in node.toml allows it: "
            f"kinds = [{names}]"
        )

    def allow_unsandboxed(self, name: str) -> bool:
        """Whether a workload may be trained, or a kind of items done, where no sandbox starts: a
        program, which any user may send, only where the owner names it.
        """
        return (item_kind_of(name) or name) != "program" or "program" in self.workloads

    def allow_coordinator(self, address: str, authority: str) -> bool:
        """Whether the coordinator at ``host:port`` with this digest of its CA may be served."""
        host = address.rpartition(":")[0].strip("[]")
        return not self.coordinators or bool({address, host, authority} & {*self.coordinators})


class MachineReading(NamedTuple):
    """What the machine does at one moment, as far as the limits ask."""

    at_ms: Milliseconds
    minute: int
    """Minute of the local day."""
    others_share: float = 0.0
    """Part of all processors' time that other programs used since the last reading."""
    is_gpu_shared: bool = False
    """Other programs compute on the GPU."""
    power_w: float = 0.0
    """The highest power limit that a GPU enforces; 0: none says."""


class Refusal(NamedTuple):
    """Why there is no work now."""

    number: str
    """Name of the numbered reason in `hypergpu.errors`, such as ``OWNER_HOURS``."""
    detail: str


def cause_of(reason: Reason) -> FailureCause:
    """Cause of work that fails by a numbered error."""
    return FailureCause.OWNER if reason.is_owner_limit else FailureCause.OTHER


def refusal_of_work(
    limits: OwnerLimits, reading: MachineReading, busy_ms: Milliseconds | None
) -> Refusal | None:
    """Why the owner lets the node do nothing at the moment; None: it may work.

    Args:
        limits: The owner's.
        reading: The newest.
        busy_ms: Time of the newest reading in which others used the machine; None: never.
    """
    if limits.hours and not any(span.hold(reading.minute) for span in limits.hours):
        hours = ", ".join(map(str, limits.hours))
        return Refusal("OWNER_HOURS", f"its owner lets it work at {hours} only")
    if limits.power_w and reading.power_w > limits.power_w:
        detail = f"the GPU may take {reading.power_w:g} W, its owner allows {limits.power_w} W"
        return Refusal("OWNER_POWER", detail)
    if limits.only_when_idle and busy_ms is not None and reading.at_ms - busy_ms < IDLE_AFTER_MS:
        return Refusal("OWNER_BUSY", "its owner uses the machine")
    return None


def is_used_by_others(reading: MachineReading) -> bool:
    """Whether somebody else uses the machine."""
    return reading.is_gpu_shared or reading.others_share > OTHERS_SHARE_MAX


def refusal_of_memory(limits: OwnerLimits, model_bytes: int) -> Refusal | None:
    """Why a model cannot be trained within the owner's memory; None: perhaps it can."""
    least = TRAINING_OF_A_MODEL * model_bytes
    if not limits.memory_bytes or least <= limits.memory_bytes:
        return None
    detail = f"training takes {least} bytes of memory at least, its owner allows"
    return Refusal("OWNER_MEMORY", f"{detail} {limits.memory_bytes}")


def refusal_of_disk(limits: OwnerLimits, kept_bytes: int, need_bytes: int) -> Refusal | None:
    """Why more does not fit on the disk; None: it does.

    Args:
        limits: The owner's.
        kept_bytes: Of what cannot be deleted: other jobs' end states.
        need_bytes: Of the job at hand, all told.
    """
    if not limits.disk_bytes or kept_bytes + need_bytes <= limits.disk_bytes:
        return None
    detail = f"the job takes {need_bytes} bytes of disk beside {kept_bytes} of other jobs"
    return Refusal("OWNER_DISK", f"{detail}, its owner allows {limits.disk_bytes}")


def owner_limits(given: Mapping[str, object], origin: str) -> OwnerLimits:
    """The limits that a table of texts, numbers and lists says.

    Raises:
        LimitValueError: A key is not known or its value is not what it must be.
    """
    if unknown_keys := sorted(given.keys() - _READERS.keys()):
        raise LimitValueError(
            f"{origin}: {unknown_keys[0][:80]} is no limit; there are {', '.join(_READERS)}"
        )
    fields: dict[str, object] = {}
    for key, value in given.items():
        field, read = _READERS[key]
        try:
            fields[field] = read(value)
        except ValueError as wrong:
            value_text = repr(value)[:80]
            raise LimitValueError(f"{origin}: {key} is {value_text}; it must be {wrong}") from None
    return msgspec.convert(fields, OwnerLimits)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([kmgt]?)b", re.IGNORECASE)
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([kmg]?)bit/s", re.IGNORECASE)
_SPAN = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_GPU = re.compile(r"\d{1,3}|GPU-[0-9a-f-]{4,40}")


def _words(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts) or not texts:
        raise ValueError('a list of names, such as ["digits-cnn", "torch"]')
    return tuple(word.strip() for each in texts for word in each.split(",") if word.strip())


def _size(value: object) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise ValueError('a size above zero, such as "50GB"')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _rate(value: object) -> int:
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    rate = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if rate < BITS_PER_S_MIN:
        raise ValueError('a rate of at least 256 kbit/s, such as "5Mbit/s"')
    return rate


def _count(value: object) -> int:
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ValueError("a whole number of at least 1")
    return int(text)


def _shares(value: object) -> int:
    try:
        count = _count(value)
    except ValueError:
        count = 0
    if not 0 < count <= SHARES_MOST:
        raise ValueError(f"a whole number of 1 to {SHARES_MOST}")
    return count


def _gpu(value: object) -> str:
    words = value if isinstance(value, list) else str(value).split(",")
    names = [str(word).strip() for word in words]
    is_bool = any(isinstance(each, bool) for each in (value, *words))
    if is_bool or ((names != ["none"] and not all(map(_GPU.fullmatch, names))) or not names):
        raise ValueError('GPUs\' indices or UUIDs as nvidia-smi -L lists them, or "none"')
    return ",".join(names)


def _hours(value: object) -> tuple[HourSpan, ...]:
    spans = []
    for word in _words(value) if value else ("",):
        if (match := _SPAN.fullmatch(word)) is None or match.group(1, 2) == match.group(3, 4):
            raise ValueError('spans of local time, such as "22:00-07:00"')
        hours = [int(each) for each in match.groups()]
        spans.append(HourSpan(hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]))
    return tuple(spans)


def _truth(value: object) -> bool:
    if value not in (True, False, "true", "false"):
        raise ValueError("true or false")
    return value in (True, "true")


def _labels(value: object) -> dict[str, str]:
    """Labels from a table, or from words ``NAME=VALUE``."""
    if isinstance(value, dict):
        value = [f"{name}={each}" for name, each in value.items()] or ""
    words = _words(value)
    try:
        labels = dict(parse_label(word) for word in words)
    except RequirementError as wrong:
        raise ValueError(f"a table of labels, and {wrong}: {wrong.fix}") from wrong
    if len(labels) > LABELS_MOST:
        raise ValueError(f"at most {LABELS_MOST} labels")
    return labels


def _folders(value: object) -> dict[str, str]:
    folders = value if isinstance(value, dict) else {"": ""}
    if not all(is_data_name(name) and str(at).startswith("/") for name, at in folders.items()):
        raise ValueError('a table of names and whole paths, such as chest-xrays = "/srv/xrays"')
    return {str(name): str(folder) for name, folder in folders.items()}


def _keys(value: object) -> tuple[str, ...]:
    keys = _words(value)
    if any(_KEY.fullmatch(key) is None for key in keys):
        raise ValueError("keys of 64 hex digits each, as hypergpu token keys shows them")
    return keys


_READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "coordinators": ("coordinators", _words),
    "workloads": ("workloads", _words),
    "kinds": ("kinds", _words),
    "disk": ("disk_bytes", _size),
    "memory": ("memory_bytes", _size),
    "threads": ("threads", _count),
    "shares": ("shares", _shares),
    "gpu": ("gpu", _gpu),
    "upload": ("upload_bits_per_s", _rate),
    "download": ("download_bits_per_s", _rate),
    "hours": ("hours", _hours),
    "only_when_idle": ("only_when_idle", _truth),
    "power": ("power_w", _count),
    "labels": ("labels", _labels),
    "data": ("data", _folders),
    "spec_keys": ("spec_keys", _keys),
    "server": ("server", own_server),
}
