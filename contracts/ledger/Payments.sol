// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Shares} from "../libraries/Shares.sol";
import {Slots} from "../libraries/Slots.sol";
import {Recording} from "./Recording.sol";

/// @title Closing epochs and paying shares.
/// @dev Of everything that a node gets in a job, `earned + advance` is the sum: shares raise `earned` and use up the
/// advance first, vouchers raise the advance. Neither way can pay what the other has paid.
abstract contract Payments is Recording {
    using SafeCast for uint256;

    uint256 private constant MOST_PAYEES = 250;

    /// @dev What vouchers did to a node in a job.
    /// @param advance Paid or pending beyond `earned`; later shares make it good.
    struct Promises {
        uint96 advance;
        uint96 voided;
        uint40 releaseAt;
        bool isBarred;
        uint96 pending;
    }

    mapping(bytes32 job => mapping(address node => Promises)) internal _promises;

    function closeEpoch(bytes32 job, uint32 epoch) external returns (uint256 pool) {
        JobRecord storage record = _opened(job);
        Epoch memory held = _epoch(job, epoch);
        if (held.closedAt != 0) revert EpochIsClosed(epoch);
        if (msg.sender != record.coordinator && msg.sender != record.owner && record.endsAt == 0) {
            if (held.openedAt == 0) revert NotCoordinator(msg.sender);
            _requireReached(uint256(held.openedAt) + UNBONDING);
        }
        held.pool = Shares.pool(record.unitPrice, held.totalScore, record.hot.free);
        held.closedAt = block.timestamp.toUint32();
        _setEpoch(job, epoch, held);
        _reserve(job, held.pool);
        emit EpochClosed(job, epoch, held.pool, held.totalScore);
        return held.pool;
    }

    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes)
        external
        nonReentrant
        returns (uint256 total)
    {
        if (nodes.length > MOST_PAYEES) revert TooManyNodes(nodes.length, MOST_PAYEES);
        Epoch memory closed = _closed(job, epoch);
        bool isFinal = _isFinal(closed);
        if (!isFinal && paused()) revert TooEarly(uint256(closed.closedAt) + CHALLENGE_WINDOW);
        uint256 madeGood;
        for (uint256 i = 0; i < nodes.length; ++i) {
            (uint256 paid, uint256 returned) = _settle(job, epoch, nodes[i], closed, isFinal);
            total += paid;
            madeGood += returned;
        }
        _release(job, madeGood);
    }

    function sweepDust(bytes32 job, uint32 epoch, address[] calldata nodes) external returns (uint256 dust) {
        Epoch memory closed = _closed(job, epoch);
        if (closed.swept) revert AlreadySwept();
        uint256 score;
        uint256 shares;
        address last;
        for (uint256 i = 0; i < nodes.length; ++i) {
            if (nodes[i] <= last) revert NotAscending(nodes[i]);
            last = nodes[i];
            uint80 one = _cell(job, epoch, last).score;
            score += one;
            shares += Shares.share(closed.pool, one, closed.totalScore);
        }
        if (score != closed.totalScore) revert NodesMissing(closed.totalScore, score);
        closed.swept = true;
        _setEpoch(job, epoch, closed);
        dust = closed.pool - shares;
        _release(job, dust);
        emit DustSwept(job, epoch, dust);
    }

    function calculateRewards(bytes32 job, uint32 epoch, address node) external view returns (uint256) {
        return _reward(job, epoch, node);
    }

    function getContribution(bytes32 job, uint32 epoch, address node) external view returns (Contribution memory) {
        Slots.Cell memory cell = _cell(job, epoch, node);
        return Contribution(cell.state, cell.receipts, cell.score, _reward(job, epoch, node), cell.paid);
    }

    function getEpoch(bytes32 job, uint32 epoch) external view returns (Epoch memory) {
        return _epoch(job, epoch);
    }

    function getAccount(bytes32 job, address node) public view returns (Account memory) {
        Slots.Line memory line = _line(job, node);
        Promises memory promises = _promises[job][node];
        return Account({
            counted: line.counted,
            samples: line.samples,
            earned: line.earned,
            paid: line.earned + promises.advance - promises.pending,
            pending: promises.pending,
            releaseAt: promises.releaseAt,
            voided: promises.voided,
            isBarred: promises.isBarred
        });
    }

    function getNodeMetrics(address node, bytes32[] calldata jobs) external view returns (NodeMetrics memory metrics) {
        Registration storage registration = _registrations[node];
        metrics.id = registration.id;
        metrics.meta = registration.meta;
        metrics.staked = _stakeNow(node).staked;
        metrics.locked = _lockedOf(node).toUint96();
        metrics.credit = _creditOf(node);
        for (uint256 i = 0; i < jobs.length; ++i) {
            Account memory account = getAccount(jobs[i], node);
            metrics.receipts += account.counted;
            metrics.samples += account.samples;
            metrics.earned += account.earned;
            metrics.paid += account.paid;
        }
    }

    /// @dev The epoch, if it is closed.
    function _closed(bytes32 job, uint32 epoch) internal view returns (Epoch memory closed) {
        closed = _epoch(job, epoch);
        if (closed.closedAt == 0) revert EpochIsOpen(epoch);
    }

    /// @dev Whether an epoch's challenge window is over.
    function _isFinal(Epoch memory closed) internal view returns (bool) {
        return block.timestamp >= uint256(closed.closedAt) + CHALLENGE_WINDOW;
    }

    /// @dev Pay one share where that can be done now. State first, the transfer last.
    /// @return paid What the node got.
    /// @return returned What an advance had paid already: the job's again.
    function _settle(bytes32 job, uint32 epoch, address node, Epoch memory closed, bool isFinal)
        private
        returns (uint256 paid, uint256 returned)
    {
        Slots.Cell memory cell = _cell(job, epoch, node);
        if (cell.state != ShareState.DUE) return (0, 0);
        Slots.Line memory line = _line(job, node);
        uint96 reward = Shares.share(closed.pool, cell.score, closed.totalScore);
        uint96 advance = line.hasAdvance ? _promises[job][node].advance : 0;
        uint96 used = advance < reward ? advance : reward;
        cell.paid = reward - used;
        if (!isFinal) {
            if (!_tryLock(node, cell.paid)) return (0, 0);
            cell.paidIn = _stakePeriod();
        }
        cell.state = ShareState.PAID;
        _setCell(job, epoch, node, cell);
        line.earned += reward;
        if (used != 0) {
            _promises[job][node].advance = advance - used;
            line.hasAdvance = advance != used;
        }
        _setLine(job, node, line);
        emit NodePaid(job, node, epoch, cell.paid, isFinal);
        _push(node, cell.paid);
        return (cell.paid, used);
    }

    function _reward(bytes32 job, uint32 epoch, address node) private view returns (uint96) {
        Epoch memory held = _epoch(job, epoch);
        if (held.closedAt == 0) return 0;
        return Shares.share(held.pool, _cell(job, epoch, node).score, held.totalScore);
    }
}
