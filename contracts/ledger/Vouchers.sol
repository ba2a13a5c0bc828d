// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Line} from "../libraries/Slots.sol";
import {TypedData} from "../libraries/TypedData.sol";
import {Payments} from "./Payments.sol";

/// @title Pay on the coordinator's word alone, out of what is free.
/// @dev Never at once: a claim has no share behind it that a verdict could void, so it can be stopped only while it waits.
abstract contract Vouchers is Payments {
    using SafeCast for uint256;
    using TypedData for Voucher;

    function redeemVoucher(Voucher calldata voucher, bytes calldata coordinatorSignature)
        external
        nonReentrant
        returns (uint256 amount)
    {
        (bytes32 job, address node) = (voucher.job, voucher.node);
        if (msg.sender != node) revert NotNode();
        JobRecord storage record = _opened(job);
        NodeInJob storage member = _members[job][node];
        Promises memory promises = member.promises;
        if (promises.isBarred) revert NodeIsBarred();
        if (promises.pending != 0) revert ClaimPending(promises.releaseAt);
        _requireSigned(record.coordinator, voucher.hash(), coordinatorSignature);

        Line line = member.line;
        uint256 had = uint256(line.earned()) + promises.advance + promises.voided;
        if (voucher.amount <= had) revert NothingDue();
        amount = voucher.amount - had;
        uint96 spendable = _spendable(record);
        if (amount > spendable) amount = spendable;
        if (amount == 0) revert NothingDue();

        uint96 due = amount.toUint96();
        _reserve(job, due);
        promises.advance += due;
        promises.pending = due;
        promises.releaseAt = _after(CHALLENGE_WINDOW);
        member.promises = promises;
        member.line = line.withEarned(line.earned(), true);
        emit VoucherRedeemed(job, node, due, promises.releaseAt);
    }

    function releaseVoucher(bytes32 job, address node) external nonReentrant {
        Promises storage promises = _members[job][node].promises;
        uint96 amount = promises.pending;
        if (amount == 0) revert NothingDue();
        _requireReached(promises.releaseAt);
        promises.pending = 0;
        emit VoucherPaid(job, node, amount);
        _push(node, amount);
    }
}
