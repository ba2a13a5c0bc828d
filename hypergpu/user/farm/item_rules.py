"""What a user's side knows of each kind of item: what an item is made of, in which unit it is paid,
how results of two nodes are compared, and the columns of the output.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.image_rules import IMAGE_SETTINGS
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding
from hypergpu.farm.sweep_points import POINT_BYTES_MOST
from hypergpu.farm.written_texts import GENERATE_VERSION
from hypergpu.units import Milliseconds
from hypergpu.work_units import WorkUnit


class ItemForm(Enum):
    """What an item is made of."""

    TEXT = "text"
    """One field, which is a text."""
    TEXT_OR_PICTURE = "text or picture"
    """A text, or a file of a folder of pictures."""
    SCORED = "scored"
    """A text, or two: a context and its continuation."""
    PROMPT = "prompt"
    """A text, or a list of messages."""
    ARRAYS = "arrays"
    """All fields, each an array of one shape."""
    JSON = "json"
    """A row as it is."""
    POINT = "point"
    """A point of a sweep: the settings of one training."""


class ItemRules(NamedTuple):
    """Rules of one kind of item."""

    name: str
    form: ItemForm
    unit: WorkUnit
    encoding: ResultEncoding
    columns: Mapping[str, str]
    """Names of the columns that a value becomes, with their types: ``vector``, ``text``, ``float``,
    ``integer``, ``shares``, ``curve``, ``png``, a file beside the output, or ``json``, an object
    that parquet holds as text.
    """
    comparison: ResultComparison
    settings: frozenset[str]
    """Parameters that may be set."""
    needs_base: bool = True
    bundle_items_most: int = 0
    """Items of a bundle at most; 0: as many as its time holds."""
    lease_limit_ms: Milliseconds = Milliseconds(900_000)
    """The most that a node may keep a bundle."""
    result_bytes_most: int = 16_384
    """Size of an item's result at most, where its form does not say more."""
    version: int = 1
    """Version of the performer that nodes have."""


_BASE = frozenset({"dtype"})
_WRITING = frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "batch_size"})
_NUMBERS = ResultComparison(ComparisonRule.TOLERANCE, agreeing_permille=990)
_VECTORS = ResultComparison(ComparisonRule.TOLERANCE)
_TRAININGS = ResultComparison(ComparisonRule.TOLERANCE, relative_error_ppm=50_000)
"""Unlike devices round otherwise, which a training enlarges with each step."""
_RULES = (
    ItemRules(
        "embed",
        ItemForm.TEXT_OR_PICTURE,
        WorkUnit.ITEMS,
        ResultEncoding.SAFETENSORS,
        {"vector": "vector"},
        _VECTORS,
        _BASE | {"prompt", "normalize"},
    ),
    ItemRules(
        "score",
        ItemForm.SCORED,
        WorkUnit.TOKENS,
        ResultEncoding.JSONL,
        {"log_likelihood": "float", "tokens": "integer", "is_greedy": "integer"},
        _NUMBERS,
        _BASE | {"begin_context"},
    ),
    ItemRules(
        "generate",
        ItemForm.PROMPT,
        WorkUnit.TOKENS,
        ResultEncoding.JSONL,
        {"text": "text", "prompt_tokens": "integer", "new_tokens": "integer"},
        ResultComparison(ComparisonRule.JUDGED),
        _BASE | _WRITING,
        version=GENERATE_VERSION,
    ),
    ItemRules(
        "classify",
        ItemForm.TEXT_OR_PICTURE,
        WorkUnit.ITEMS,
        ResultEncoding.JSONL,
        {"label": "text", "score": "float", "scores": "shares"},
        _NUMBERS,
        _BASE,
    ),
    ItemRules(
        "program",
        ItemForm.ARRAYS,
        WorkUnit.ITEMS,
        ResultEncoding.SAFETENSORS,
        {"output": "vector"},
        _VECTORS,
        frozenset({"height", "width", "channels"}),
        needs_base=False,
    ),
    ItemRules(
        "checksum",
        ItemForm.JSON,
        WorkUnit.ITEMS,
        ResultEncoding.JSONL,
        {"checksum": "text"},
        ResultComparison(),
        frozenset({"rounds"}),
        needs_base=False,
    ),
    ItemRules(
        "image",
        ItemForm.TEXT,
        WorkUnit.MEGAPIXEL_STEPS,
        ResultEncoding.JSONL,
        {"image": "png", "width": "integer", "height": "integer"},
        ResultComparison(ComparisonRule.PICTURES),
        _BASE | IMAGE_SETTINGS,
        bundle_items_most=16,
    ),
    ItemRules(
        "sweep",
        ItemForm.POINT,
        WorkUnit.SAMPLES,
        ResultEncoding.JSONL,
        {
            "point": "json",
            "metric": "float",
            "metrics": "shares",
            "steps": "integer",
            "curve": "curve",
        },
        _TRAININGS,
        frozenset({"metric", "workload", "rung", "rungs"}),
        needs_base=False,
        bundle_items_most=1,
        lease_limit_ms=Milliseconds(12 * 3_600_000),
        result_bytes_most=POINT_BYTES_MOST,
    ),
)
ITEM_RULES = {rules.name: rules for rules in _RULES}


def item_rules(kind: str) -> ItemRules:
    """The rules of a kind.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no such kind.
    """
    if kind not in ITEM_RULES:
        names = ", ".join(ITEM_RULES)
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"there is no kind of item {kind!r}",
            fix=f"take one of {names}",
        )
    return ITEM_RULES[kind]
