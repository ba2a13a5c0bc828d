// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Shares} from "../libraries/Shares.sol";
import {Cell, Line} from "../libraries/Slots.sol";
import {Recording} from "./Recording.sol";

/// @title Closing epochs and paying shares.
/// @dev Of everything that a node gets in a job, `earned + advance` is the sum: shares raise `earned` and use up the
/// advance first, vouchers raise the advance. Neither way can pay what the other has paid.
abstract contract Payments is Recording {
    using SafeCast for uint256;

    uint256 private constant MOST_PAYEES = 250;

    /// @dev A closed epoch whose shares are being paid.
    struct Payday {
        bytes32 job;
        uint32 epoch;
        bool isFinal;
        uint16 period;
        Epoch closed;
    }

    function closeEpoch(bytes32 job, uint32 epoch) external returns (uint256 pool) {
        JobRecord storage record = _opened(job);
        Epoch memory held = _epoch(job, epoch);
        if (held.closedAt != 0) revert EpochIsClosed(epoch);
        bool isOver = _isOver(record);
        if (msg.sender != record.coordinator && msg.sender != record.owner) {
            if (held.openedAt == 0) revert NotCoordinator(msg.sender);
            if (!isOver) _requireReached(uint256(held.openedAt) + UNBONDING);
        }
        held.pool = Shares.pool(record.unitPrice, held.totalScore, record.purse.free());
        held.closedAt = block.timestamp.toUint32();
        _setEpoch(job, epoch, held);
        if (isOver) _reserveAtEnd(job, held.pool);
        else _reserve(job, held.pool);
        emit EpochClosed(job, epoch, held.pool, held.totalScore);
        return held.pool;
    }

    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes)
        external
        nonReentrant
        returns (uint256 total)
    {
        if (nodes.length > MOST_PAYEES) revert TooManyNodes(nodes.length, MOST_PAYEES);
        Payday memory day = _payday(job, epoch);
        if (!day.isFinal && paused()) revert TooEarly(uint256(day.closed.closedAt) + CHALLENGE_WINDOW);
        mapping(address node => Share) storage shares = _shares[job][epoch];
        mapping(address node => NodeInJob) storage members = _members[job];
        uint256[] memory amounts = new uint256[](nodes.length);
        uint256 madeGood;
        for (uint256 i = 0; i < nodes.length; ++i) {
            address node = nodes[i];
            (uint256 paid, uint256 returned) = _settle(day, shares[node], members[node], node);
            unchecked {
                total += paid; // At most 250 of 96 bits.
                madeGood += returned;
            }
            amounts[i] = paid;
        }
        _release(job, madeGood);
        emit SharesPaid(job, epoch, day.isFinal, nodes, amounts);
    }

    function sweepDust(bytes32 job, uint32 epoch, address[] calldata nodes) external returns (uint256 dust) {
        Epoch memory closed = _closed(job, epoch);
        if (closed.swept) revert AlreadySwept();
        mapping(address node => Share) storage recorded = _shares[job][epoch];
        uint256 score;
        uint256 shares;
        address last;
        for (uint256 i = 0; i < nodes.length; ++i) {
            if (nodes[i] <= last) revert NotAscending(nodes[i]);
            last = nodes[i];
            uint80 one = recorded[last].cell.score();
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
        Cell cell = _shares[job][epoch][node].cell;
        return Contribution(cell.state(), cell.receipts(), cell.score(), _reward(job, epoch, node), cell.paid());
    }

    function getEpoch(bytes32 job, uint32 epoch) external view returns (Epoch memory) {
        return _epoch(job, epoch);
    }

    function getAccount(bytes32 job, address node) public view returns (Account memory) {
        Line line = _members[job][node].line;
        Promises memory promises = _members[job][node].promises;
        return Account({
            counted: line.counted(),
            samples: line.samples(),
            earned: line.earned(),
            paid: line.earned() + promises.advance - promises.pending,
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
        metrics.staked = _stakeNow(registration).staked();
        metrics.locked = _stakeNow(registration).locked().toUint96();
        metrics.credit = _creditOf(node);
        for (uint256 i = 0; i < jobs.length; ++i) {
            Account memory account = getAccount(jobs[i], node);
            metrics.receipts += account.counted;
            metrics.samples += account.samples;
            metrics.earned += account.earned;
            metrics.paid += account.paid;
        }
    }

    /// @dev Whether an epoch's challenge window is over.
    function _isFinal(Epoch memory closed) internal view returns (bool) {
        return block.timestamp >= uint256(closed.closedAt) + CHALLENGE_WINDOW;
    }

    function _payday(bytes32 job, uint32 epoch) private view returns (Payday memory) {
        Epoch memory closed = _closed(job, epoch);
        bool isFinal = _isFinal(closed);
        return Payday(job, epoch, isFinal, isFinal ? 0 : _stakePeriod(), closed);
    }

    /// @dev Pay one share where that can be done now. State first, the transfer last.
    /// @return paid What the node got.
    /// @return returned What an advance had paid already: the job's again.
    function _settle(Payday memory day, Share storage share, NodeInJob storage member, address node)
        private
        returns (uint256 paid, uint256 returned)
    {
        Cell cell = share.cell;
        if (!cell.isDue()) return (0, 0);
        Line line = member.line;
        uint256 reward = Shares.share(day.closed.pool, cell.score(), day.closed.totalScore);
        uint256 advance = line.hasAdvance() ? member.promises.advance : 0;
        returned = advance < reward ? advance : reward;
        uint256 earned;
        unchecked {
            paid = reward - returned; // At most the reward.
            earned = line.earned() + reward; // 96 bits each.
        }
        if (!day.isFinal && !_tryLock(node, paid, day.period)) return (0, 0);
        share.cell = cell.settled(ShareState.PAID, paid, day.period);
        member.line = line.withEarned(earned, advance != returned);
        if (returned != 0) member.promises.advance = (advance - returned).toUint96();
        _push(node, paid);
    }

    function _reward(bytes32 job, uint32 epoch, address node) private view returns (uint96) {
        Epoch memory held = _epoch(job, epoch); // Its pool is 0 while it is open.
        return Shares.share(held.pool, _shares[job][epoch][node].cell.score(), held.totalScore);
    }
}
