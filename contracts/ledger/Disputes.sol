// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {Shares} from "../libraries/Shares.sol";
import {Cell, Line} from "../libraries/Slots.sol";
import {TypedData} from "../libraries/TypedData.sol";
import {Vouchers} from "./Vouchers.sol";

/// @title Taking back what was not earned.
abstract contract Disputes is Vouchers {
    using TypedData for Receipt;
    using TypedData for Verdict;
    using TypedData for VoucherVerdict;

    uint256 private constant PROVERS_PART = 10;

    function voidContribution(Verdict calldata verdict, bytes[] calldata signatures) external nonReentrant {
        _requireQuorum(verdict.hash(), signatures);
        (bytes32 job, uint32 epoch, address node) = (verdict.job, verdict.epoch, verdict.node);
        Epoch memory closed = _closed(job, epoch);
        if (_isFinal(closed)) revert WindowOver(closed.closedAt);
        uint256 returned = _void(job, epoch, node, closed);
        uint256 penalty = _seizeFree(node, verdict.penalty);
        emit ContributionVoided(job, node, epoch, returned, penalty, verdict.evidence);
        _push(TREASURY, penalty);
    }

    function voidVoucher(VoucherVerdict calldata verdict, bytes[] calldata signatures) external {
        _requireQuorum(verdict.hash(), signatures);
        (bytes32 job, address node) = (verdict.job, verdict.node);
        Promises storage promises = _members[job][node].promises;
        uint96 returned = _stopClaim(promises);
        _release(job, returned);
        promises.isBarred = true;
        emit VoucherVoided(job, node, returned, verdict.evidence);
    }

    function proveEquivocation(
        Receipt calldata first,
        bytes calldata firstSignature,
        Receipt calldata second,
        bytes calldata secondSignature
    ) external nonReentrant returns (uint256 slashed) {
        bool isSameNumber =
            first.job == second.job && first.node == second.node && first.sequence == second.sequence;
        (bytes32 one, bytes32 other) = (first.hash(), second.hash());
        if (!isSameNumber || one == other) revert NoEquivocation();
        address coordinator = _opened(first.job).coordinator;
        _requireSigned(coordinator, one, firstSignature);
        _requireSigned(coordinator, other, secondSignature);
        slashed = _seizeBond(coordinator);
        if (slashed == 0) revert NothingDue();
        emit Equivocation(first.job, coordinator, msg.sender, slashed);
        uint256 part = slashed / PROVERS_PART;
        _push(msg.sender, part);
        _push(TREASURY, slashed - part);
    }

    /// @dev Void a share that is due or paid inside the window, and return what it was worth to the job.
    function _void(bytes32 job, uint32 epoch, address node, Epoch memory closed) private returns (uint256 returned) {
        Share storage share = _shares[job][epoch][node];
        Cell cell = share.cell;
        ShareState state = cell.state();
        if (state != ShareState.DUE && state != ShareState.PAID) revert NothingToVoid();
        uint96 reward = Shares.share(closed.pool, cell.score(), closed.totalScore);
        _members[job][node].promises.voided += reward;
        returned = reward;
        if (state == ShareState.PAID) {
            returned = cell.paid() + _takeBack(job, node, reward, cell.paid());
            _seizeLocked(node, cell.paid(), cell.paidIn());
        }
        share.cell = cell.settled(ShareState.VOID, 0, 0);
        _release(job, returned);
    }

    /// @dev A paid share had made good `reward - paid` of an advance, which is outstanding again; of a claim that was stopped it
    /// goes back to the job.
    /// @return stopped Of the claim.
    function _takeBack(bytes32 job, address node, uint96 reward, uint96 paid) private returns (uint96 stopped) {
        NodeInJob storage member = _members[job][node];
        Line line = member.line;
        if (paid != reward) member.promises.advance += reward - paid;
        member.line = line.withEarned(line.earned() - reward, line.hasAdvance() || paid != reward);
        if (member.promises.isBarred) stopped = _stopClaim(member.promises);
    }

    /// @dev Empty a pending claim inside its window, less what shares have made good of it: that is earned and not paid otherwise.
    function _stopClaim(Promises storage promises) private returns (uint96 returned) {
        if (block.timestamp >= promises.releaseAt) return 0;
        returned = promises.pending < promises.advance ? promises.pending : promises.advance;
        promises.pending -= returned;
        promises.advance -= returned;
    }
}
