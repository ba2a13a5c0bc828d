// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {NodeStakes} from "./NodeStakes.sol";

/// @title How receipts are recorded: totals rise, and what they rise by is allotted.
/// @dev Accounts and shares are packed by hand: the compiler writes a struct's fields one by one, which costs 200 gas for each
/// field after the first, and that for every node of every batch and payment.
abstract contract Recording is NodeStakes {
    using SafeCast for uint256;

    bytes32 private constant RECEIPT = keccak256(
        "Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,bytes32 contribution,"
        "uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
    );
    uint256 private constant PRICED_SCORE = 1_000_000;

    mapping(bytes32 job => mapping(uint32 epoch => Epoch)) internal _epochs;
    /// @dev From the lowest bit: `amount[96] state[8] paidIn[16]`. `paidIn` is the stake's period whose lock covers the payment.
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => uint256))) internal _shares;
    /// @dev From the lowest bit: `counted[32] score[64] earned[96]`.
    mapping(bytes32 job => mapping(address node => uint256)) private _accounts;

    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes32[] calldata entries) external {
        JobRecord storage record = _running(job);
        if (msg.sender != record.coordinator) revert NotCoordinator(msg.sender);
        if (seq != record.nextSeq) revert WrongSequence(record.nextSeq, seq);
        epoch = _firstOpen(job, epoch);
        mapping(address node => uint256) storage accounts = _accounts[job];
        mapping(address node => uint256) storage shares = _shares[job][epoch];
        (uint256 price, uint256 free) = (record.unitPrice, record.free);
        for (uint256 i = 0; i < entries.length; ++i) {
            uint256 entry = uint256(entries[i]);
            address node = address(uint160(entry >> 96));
            uint256 account = accounts[node];
            // forge-lint: disable-next-line(unsafe-typecast)
            (uint256 raised, uint256 delta) = _raise(account, uint32(entry >> 64), uint64(entry), price, free);
            if (raised != account) accounts[node] = raised;
            if (delta == 0) continue;
            shares[node] = _withMore(shares[node], delta);
            free -= delta;
        }
        record.free = uint96(free);
        record.nextSeq = seq + 1;
        emit BatchRecorded(job, epoch, seq, root);
    }

    function submitContribution(
        Receipt calldata receipt,
        bytes calldata nodeSignature,
        bytes calldata coordinatorSignature,
        uint32 epoch
    ) external {
        JobRecord storage record = _running(receipt.job);
        if (epoch != receipt.epoch && (epoch < receipt.epoch || _epochs[receipt.job][epoch - 1].closedAt == 0)) {
            revert WrongEpoch(epoch);
        }
        _requireSigned(receipt.node, receipt.contribution, nodeSignature);
        // A struct of static fields encodes as its fields, as EIP-712 asks.
        _requireSigned(record.coordinator, keccak256(abi.encode(RECEIPT, receipt)), coordinatorSignature);
        _recordOne(record, receipt, _firstOpen(receipt.job, epoch));
    }

    function getAccount(bytes32 job, address node) public view returns (Account memory) {
        uint256 account = _accounts[job][node];
        return Account(uint32(account), uint64(account >> 32), uint96(account >> 96));
    }

    /// @dev The share once it is paid, in a period of the stake, or void.
    function _settled(uint256 share, ShareState state, uint16 period) internal pure returns (uint256) {
        return uint96(share) | uint256(state) << 96 | uint256(period) << 104;
    }

    function _stateOf(uint256 share) internal pure returns (ShareState) {
        return ShareState(uint8(share >> 96));
    }

    function _recordOne(JobRecord storage record, Receipt calldata receipt, uint32 epoch) private {
        (bytes32 job, address node) = (receipt.job, receipt.node);
        uint256 account = _accounts[job][node];
        uint256 count = (uint256(receipt.sequence) + 1).toUint32();
        (uint256 raised, uint256 delta) = _raise(account, count, receipt.totalScore, record.unitPrice, record.free);
        if (raised == account) revert NothingNew();
        _accounts[job][node] = raised;
        if (delta != 0) _shares[job][epoch][node] = _withMore(_shares[job][epoch][node], delta);
        record.free -= uint96(delta);
        emit ContributionRecorded(job, node, epoch, receipt.sequence, receipt.totalScore, delta);
    }

    /// @dev The account with its totals raised to what is given, and with what it earns by that. The sum of all that a node
    /// earns in a job must fit its field.
    function _raise(uint256 account, uint256 counted, uint256 score, uint256 unitPrice, uint256 free)
        private
        pure
        returns (uint256 raised, uint256 delta)
    {
        if (counted < uint32(account)) counted = uint32(account);
        if (score < uint64(account >> 32)) score = uint64(account >> 32);
        unchecked {
            uint256 earned = account >> 96;
            delta = unitPrice * score / PRICED_SCORE - earned; // 128 and 64 bits; worth never falls below what was earned.
            if (delta > free) delta = free;
            raised = uint256((earned + delta).toUint96()) << 96 | score << 32 | counted;
        }
    }

    /// @dev The share of an open epoch with more due. No share exceeds what its node earned.
    function _withMore(uint256 share, uint256 delta) private pure returns (uint256) {
        return uint256(ShareState.DUE) << 96 | (uint96(share) + delta);
    }

    /// @dev The first epoch from `epoch` on that is not closed; it counts as opened from now on.
    function _firstOpen(bytes32 job, uint32 epoch) private returns (uint32) {
        mapping(uint32 epoch => Epoch) storage epochs = _epochs[job];
        while (epochs[epoch].closedAt != 0) ++epoch;
        if (epochs[epoch].openedAt == 0) epochs[epoch].openedAt = _after(0);
        return epoch;
    }
}
