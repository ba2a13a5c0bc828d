"""Addresses as people write them."""

from eth_utils.address import is_checksum_address, is_checksum_formatted_address, is_hex_address

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address


def address_of(text: str, what: str) -> Address:
    """An address; where its letters differ in case they are its checksum (EIP-55).

    Args:
        text: As it was written.
        what: It is for, such as an option.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it is none, or mistyped.
    """
    if not (text.startswith("0x") and is_hex_address(text)):
        # A variable of the environment, or an option.
        between = "=" if what.isupper() else " "
        fix = f"name it like this: {what}{between}0x and 40 hex digits"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{text!r} is no address", fix=fix)
    if is_checksum_formatted_address(text) and not is_checksum_address(text):
        detail = f"{what} {text} is mistyped: its capital letters do not fit it (EIP-55)"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="copy it once more")
    return Address(text.lower())
