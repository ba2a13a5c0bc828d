"""Checks the content of a bundle's result before it is decided on. Trusts nothing in it."""

from coordinator.shell.kinds.farm.comparison import are_units_stated
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundle_results import failure_count, read_json_results
from hypergpu.farm.bundles import BundleResult
from hypergpu.farm.map_request import ComparisonRule, MapRequest, ResultEncoding
from hypergpu.farm.written_texts import check_judgements, check_written
from hypergpu.work_units import WorkUnit


def check_content(
    request: MapRequest, result: BundleResult, content: bytes, *, is_part: bool
) -> None:
    """Check that a result's blob is what its node says of it.

    Args:
        request: The job's.
        result: What the node says.
        content: The blob.
        is_part: Whether it is of the part of a bundle that is checked.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is malformed, or something else.
    """
    items, encoding = result.items + result.failures, request.result
    failures = failure_count(content, encoding, items)
    if failures != result.failures:
        raise _content_error(f"{failures} items of the result failed, not {result.failures}")
    if request.comparison.rule is ComparisonRule.JUDGED:
        check = check_judgements if is_part else check_written
        check(read_json_results(content, items))
    is_counted = request.unit is WorkUnit.TOKENS and encoding is ResultEncoding.JSONL
    if is_counted and not are_units_stated(content, items, result.units):
        raise _content_error(f"the values of the result do not have {result.units} tokens")


def _content_error(detail: str) -> HyperGPUError:
    return HyperGPUError(Reason.REQUEST_INVALID, detail)
