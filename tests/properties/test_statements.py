"""Statements against eth_account, and sound receipts against every changed field."""

from typing import Any

import pytest
from eth_account import Account
from eth_account.messages import _hash_eip191_message, encode_typed_data
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from hypergpu.crypto import (
    IdentityKey,
    chain_form,
    keccak,
    sign,
    signed_digest,
    signer,
    struct_hash,
)
from hypergpu.ids import Address, Digest, JobId, Keccak, NodeId
from hypergpu.ledger_terms import Domain, Terms, terms_of
from hypergpu.protocol import PROTOCOL
from hypergpu.statements import (
    Contribution,
    Receipt,
    SignedReceipt,
    contribution_hash,
    is_signed_by,
    receipt_fault,
    shard_digest,
)
from hypergpu.units import BasisPoints, Samples
from hypergpu.wire.messages import receipt_message, receipt_value, terms_message, terms_value
from tests.properties.statements import (
    COORDINATOR,
    JOB,
    TERMS,
    Work,
    contributions,
    domains,
    keys,
    node_key,
    receipts,
    signed_receipt,
    statements,
    u32,
    u64,
)

TYPES = {
    "Contribution": "bytes32 job,uint32 epoch,uint32 round,address node,bytes32 shard,"
    "bytes32 model,bytes32 update,uint64 samples,uint32 innerSteps,uint64 computeMs,"
    "uint64 updateBytes,uint64 lease,uint64 nonce",
    "Receipt": "bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,"
    "bytes32 contribution,uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore",
}


def test_typed_data_changes_only_together_with_the_protocol() -> None:
    declared_types = ";".join(f"{name}({TYPES[name]})" for name in sorted(TYPES))
    assert (PROTOCOL, keccak(declared_types.encode()).hex()[:16]) == (7, "7e034aaf4c31176f")


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def typed_message(domain: Domain, statement: Contribution | Receipt) -> dict[str, Any]:
    """The statement as wallets show it."""
    kind = type(statement).__name__
    fields = [field.split() for field in TYPES[kind].split(",")]
    message = {camel(name): value for name, value in asdict(statement).items()}
    return {
        "domain": {
            "name": "HyperGPU",
            "version": "2",
            "chainId": domain.chain_id,
            "verifyingContract": domain.contract,
        },
        "types": {
            "EIP712Domain": [
                {"name": "name", "type": "string"},
                {"name": "version", "type": "string"},
                {"name": "chainId", "type": "uint256"},
                {"name": "verifyingContract", "type": "address"},
            ],
            kind: [{"name": name, "type": type_} for type_, name in fields],
        },
        "primaryType": kind,
        "message": {
            name: "0x" + message[name] if type_ == "bytes32" else message[name]
            for type_, name in fields
        },
    }


@given(domain=domains, statement=statements)
def test_statements_have_the_digests_that_wallets_compute(
    domain: Domain, statement: Contribution | Receipt
) -> None:
    encoded_statement = encode_typed_data(full_message=typed_message(domain, statement))
    statement_hash = struct_hash(statement)
    assert encoded_statement.header == domain.separator()
    assert encoded_statement.body == statement_hash
    assert _hash_eip191_message(encoded_statement) == signed_digest(
        domain.separator(), statement_hash
    )


@given(domain=domains, statement=statements, key=keys)
def test_a_wallet_and_we_sign_alike(
    domain: Domain, statement: Contribution | Receipt, key: IdentityKey
) -> None:
    message = encode_typed_data(full_message=typed_message(domain, statement))
    signature = sign(key, domain.separator(), statement)
    assert chain_form(signature) == Account.sign_message(message, key.secret).signature
    assert Account.recover_message(message, signature=chain_form(signature)).lower() == key.node_id
    assert signer(domain.separator(), statement, signature) == key.node_id


@given(domain=domains, other=domains, statement=statements, key=keys)
def test_a_signature_counts_in_its_own_domain_only(
    domain: Domain, other: Domain, statement: Contribution | Receipt, key: IdentityKey
) -> None:
    signature = sign(key, domain.separator(), statement)
    in_other = signer(other.separator(), statement, signature) == key.node_id
    assert in_other == (domain == other)


@given(first=statements, second=statements)
def test_two_statements_never_share_a_digest(
    first: Contribution | Receipt, second: Contribution | Receipt
) -> None:
    assert (struct_hash(first) == struct_hash(second)) == (first == second)


@given(contribution=contributions, key=keys, other=keys)
def test_a_contribution_counts_for_the_node_that_it_names_and_that_signed_it(
    contribution: Contribution, key: IdentityKey, other: IdentityKey
) -> None:
    separator = Domain().separator()
    own = replace(contribution, node=key.node_id)
    assert is_signed_by(key.node_id, separator, own, sign(key, separator, own))
    foreign = replace(contribution, node=NodeId("0x" + "11" * 20))
    assert not is_signed_by(key.node_id, separator, foreign, sign(key, separator, foreign))
    if key.node_id != other.node_id:
        assert not is_signed_by(key.node_id, separator, own, sign(other, separator, own))


@given(statement=statements, signature=st.binary(max_size=80))
def test_bytes_from_outside_never_raise(
    statement: Contribution | Receipt, signature: bytes
) -> None:
    recovered_signer = signer(Domain().separator(), statement, signature)
    assert recovered_signer is None or len(signature) == 65


@given(receipt=receipts)
def test_a_receipt_that_cannot_be_encoded_has_no_signer(receipt: Receipt) -> None:
    separator = Domain().separator()
    for broken_receipt in (
        replace(receipt, quality_bps=BasisPoints(65_536)),
        replace(receipt, round=-1),
        replace(receipt, sequence=2**64),
        replace(receipt, total_score=2**64),
        replace(receipt, node=NodeId(receipt.node.upper())),
        replace(receipt, contribution=receipt.contribution[:-2]),
        # `bytes.fromhex` skips blanks, and the packing would fill up with zeros.
        replace(receipt, contribution="  " + receipt.contribution[2:]),
    ):
        with pytest.raises(ValueError, match=r"address|64 lower-case|does not fit"):
            struct_hash(broken_receipt)
        assert signer(separator, broken_receipt, bytes(65)) is None


ranges = st.lists(st.tuples(u64, u64.map(Samples)), max_size=4)


@given(partition=u32, first=ranges, second=ranges)
def test_a_shards_digest_tells_all_of_its_ranges_apart(
    partition: int, first: list[tuple[int, Samples]], second: list[tuple[int, Samples]]
) -> None:
    same = shard_digest(partition, first) == shard_digest(partition, second)
    assert same == (first == second)
    assert shard_digest(partition, first) != shard_digest(partition ^ 1, first)


def test_a_range_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        shard_digest(0, [(-1, Samples(3))])


def test_keccak_is_ethereums() -> None:
    # EIP-1052 gives the digest of the empty string.
    empty = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert keccak(b"").hex() == empty
    assert Digest(empty) != shard_digest(0, [])


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
    shared_fields = {
        name: getattr(contribution, name) for name in ("job", "epoch", "round", "node", "samples")
    }
    receipt = replace(
        receipt, contribution=Keccak(contribution_hash(contribution).hex()), **shared_fields
    )
    signed_receipt = replace(SOUND, receipt=receipt, contribution=contribution)
    assert receipt_value(receipt_message(signed_receipt), contribution.node) == signed_receipt


@given(domain=st.builds(Domain, st.integers(0, 2**64 - 1), domains.map(lambda each: each.contract)))
def test_terms_survive_the_wire_and_name_their_job(domain: Domain) -> None:
    terms = terms_of(COORDINATOR.address, JOB, domain)
    assert terms_value(terms_message(terms, 7)) == terms
    assert terms.match(JOB)
    assert not terms.match(JobId("job-000000000000"))


def test_terms_of_an_owner_are_not_those_of_another() -> None:
    other = Address("0x" + "11" * 20)
    assert terms_of(other, JOB, TERMS.domain).job != TERMS.job
