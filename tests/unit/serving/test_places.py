"""Where the API listens: this machine alone, unless there is TLS."""

from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.serving.api_certificate import called_host
from hypergpu.user.serving.server import ApiPlace

EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is tested


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_plain_http_is_for_this_machine_alone(host: str) -> None:
    ApiPlace(host).check()
    for other in ("192.168.1.5", "::", "hub.example"):
        with pytest.raises(HyperGPUError, match="would show prompts and keys"):
            ApiPlace(other).check()


def test_beyond_it_a_certificate_and_its_key_are_asked_for() -> None:
    certificate, key = Path("hub.pem"), Path("hub.key")
    ApiPlace("hub.example", certificate=certificate, private_key=key).check()
    with pytest.raises(HyperGPUError, match="a certificate and its private key"):
        ApiPlace("hub.example", certificate=certificate).check()


def test_tools_are_told_the_address_as_they_write_it() -> None:
    assert ApiPlace().base_url(8077) == "http://127.0.0.1:8077/v1"
    secure_place = ApiPlace("::1", certificate=Path("a"), private_key=Path("b"))
    assert secure_place.base_url(9) == "https://[::1]:9/v1"


def test_one_that_listens_everywhere_is_told_by_an_address_that_others_can_dial() -> None:
    assert called_host("192.168.1.5") == "192.168.1.5"
    assert called_host("hub.example") == "hub.example"
    assert called_host(EVERYWHERE) not in {"", EVERYWHERE}
    place = ApiPlace(EVERYWHERE, certificate=Path("a"), private_key=Path("b"), called_host="hub")
    assert place.base_url(9) == "https://hub:9/v1"
    assert not place.needs_certificate
    assert ApiPlace(EVERYWHERE).needs_certificate
