// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Packed} from "../libraries/Packed.sol";
import {Shares} from "../libraries/Shares.sol";
import {Cell, Line, Slots} from "../libraries/Slots.sol";
import {TypedData} from "../libraries/TypedData.sol";
import {NodeStakes} from "./NodeStakes.sol";

/// @title How receipts get onto the chain, each once.
/// @dev `counted` is the one guard: whatever records a receipt starts there and moves it.
abstract contract Recording is NodeStakes, ITrainingLedger {
    using SafeCast for uint256;
    using Slots for uint256;
    using Slots for Epoch;
    using TypedData for Receipt;

    /// @dev What vouchers did to a node in a job.
    /// @param advance Paid or pending beyond `earned`; later shares make it good.
    struct Promises {
        uint96 advance;
        uint96 voided;
        uint40 releaseAt;
        bool isBarred;
        uint96 pending;
    }

    /// @dev A node in a job. Batches and most payments touch `line` alone.
    struct NodeInJob {
        Line line;
        Promises promises;
    }

    /// @dev A node's share of an epoch. A struct of one field can be pointed to, and its slot is computed once.
    struct Share {
        Cell cell;
    }

    mapping(bytes32 job => bytes32) public digestOf;
    mapping(bytes32 job => mapping(uint32 epoch => uint256 epoch_)) private _epochs;
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => Share))) internal _shares;
    mapping(bytes32 job => mapping(address node => NodeInJob)) internal _members;

    function submitContribution(
        Receipt calldata receipt,
        bytes calldata nodeSignature,
        bytes calldata coordinatorSignature,
        uint32 epoch
    ) external {
        JobRecord storage record = _running(receipt.job);
        if (receipt.qualityBps > Shares.FULL_QUALITY_BPS) revert QualityOutOfRange(receipt.qualityBps);
        if (epoch < receipt.epoch) revert EpochIsClosed(epoch);
        if (epoch > receipt.epoch) {
            _closed(receipt.job, receipt.epoch);
            _closed(receipt.job, epoch - 1);
        }
        NodeInJob storage member = _members[receipt.job][receipt.node];
        Line line = member.line;
        uint48 counted = line.counted();
        if (receipt.sequence != counted) revert NotNext(counted, receipt.sequence);
        _requireSigned(receipt.node, receipt.contribution, nodeSignature);
        _requireSigned(record.coordinator, receipt.hash(), coordinatorSignature);
        uint80 score = (uint256(receipt.samples) * receipt.qualityBps).toUint80();
        NodeTotals memory totals = NodeTotals(receipt.node, counted, 1, receipt.samples, score);
        _record(_shares[receipt.job][epoch][receipt.node], member, line, totals);
        _raiseTotal(receipt.job, epoch, score);
        emit ContributionForced(receipt.job, receipt.node, epoch, counted, score);
    }

    function submitContributions(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes calldata packed)
        external
        whenNotPaused
    {
        _takeSequence(job, seq);
        mapping(address node => Share) storage shares = _shares[job][epoch];
        mapping(address node => NodeInJob) storage members = _members[job];
        uint256 score;
        uint256 offset;
        while (offset < packed.length) {
            NodeTotals memory totals;
            (totals, offset) = _unpacked(members, packed, offset);
            score += _recordNext(shares, members, job, seq, totals);
        }
        _raiseTotal(job, epoch, score);
        _advanceDigest(job, epoch, seq, root, keccak256(packed));
    }

    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, NodeTotals[] calldata totals)
        external
        whenNotPaused
    {
        _takeSequence(job, seq);
        mapping(address node => Share) storage shares = _shares[job][epoch];
        mapping(address node => NodeInJob) storage members = _members[job];
        uint256 score;
        for (uint256 i = 0; i < totals.length; ++i) {
            NodeTotals memory one = totals[i];
            unchecked {
                // 64 and 14 bits; scores of 80 bits, and fewer than 2^32 of them.
                if (one.receipts == 0 || one.score > uint256(one.samples) * Shares.FULL_QUALITY_BPS) {
                    revert BadTotals(one.node);
                }
                score += _recordNext(shares, members, job, seq, one);
            }
        }
        _raiseTotal(job, epoch, score);
        _advanceDigest(job, epoch, seq, root, Packed.hashOfWords(totals));
    }

    /// @dev Read one node's part of a packed batch, passing over receipts that are recorded already.
    function _unpacked(mapping(address node => NodeInJob) storage members, bytes calldata packed, uint256 offset)
        private
        view
        returns (NodeTotals memory totals, uint256 next)
    {
        uint256 given;
        (totals.node, totals.firstSequence, given) = Packed.head(packed, offset);
        uint256 counted = members[totals.node].line.counted();
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

    /// @dev The epoch, if it is closed.
    function _closed(bytes32 job, uint32 epoch) internal view returns (Epoch memory closed) {
        closed = _epoch(job, epoch);
        if (closed.closedAt == 0) revert EpochIsOpen(epoch);
    }

    function _setEpoch(bytes32 job, uint32 epoch, Epoch memory held) internal {
        _epochs[job][epoch] = held.pack();
    }

    /// @dev Record a node's part of a batch where it starts at `counted`, and skip it where it does not.
    /// @return What the epoch's score rises by.
    function _recordNext(
        mapping(address node => Share) storage shares,
        mapping(address node => NodeInJob) storage members,
        bytes32 job,
        uint32 seq,
        NodeTotals memory totals
    ) private returns (uint256) {
        NodeInJob storage member = members[totals.node];
        Line line = member.line;
        if (totals.firstSequence != line.counted()) {
            emit NodeSkipped(job, totals.node, seq, totals.firstSequence, line.counted());
            return 0;
        }
        if (totals.receipts == 0) return 0;
        _record(shares[totals.node], member, line, totals);
        return totals.score;
    }

    /// @dev Record receipts of one node that start at what its `line` has counted.
    function _record(Share storage share, NodeInJob storage member, Line line, NodeTotals memory totals) private {
        share.cell = share.cell.plus(totals);
        member.line = line.plus(totals);
    }

    /// @dev Every record ends here: an epoch that is closed takes nothing more.
    function _raiseTotal(bytes32 job, uint32 epoch, uint256 score) private {
        Epoch memory held = _epoch(job, epoch);
        if (held.closedAt != 0) revert EpochIsClosed(epoch);
        if (held.openedAt == 0) held.openedAt = block.timestamp.toUint32();
        uint256 total = score + held.totalScore;
        held.totalScore = total.toUint88();
        _setEpoch(job, epoch, held);
    }

    function _advanceDigest(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes32 payload) private {
        bytes32 digest = keccak256(abi.encode(digestOf[job], seq, epoch, root, payload));
        digestOf[job] = digest;
        emit BatchSubmitted(job, epoch, seq, root, digest);
    }
}
