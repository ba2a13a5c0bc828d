// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Packed} from "../libraries/Packed.sol";
import {Shares} from "../libraries/Shares.sol";
import {Slots} from "../libraries/Slots.sol";
import {TypedData} from "../libraries/TypedData.sol";
import {NodeStakes} from "./NodeStakes.sol";

/// @title How receipts get onto the chain, each once.
/// @dev `counted` is the one guard: whatever records a receipt starts there and moves it.
abstract contract Recording is NodeStakes, ITrainingLedger {
    using SafeCast for uint256;
    using Slots for *;
    using TypedData for Receipt;

    mapping(bytes32 job => bytes32) public digestOf;
    mapping(bytes32 job => mapping(uint32 epoch => uint256 epoch_)) private _epochs;
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => uint256 cell))) private _cells;
    mapping(bytes32 job => mapping(address node => uint256 line)) private _lines;

    function submitContribution(
        Receipt calldata receipt,
        bytes calldata nodeSignature,
        bytes calldata coordinatorSignature,
        uint32 epoch
    ) external {
        JobRecord storage record = _running(receipt.job);
        if (receipt.qualityBps > Shares.FULL_QUALITY_BPS) revert QualityOutOfRange(receipt.qualityBps);
        if (epoch < receipt.epoch) revert EpochIsClosed(epoch);
        if (epoch > receipt.epoch && _epoch(receipt.job, receipt.epoch).closedAt == 0) {
            revert EpochIsOpen(receipt.epoch);
        }
        uint48 counted = _line(receipt.job, receipt.node).counted;
        if (receipt.sequence != counted) revert NotNext(counted, receipt.sequence);
        _requireSigned(receipt.node, receipt.contribution, nodeSignature);
        _requireSigned(record.coordinator, receipt.hash(), coordinatorSignature);
        uint80 score = (uint256(receipt.samples) * receipt.qualityBps).toUint80();
        _record(receipt.job, epoch, NodeTotals(receipt.node, counted, 1, receipt.samples, score));
        _raiseTotal(receipt.job, epoch, score);
        emit ContributionForced(receipt.job, receipt.node, epoch, counted, score);
    }

    function submitContributions(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes calldata packed)
        external
        whenNotPaused
    {
        _takeSequence(job, seq);
        uint256 score;
        uint256 offset;
        while (offset < packed.length) {
            NodeTotals memory totals;
            uint256 counted;
            (totals, counted, offset) = _unpacked(job, packed, offset);
            if (totals.firstSequence != counted) {
                emit NodeSkipped(job, totals.node, seq, totals.firstSequence, counted);
            } else if (totals.receipts != 0) {
                _record(job, epoch, totals);
                score += totals.score;
            }
        }
        _raiseTotal(job, epoch, score);
        _advanceDigest(job, epoch, seq, root, keccak256(packed));
    }

    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, NodeTotals[] calldata totals)
        external
        whenNotPaused
    {
        _takeSequence(job, seq);
        uint256 score;
        for (uint256 i = 0; i < totals.length; ++i) {
            NodeTotals memory one = totals[i];
            if (one.receipts == 0 || one.score > uint256(one.samples) * Shares.FULL_QUALITY_BPS) {
                revert BadTotals(one.node);
            }
            uint256 counted = _line(job, one.node).counted;
            if (one.firstSequence != counted) {
                emit NodeSkipped(job, one.node, seq, one.firstSequence, counted);
            } else {
                _record(job, epoch, one);
                score += one.score;
            }
        }
        _raiseTotal(job, epoch, score);
        _advanceDigest(job, epoch, seq, root, Packed.hashOfWords(totals));
    }

    /// @dev Read one node's part of a packed batch, passing over receipts that are recorded already.
    function _unpacked(bytes32 job, bytes calldata packed, uint256 offset)
        private
        view
        returns (NodeTotals memory totals, uint256 counted, uint256 next)
    {
        uint256 given;
        (totals.node, totals.firstSequence, given) = Packed.head(packed, offset);
        counted = _line(job, totals.node).counted;
        uint256 first = offset + Packed.HEAD_BYTES;
        next = first + given * Packed.RECEIPT_BYTES;
        if (given == 0 || next > packed.length) revert BadPacking(offset);
        if (totals.firstSequence < counted) {
            uint256 known = counted - totals.firstSequence;
            if (known > given) known = given;
            // forge-lint: disable-next-line(unsafe-typecast)
            totals.firstSequence += uint48(known); // At most `counted`, which has 48 bits.
            given -= known;
            first += known * Packed.RECEIPT_BYTES;
        }
        // forge-lint: disable-next-line(unsafe-typecast)
        totals.receipts = uint32(given); // Two bytes in the head.
        (totals.samples, totals.score) = Packed.sums(packed, first, next);
    }

    function _epoch(bytes32 job, uint32 epoch) internal view returns (Epoch memory) {
        return _epochs[job][epoch].toEpoch();
    }

    function _setEpoch(bytes32 job, uint32 epoch, Epoch memory held) internal {
        _epochs[job][epoch] = held.pack();
    }

    function _cell(bytes32 job, uint32 epoch, address node) internal view returns (Slots.Cell memory) {
        return _cells[job][epoch][node].toCell();
    }

    function _setCell(bytes32 job, uint32 epoch, address node, Slots.Cell memory held) internal {
        _cells[job][epoch][node] = held.pack();
    }

    function _line(bytes32 job, address node) internal view returns (Slots.Line memory) {
        return _lines[job][node].toLine();
    }

    function _setLine(bytes32 job, address node, Slots.Line memory held) internal {
        _lines[job][node] = held.pack();
    }

    /// @dev Record receipts of one node that start at `counted`.
    function _record(bytes32 job, uint32 epoch, NodeTotals memory totals) private {
        Slots.Cell memory cell = _cell(job, epoch, totals.node);
        cell.score += totals.score;
        cell.receipts += totals.receipts;
        cell.state = ShareState.DUE;
        _setCell(job, epoch, totals.node, cell);
        Slots.Line memory line = _line(job, totals.node);
        line.counted += totals.receipts;
        line.samples += totals.samples;
        _setLine(job, totals.node, line);
    }

    /// @dev Every record ends here: an epoch that is closed takes nothing more.
    function _raiseTotal(bytes32 job, uint32 epoch, uint256 score) private {
        Epoch memory held = _epoch(job, epoch);
        if (held.closedAt != 0) revert EpochIsClosed(epoch);
        if (held.openedAt == 0) held.openedAt = block.timestamp.toUint32();
        held.totalScore = (held.totalScore + score).toUint88();
        _setEpoch(job, epoch, held);
    }

    function _advanceDigest(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes32 payload) private {
        bytes32 digest = keccak256(abi.encode(digestOf[job], seq, epoch, root, payload));
        digestOf[job] = digest;
        emit BatchSubmitted(job, epoch, seq, root, digest);
    }
}
