"""Sound receipts pass, and every changed field is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.ids import Address, JobId, Keccak
from hypergpu.statements.contribution import Contribution, contribution_hash
from hypergpu.statements.domain import Domain, Terms, terms_of
from hypergpu.statements.receipt import Receipt, SignedReceipt, receipt_fault
from hypergpu.statements.signing import sign
from hypergpu.units import BasisPoints, Samples
from hypergpu.wire.statements import receipt_message, receipt_value, terms_message, terms_value
from tests.properties.statements.strategies import (
    COORDINATOR,
    JOB,
    TERMS,
    Work,
    contributions,
    domains,
    node_key,
    receipts,
    signed_receipt,
)

NODE = node_key(1)
SOUND = signed_receipt(NODE, Work(round=3, epoch=1), sequence=2, before=1_000)


def fault(signed: SignedReceipt, terms: Terms = TERMS) -> str:
    return receipt_fault(signed, terms.domain, terms.coordinator)


def receipt_with(**changes: object) -> SignedReceipt:
    """The sound receipt with changes that the coordinator signed."""
    receipt: Receipt = replace(SOUND.receipt, **changes)
    signature = sign(COORDINATOR, TERMS.domain.separator(), receipt)
    return replace(SOUND, receipt=receipt, signature=signature)


def test_a_sound_receipt_has_no_fault() -> None:
    assert fault(SOUND) == ""


@pytest.mark.parametrize(
    ("signed", "said"),
    [
        (receipt_with(contribution=Keccak("ab" * 32)), "another contribution"),
        (receipt_with(round=4), "differs from its contribution's"),
        (receipt_with(samples=Samples(321)), "321 samples were checked, 320 assigned"),
        (receipt_with(quality_bps=BasisPoints(10_001)), "10001 of 10000"),
        (receipt_with(total_score=320 * 9_000 - 1), "less than its own"),
        (receipt_with(sequence=2**32 - 1), "a ledger counts"),
        (replace(SOUND, receipt=replace(SOUND.receipt, total_score=9**9)), "did not sign it"),
        (replace(SOUND, contribution_signature=SOUND.signature), "did not sign its contribution"),
        (replace(SOUND, contribution=replace(SOUND.contribution, lease=-1)), "cannot be encoded"),
    ],
)
def test_a_changed_receipt_is_refused_with_its_fault(signed: SignedReceipt, said: str) -> None:
    assert said in fault(signed)


def test_a_receipt_for_another_ledger_is_refused() -> None:
    other = replace(TERMS, domain=Domain(1, TERMS.domain.contract))
    assert "did not sign it" in fault(SOUND, other)


@given(receipt=receipts, contribution=contributions, signature=st.binary(max_size=80))
def test_a_receipt_from_outside_never_raises(
    receipt: Receipt, contribution: Contribution, signature: bytes
) -> None:
    strange = SignedReceipt(
        receipt=receipt,
        signature=signature,
        contribution=contribution,
        contribution_signature=signature,
    )
    assert fault(strange)


@given(contribution=contributions, receipt=receipts)
def test_a_receipt_survives_the_wire(contribution: Contribution, receipt: Receipt) -> None:
    shared = {
        name: getattr(contribution, name) for name in ("job", "epoch", "round", "node", "samples")
    }
    receipt = replace(receipt, contribution=Keccak(contribution_hash(contribution).hex()), **shared)
    signed = replace(SOUND, receipt=receipt, contribution=contribution)
    assert receipt_value(receipt_message(signed), contribution.node) == signed


@given(domain=st.builds(Domain, st.integers(0, 2**64 - 1), domains.map(lambda each: each.contract)))
def test_terms_survive_the_wire_and_name_their_job(domain: Domain) -> None:
    terms = terms_of(COORDINATOR.address, JOB, domain)
    assert terms_value(terms_message(terms, 7)) == terms
    assert terms.match(JOB)
    assert not terms.match(JobId("job-000000000000"))


def test_terms_of_an_owner_are_not_those_of_another() -> None:
    other = Address("0x" + "11" * 20)
    assert terms_of(other, JOB, TERMS.domain).job != TERMS.job
