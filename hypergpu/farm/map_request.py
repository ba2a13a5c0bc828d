"""What a user asks of a farm job: the struct that `CreateJob.work` carries packed."""

import itertools
import re
from enum import Enum

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.device_shares import LEAST_SHARE_PERMILLE, WHOLE_DEVICE_PERMILLE
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.requirements import REQUIREMENTS_MOST, RequirementError, parse_requirement
from hypergpu.ledger_terms import AMOUNT_MOST
from hypergpu.units import Milliseconds, Wei
from hypergpu.work_units import WorkUnit

MAP_KIND = "map"
"""Kind of the packed work that asks for a job."""
_WORK_PREFIX = "map/"
ITEMS_MOST = 1 << 40
FILES_MOST = 16
PARAMETERS_BYTES_MOST = 16_384
BUNDLE_ITEMS_MOST = 1 << 20
UNITS_PER_ITEM_MOST = 1 << 32
PRICED_UNITS = 100
"""Units that the price is for."""
JOB_UNITS_MOST = 1 << 50
"""Units of a job at most: a node's total score, 10,000 a unit, has 64 bits in a receipt."""
_BUNDLES_PER_EPOCH_MOST = 1 << 20
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL_LENGTH_MOST = 200
_LIMIT_MS_LEAST, _LIMIT_MS_MOST = 1_000, 24 * 3_600_000
_WHOLE_PERMILLE = 1_000

ParameterValue = str | int | float | bool


class ResultEncoding(Enum):
    """How a result's blob holds the values of a bundle's items, in order: see
    `hypergpu.farm.bundle_results`.
    """

    JSONL = "jsonl"
    SAFETENSORS = "safetensors"


class ComparisonRule(Enum):
    """When two results of one bundle agree."""

    EXACT = "exact"
    """The blobs are equal byte by byte."""
    TOLERANCE = "tolerance"
    """Numbers are as near as stated; all else is equal."""
    PICTURES = "pictures"
    """The pictures, PNG in base64, look alike: see `hypergpu.farm.picture_likeness`."""
    JUDGED = "judged"
    """They are not compared: another node judges texts that were written, see
    `hypergpu.farm.written_texts`.
    """


class ResultComparison(msgspec.Struct, frozen=True):
    """How the results of two nodes are compared."""

    rule: ComparisonRule = ComparisonRule.EXACT
    cosine_distance_ppm: int = 1_000
    """Most that one minus the cosine of two vectors may be, in millionths."""
    relative_error_ppm: int = 10_000
    """Most by which two single numbers may differ, in millionths of the larger one."""
    agreeing_permille: int = 1_000
    """Least share of the items that must agree, in thousandths."""


class MapRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A farm job. Blobs that it names were sent by its user before (`OfferData`, `CommitData`)."""

    item_kind: str
    """Name of the performer that does the items, such as ``embed``."""
    item_kind_version: int = 1
    name: str = ""
    """For people."""
    manifest: BlobRef
    """A `hypergpu.farm.item_chunks.ItemManifest`."""
    items: int
    """As the manifest has them."""
    files: dict[str, BlobRef] = {}
    """Further files that the work needs, by the names that the performer knows: a program, weights.
    """
    parameters: dict[str, ParameterValue] = {}
    """Settings of the item kind, such as ``base``; 16 KiB as JSON at most."""
    seed: int = 0
    """What random draws of the performer are keyed by, with the item's position."""
    unit: WorkUnit = WorkUnit.ITEMS
    units_per_item_most: int = 1
    """No item counts for more: what a node's word is bounded by."""
    result: ResultEncoding = ResultEncoding.JSONL
    result_bytes_per_item_most: int = 16_384
    comparison: ResultComparison = ResultComparison()
    checked_permille: int = 30
    """Share of the items that are done twice in secret, of nodes that are known; 0: none is."""
    bundle_ms: Milliseconds = Milliseconds(20_000)
    """Time that a bundle is to take."""
    bundle_items_most: int = 0
    """Items of a bundle at most; 0: only its time limits it."""
    lease_limit_ms: Milliseconds = Milliseconds(900_000)
    """The most that a node may keep a bundle."""
    tries_most: int = 3
    """Nodes at which an item may fail before it is given up."""
    nodes_max: int = 0
    """Nodes at most; 0: no limit."""
    share_permille: int = WHOLE_DEVICE_PERMILLE
    """Share of a device that a node must have."""
    weight: int = 1
    priority: int = 0
    requirements: tuple[str, ...] = ()
    """As in job files: ``gpu >= 8GB``."""
    unit_price: Wei = Wei(0)
    """Price of 100 units; 0: receipts are counted and no money is due."""
    budget: Wei = Wei(0)
    """The most that the job may cost, which is set aside for it; a job with a price states one."""
    bundles_per_epoch: int = 1_000
    """Accepted bundles whose receipts are settled together."""

    @property
    def work_kind(self) -> str:
        """Kind of the packed work that nodes get: the performer's name in the worker's table."""
        return work_kind(self.item_kind)

    def check(self) -> None:
        """Check each field against its limits.

        Raises:
            HyperGPUError: REQUEST_INVALID, with the field and what would be right.
        """
        rules = (_shape_rules, _amount_rules, _order_rules, _pay_rules)
        for is_right, field, rule in itertools.chain.from_iterable(each(self) for each in rules):
            if not is_right:
                detail = f"{field} of a farm job: {rule}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=f"change {field}")
        for text in self.requirements:
            try:
                parse_requirement(text)
            except RequirementError as error:
                detail = f"requirements of a farm job: {error}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=error.fix) from error


def work_kind(item_kind: str) -> str:
    """Kind of the packed work of an item kind, as nodes name it among their workloads."""
    return f"{_WORK_PREFIX}{item_kind}"


def item_kind_of(kind: str) -> str:
    """The item kind of packed work; empty: it is no work of a farm job."""
    return kind.removeprefix(_WORK_PREFIX) if kind.startswith(_WORK_PREFIX) else ""


_Rule = tuple[bool, str, str]


def _shape_rules(request: MapRequest) -> tuple[_Rule, ...]:
    files = request.files
    parameter_bytes = len(msgspec.json.encode(request.parameters))
    return (
        (
            _NAME.fullmatch(request.item_kind) is not None,
            "item_kind",
            "a name of lower-case letters, digits and '-'",
        ),
        (request.item_kind_version > 0, "item_kind_version", "at least 1"),
        (
            len(request.name) <= _LABEL_LENGTH_MOST and request.name.isprintable(),
            "name",
            f"{_LABEL_LENGTH_MOST} printable characters at most",
        ),
        (0 < request.items <= ITEMS_MOST, "items", f"1 to {ITEMS_MOST}"),
        (len(files) <= FILES_MOST, "files", f"{FILES_MOST} at most"),
        (all(map(_FILE_NAME.fullmatch, files)), "files", "plain names without folders"),
        (
            parameter_bytes <= PARAMETERS_BYTES_MOST,
            "parameters",
            f"{parameter_bytes} bytes as JSON, and {PARAMETERS_BYTES_MOST} at most",
        ),
        (
            len(request.requirements) <= REQUIREMENTS_MOST,
            "requirements",
            f"{REQUIREMENTS_MOST} at most",
        ),
    )


def _amount_rules(request: MapRequest) -> tuple[_Rule, ...]:
    comparison = request.comparison
    one_unit = request.unit.is_count_of_items
    span = f"{_LIMIT_MS_LEAST} to {_LIMIT_MS_MOST}"
    return (
        (
            0 < request.units_per_item_most <= (1 if one_unit else UNITS_PER_ITEM_MOST),
            "units_per_item_most",
            f"1 where the unit is {request.unit.value}"
            if one_unit
            else f"1 to {UNITS_PER_ITEM_MOST}",
        ),
        (
            0 < request.result_bytes_per_item_most <= 64 << 20,
            "result_bytes_per_item_most",
            "1 to 64 MiB",
        ),
        (
            0 <= request.checked_permille <= _WHOLE_PERMILLE,
            "checked_permille",
            "0 to 1000 thousandths",
        ),
        (
            0 < comparison.agreeing_permille <= _WHOLE_PERMILLE
            and min(comparison.cosine_distance_ppm, comparison.relative_error_ppm) >= 0,
            "comparison",
            "shares of 1 to 1000 thousandths, and no negative error",
        ),
        (_LIMIT_MS_LEAST <= request.bundle_ms <= _LIMIT_MS_MOST, "bundle_ms", span),
        (_LIMIT_MS_LEAST <= request.lease_limit_ms <= _LIMIT_MS_MOST, "lease_limit_ms", span),
        (
            0 <= request.bundle_items_most <= BUNDLE_ITEMS_MOST,
            "bundle_items_most",
            f"0 to {BUNDLE_ITEMS_MOST}",
        ),
    )


def _order_rules(request: MapRequest) -> tuple[_Rule, ...]:
    return (
        (1 <= request.tries_most <= 16, "tries_most", "1 to 16"),
        (request.nodes_max >= 0, "nodes_max", "at least 0"),
        (
            LEAST_SHARE_PERMILLE <= request.share_permille <= WHOLE_DEVICE_PERMILLE,
            "share_permille",
            f"{LEAST_SHARE_PERMILLE} to {WHOLE_DEVICE_PERMILLE} thousandths",
        ),
        (1 <= request.weight <= 1_000, "weight", "1 to 1000"),
        (-1_000 <= request.priority <= 1_000, "priority", "-1000 to 1000"),
    )


def _pay_rules(request: MapRequest) -> tuple[_Rule, ...]:
    return (
        (
            0 <= request.unit_price <= AMOUNT_MOST and 0 <= request.budget <= AMOUNT_MOST,
            "unit_price and budget",
            f"0 to {AMOUNT_MOST}",
        ),
        (
            bool(request.budget) or not request.unit_price,
            "budget",
            "above 0 where unit_price is: it is set aside before any work is given out",
        ),
        (
            not request.budget or request.budget * PRICED_UNITS >= request.unit_price,
            "budget",
            "the price of one unit at least",
        ),
        (
            request.items * request.units_per_item_most <= JOB_UNITS_MOST,
            "items and units_per_item_most",
            f"a product of {JOB_UNITS_MOST} at most, which is what a receipt can state",
        ),
        (
            1 <= request.bundles_per_epoch <= _BUNDLES_PER_EPOCH_MOST,
            "bundles_per_epoch",
            f"1 to {_BUNDLES_PER_EPOCH_MOST}",
        ),
    )
