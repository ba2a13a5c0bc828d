"""A user's settings of a farm job, and the request that they become."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.device_shares import LEAST_SHARE_PERMILLE, WHOLE_DEVICE_PERMILLE
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.image_rules import ImageRules
from hypergpu.farm.item_chunks import ItemManifest
from hypergpu.farm.map_request import MapRequest, ParameterValue
from hypergpu.units import Wei
from hypergpu.user.farm.item_rules import ItemRules, item_rules
from hypergpu.work_units import WorkUnit

_VECTOR_BYTES = 1 << 20
_TEXT_BYTES_PER_TOKEN = 80
_NEW_TOKENS = 128
KindParameters = Mapping[str, ParameterValue]


class MapSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a farm job; all but the kind have defaults. A job file has them as ``[map]``."""

    item_kind: str
    base: str = ""
    """Folder of the model, or its name on the hub, which must be in the hub's cache."""
    allow_hub: bool = False
    """Whether a base that is not on this machine is downloaded from the hub."""
    text_field: str = ""
    """Field of a row that is the item; else ``text``, ``prompt``, or the only one."""
    id_field: str = ""
    """Field of a row that is its id; else its position, or the name of its file."""
    parameters: dict[str, ParameterValue] = {}
    name: str = ""
    seed: int = 0
    price: str = ""
    """Price of 100 units in the smallest unit of money; empty: nothing is due."""
    budget: str = ""
    """The most that the job may cost, as the price; empty: no limit."""
    checks: float = 0.03
    """Share of the items that two nodes do, in secret."""
    nodes: int = 0
    """Nodes at most; 0: no limit."""
    share: float = 1.0
    """Share of a device that the work needs: nodes that have less of one get none of it."""
    requirements: tuple[str, ...] = ()
    priority: int = 0
    weight: int = 1

    @property
    def rules(self) -> ItemRules:
        """Rules of the kind.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, there is no such kind.
        """
        return item_rules(self.item_kind)

    def check(self) -> None:
        """Refuse settings that no request is made of.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, with what would be right.
        """
        rules = self.rules
        if rules.needs_base and not self.base:
            raise _wrong(f"{self.item_kind} needs a model", "name its folder: --base FOLDER")
        if not rules.needs_base and self.base:
            raise _wrong(f"{self.item_kind} takes no base", "leave it out")
        if unknown_names := sorted(self.parameters.keys() - rules.settings):
            names = ", ".join(sorted(rules.settings)) or "none"
            raise _wrong(f"{self.item_kind} has no setting {unknown_names[0]!r}", f"it has {names}")
        if rules.unit is WorkUnit.MEGAPIXEL_STEPS:
            _check_pictures(self.parameters)
        self._check_shares()
        for name, text in (("price", self.price), ("budget", self.budget)):
            if text and not (text.isascii() and text.isdecimal()):
                raise _wrong(f"{name} is {text!r}", "give a whole number of the smallest unit")

    def _check_shares(self) -> None:
        if not 0 <= self.checks <= 1 or not math.isfinite(self.checks):
            raise _wrong(f"checks is {self.checks}", "give a share in 0 to 1, such as 0.03")
        if not LEAST_SHARE_PERMILLE <= self.share_permille <= WHOLE_DEVICE_PERMILLE:
            raise _wrong(f"share is {self.share}", "give a share of 1/16 to 1, such as 0.25")

    @property
    def share_permille(self) -> int:
        """The share in thousandths, rounded down; 0 for what is no share."""
        return int(1000 * self.share) if math.isfinite(self.share) else 0

    @property
    def unit_price(self) -> Wei:
        """Price of 100 units."""
        return Wei(int(self.price or 0))


def _wrong(detail: str, fix: str) -> HyperGPUError:
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _check_pictures(parameters: KindParameters) -> None:
    try:
        ImageRules.of(parameters)
    except ValueError as error:
        raise _wrong(str(error), "change it: --set width=512") from error


def map_request(
    settings: MapSettings,
    manifest: ItemManifest,
    manifest_blob: BlobRef,
    files: Mapping[str, BlobRef],
    *,
    largest_bytes: int = 1,
    units_most: int = 0,
) -> MapRequest:
    """The request of a job whose blobs were sent.

    Args:
        settings: Checked.
        manifest: The items.
        manifest_blob: The manifest by name.
        files: Further files by name.
        largest_bytes: Size of the largest item.
        units_most: Units of an item at most; 0: by its kind.
    """
    rules = settings.rules
    return MapRequest(
        item_kind=rules.name,
        item_kind_version=rules.version,
        name=settings.name,
        manifest=manifest_blob,
        items=manifest.items,
        files=dict(files),
        parameters=settings.parameters,
        seed=settings.seed,
        unit=rules.unit,
        units_per_item_most=units_most or _units_most(rules, settings.parameters, largest_bytes),
        result=rules.encoding,
        result_bytes_per_item_most=_result_bytes_most(rules, settings.parameters),
        comparison=rules.comparison,
        checked_permille=round(1000 * settings.checks),
        bundle_items_most=rules.bundle_items_most,
        lease_limit_ms=rules.lease_limit_ms,
        nodes_max=settings.nodes,
        share_permille=settings.share_permille,
        weight=settings.weight,
        priority=settings.priority,
        requirements=settings.requirements,
        unit_price=settings.unit_price,
        budget=Wei(int(settings.budget or 0)),
    )


def _units_most(rules: ItemRules, parameters: KindParameters, largest_bytes: int) -> int:
    """Units of one item at most. No token is shorter than a byte; a chat adds its marks."""
    if rules.unit is WorkUnit.MEGAPIXEL_STEPS:
        return ImageRules.of(parameters).megapixel_steps_most
    if rules.unit is not WorkUnit.TOKENS:
        return 1
    new_tokens = _new_tokens(parameters) if rules.name == "generate" else 0
    return 2 * largest_bytes + 256 + new_tokens


def _new_tokens(parameters: KindParameters) -> int:
    return int(parameters.get("max_new_tokens", _NEW_TOKENS))


def _result_bytes_most(rules: ItemRules, parameters: KindParameters) -> int:
    if "png" in rules.columns.values():
        return ImageRules.of(parameters).result_bytes_most
    if "vector" in rules.columns.values():
        return _VECTOR_BYTES
    return rules.result_bytes_most + (
        _TEXT_BYTES_PER_TOKEN * _new_tokens(parameters) if rules.name == "generate" else 0
    )


def settings_of(kind: str, given: Mapping[str, Any]) -> MapSettings:
    """Settings from names and values.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a name or a value is none that may be.
    """
    try:
        return msgspec.convert({"item_kind": kind, **given}, MapSettings, strict=True)
    except msgspec.ValidationError as error:
        names = ", ".join(MapSettings.__struct_fields__[1:])
        raise _wrong(f"settings of a farm job: {error}", f"they are {names}") from error


def parameter_values(words: Sequence[str]) -> dict[str, ParameterValue]:
    """KindParameters from words such as ``temperature=0.7``; what is no JSON is a text.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a word has no name, or a value is a list or an object.
    """
    values: dict[str, ParameterValue] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not name or not sign:
            raise _wrong(f"the setting {word!r} is no KEY=VALUE", "write --set temperature=0.7")
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
        if not isinstance(value, str | int | float | bool):
            raise _wrong(f"the setting {word!r} is no plain value", "write --set temperature=0.7")
        values[name] = value
    return values
