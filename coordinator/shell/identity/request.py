"""Reads a node's certificate request. It comes from outside: nothing but its key is taken."""

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from hypergpu.errors import HyperGPUError, Reason

MAX_REQUEST_BYTES = 8192


def certificate_request(pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key that asks to be certified.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large, malformed, not signed by its own key, or
            not of P-256.
    """
    if len(pem) > MAX_REQUEST_BYTES:
        raise _invalid(f"it has {len(pem)} bytes, at most {MAX_REQUEST_BYTES} are read")
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm):
        raise _invalid("it is not a PKCS#10 request in PEM") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _invalid("its key is not of P-256")
    if not is_signed:
        raise _invalid("it is not signed by its own key")
    return key


def _invalid(why: str) -> HyperGPUError:
    return HyperGPUError(Reason.REQUEST_INVALID, f"the certificate request cannot be used: {why}")
