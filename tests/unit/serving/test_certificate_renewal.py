"""An API that runs for months presents a certificate that is good."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client.models import ApiCertificate
from hypergpu.user.serving.certificate_renewal import (
    RENEWAL_S,
    ApiCertificateFiles,
    CertificateRequest,
)
from tests.certificates import write_certificate

NOW_S = 1_000_000_000


class OneTimeCertifier:
    """Signs by the key that is there, as often as it may."""

    def __init__(self, folder: Path, key: Path, *, fails: bool = False) -> None:
        self._folder = folder
        self._key = key
        self._fails = fails
        self.hosts: list[list[str]] = []

    async def certify_api(self, request_pem: bytes, hosts: list[str]) -> ApiCertificate:
        """A certificate with the serial number 2."""
        if self._fails:
            raise HyperGPUError(Reason.NOT_READY, "the coordinator has no CA")
        self.hosts.append(hosts)
        certificate, key = write_certificate(self._folder, serial=2)
        key.replace(self._key)
        return ApiCertificate(certificate.read_bytes(), b"", NOW_S + 3 * RENEWAL_S)


def served_serial(context: ssl.SSLContext) -> int:
    """Serial number of the certificate that a new connection gets."""
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = context.wrap_bio(to_server, to_client, server_side=True)
    client_side = client.wrap_bio(to_client, to_server)
    for _ in range(4):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    content = client_side.getpeercert(binary_form=True)
    assert content is not None
    return x509.load_der_x509_certificate(content).serial_number


def served_files(folder: Path) -> tuple[Path, Path, ssl.SSLContext]:
    certificate, key = write_certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, key, context


async def test_a_certificate_of_the_hub_is_renewed_before_its_end_and_then_left_alone(
    tmp_path: Path,
) -> None:
    certificate, key, context = served_files(tmp_path)
    request = CertificateRequest(b"request", ["hub"], NOW_S + RENEWAL_S)
    files = ApiCertificateFiles(certificate, key, request)
    (tmp_path / "next").mkdir()
    certifier = OneTimeCertifier(tmp_path / "next", key)
    await files.refresh(context, certifier, NOW_S)
    assert (certifier.hosts, served_serial(context)) == ([], 1)
    for _ in range(2):
        await files.refresh(context, certifier, NOW_S + 1)
        assert (certifier.hosts, served_serial(context)) == ([["hub"]], 2)


async def test_a_renewal_that_fails_is_told_and_the_certificate_stays(tmp_path: Path) -> None:
    certificate, key, context = served_files(tmp_path)
    texts: list[str] = []
    request = CertificateRequest(b"request", ["hub"], NOW_S)
    files = ApiCertificateFiles(certificate, key, request, texts.append)
    await files.refresh(context, OneTimeCertifier(tmp_path, key, fails=True), NOW_S)
    assert served_serial(context) == 1
    assert "the coordinator has no CA" in texts[0]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_an_operator_s_new_files_are_taken_up_if_they_can_be_read(
    tmp_path: Path, *, is_whole: bool
) -> None:
    certificate, key, context = served_files(tmp_path)
    texts: list[str] = []
    files = ApiCertificateFiles(certificate, key, None, texts.append)
    write_certificate(tmp_path, serial=3)
    if not is_whole:
        certificate.write_text("half of it")
    os.utime(certificate, ns=(1, 1))
    await files.refresh(context, OneTimeCertifier(tmp_path, key), NOW_S)
    assert served_serial(context) == (3 if is_whole else 1)
    assert len(texts) == (not is_whole)
