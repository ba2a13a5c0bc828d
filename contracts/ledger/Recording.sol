// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {NodeStakes} from "./NodeStakes.sol";

/// @title How receipts are recorded: totals rise, and what they rise by is allotted.
abstract contract Recording is NodeStakes {
    using SafeCast for uint256;

    /// @param paidIn The stake's period whose lock covers the payment; of use inside the challenge window alone.
    struct Cell {
        uint96 amount;
        ShareState state;
        uint16 paidIn;
    }

    bytes32 private constant RECEIPT = keccak256(
        "Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,bytes32 contribution,"
        "uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
    );
    uint256 private constant PRICED_SCORE = 1_000_000;

    mapping(bytes32 job => mapping(uint32 epoch => Epoch)) internal _epochs;
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => Cell))) internal _cells;
    mapping(bytes32 job => mapping(address node => Account)) private _accounts;

    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes32[] calldata entries) external {
        JobRecord storage record = _running(job);
        if (msg.sender != record.coordinator) revert NotCoordinator(msg.sender);
        if (seq != record.nextSeq) revert WrongSequence(record.nextSeq, seq);
        epoch = _firstOpen(job, epoch);
        mapping(address node => Account) storage accounts = _accounts[job];
        mapping(address node => Cell) storage cells = _cells[job][epoch];
        (uint256 price, uint256 free) = (record.unitPrice, record.free);
        for (uint256 i = 0; i < entries.length; ++i) {
            uint256 entry = uint256(entries[i]);
            address node = address(uint160(entry >> 96));
            // forge-lint: disable-next-line(unsafe-typecast)
            (, uint256 delta) = _raise(accounts[node], cells[node], uint32(entry >> 64), uint64(entry), price, free);
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
        (bytes32 job, address node) = (receipt.job, receipt.node);
        JobRecord storage record = _running(job);
        if (epoch != receipt.epoch && (epoch < receipt.epoch || _epochs[job][epoch - 1].closedAt == 0)) {
            revert WrongEpoch(epoch);
        }
        _requireSigned(node, receipt.contribution, nodeSignature);
        // A struct of static fields encodes as its fields, as EIP-712 asks.
        _requireSigned(record.coordinator, keccak256(abi.encode(RECEIPT, receipt)), coordinatorSignature);
        epoch = _firstOpen(job, epoch);
        uint32 count = (uint256(receipt.sequence) + 1).toUint32();
        (bool isNew, uint256 delta) = _raise(
            _accounts[job][node], _cells[job][epoch][node], count, receipt.totalScore, record.unitPrice, record.free
        );
        if (!isNew) revert NothingNew();
        record.free -= uint96(delta);
        emit ContributionRecorded(job, node, epoch, receipt.sequence, receipt.totalScore, delta);
    }

    function getAccount(bytes32 job, address node) public view returns (Account memory) {
        return _accounts[job][node];
    }

    /// @dev Raise a node's totals to what is given, and add what it earns by that to its share of an open epoch.
    function _raise(
        Account storage account,
        Cell storage cell,
        uint32 count,
        uint64 total,
        uint256 unitPrice,
        uint256 free
    ) private returns (bool isNew, uint256 delta) {
        Account memory raised = account;
        isNew = count > raised.counted || total > raised.score;
        if (count > raised.counted) raised.counted = count;
        if (total > raised.score) raised.score = total;
        delta = unitPrice * raised.score / PRICED_SCORE - raised.earned; // 128 and 64 bits.
        if (delta > free) delta = free;
        isNew = isNew || delta != 0;
        if (!isNew) return (false, 0);
        raised.earned = (raised.earned + delta).toUint96();
        (account.counted, account.score, account.earned) = (raised.counted, raised.score, raised.earned);
        if (delta != 0) (cell.amount, cell.state) = (uint96(cell.amount + delta), ShareState.DUE); // At most `earned`.
    }

    /// @dev The first epoch from `epoch` on that is not closed; it counts as opened from now on.
    function _firstOpen(bytes32 job, uint32 epoch) private returns (uint32) {
        mapping(uint32 epoch => Epoch) storage epochs = _epochs[job];
        while (epochs[epoch].closedAt != 0) ++epoch;
        if (epochs[epoch].openedAt == 0) epochs[epoch].openedAt = _after(0);
        return epoch;
    }
}
