// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {LedgerOptions, Roles} from "./ledger/Roles.sol";
import {Recording} from "./ledger/Recording.sol";

/// @title The ledger of training jobs: on top of its parts, closing epochs, paying shares and taking them back.
/// @notice `ITrainingLedger` is the manual.
contract TrainingLedger is Recording {
    bytes32 private constant VERDICT =
        keccak256("Verdict(bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence)");
    uint256 private constant MOST_PAYEES = 250;

    constructor(LedgerOptions memory options) Roles(options) {}

    function closeEpoch(bytes32 job, uint32 epoch) external {
        JobRecord storage record = _opened(job);
        Epoch memory open = _epochs[job][epoch];
        if (open.closedAt != 0) revert EpochIsClosed(epoch);
        if (!_isCloser(record)) {
            if (open.openedAt == 0) revert NotCoordinator(msg.sender);
            if (!_isOver(record)) _requireReached(uint256(open.openedAt) + UNBONDING);
        }
        _close(job, epoch);
    }

    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes)
        external
        nonReentrant
        returns (uint256 total)
    {
        if (nodes.length > MOST_PAYEES) revert TooManyNodes(nodes.length, MOST_PAYEES);
        if (_epochs[job][epoch].closedAt == 0) {
            if (!_isCloser(_opened(job))) revert EpochIsOpen(epoch);
            _close(job, epoch);
        }
        bool isFinal = _isFinal(job, epoch);
        uint16 period = _stakePeriod();
        mapping(address node => Cell) storage cells = _cells[job][epoch];
        uint256[] memory amounts = new uint256[](nodes.length);
        for (uint256 i = 0; i < nodes.length; ++i) {
            address node = nodes[i];
            Cell storage cell = cells[node];
            uint96 amount = cell.amount;
            if (cell.state != ShareState.DUE || !(isFinal || _tryLock(node, amount, period))) continue;
            (cell.state, cell.paidIn) = (ShareState.PAID, period);
            amounts[i] = amount;
            total += amount;
            _push(node, amount);
        }
        emit PaymentsDistributed(job, epoch, nodes, amounts);
    }

    function voidContribution(Verdict calldata verdict, bytes[] calldata signatures) external nonReentrant {
        _requireQuorum(keccak256(abi.encode(VERDICT, verdict)), signatures);
        (bytes32 job, uint32 epoch, address node) = (verdict.job, verdict.epoch, verdict.node);
        uint256 closedAt = _epochs[job][epoch].closedAt;
        if (closedAt == 0) revert EpochIsOpen(epoch);
        if (_isFinal(job, epoch)) revert WindowOver(closedAt);
        Cell storage cell = _cells[job][epoch][node];
        (uint96 amount, bool isPaid) = (cell.amount, cell.state == ShareState.PAID);
        if (!isPaid && cell.state != ShareState.DUE) revert NothingToVoid();
        cell.state = ShareState.VOID;
        _jobs[job].free += amount;
        if (isPaid) _seizeLocked(node, amount, cell.paidIn);
        uint256 penalty = _seizeFree(node, verdict.penalty);
        emit ContributionVoided(job, node, epoch, amount, penalty, verdict.evidence);
        _push(TREASURY, penalty);
    }

    function calculateRewards(bytes32 job, uint32 epoch, address node) external view returns (uint256) {
        Cell storage cell = _cells[job][epoch][node];
        return cell.state == ShareState.VOID ? 0 : cell.amount;
    }

    function getContribution(bytes32 job, uint32 epoch, address node) external view returns (Share memory) {
        Cell storage cell = _cells[job][epoch][node];
        return Share(cell.state, cell.amount);
    }

    function getEpoch(bytes32 job, uint32 epoch) external view returns (Epoch memory) {
        return _epochs[job][epoch];
    }

    function getNodeMetrics(address node, bytes32[] calldata jobs) external view returns (NodeMetrics memory metrics) {
        (metrics.staked, metrics.locked,,) = stakeOf(node);
        (metrics.id, metrics.meta) = (_registrations[node].id, _registrations[node].meta);
        metrics.credit = creditOf[node];
        for (uint256 i = 0; i < jobs.length; ++i) {
            Account memory account = getAccount(jobs[i], node);
            metrics.receipts += account.counted;
            metrics.score += account.score;
            metrics.earned += account.earned;
        }
    }

    function _close(bytes32 job, uint32 epoch) private {
        _epochs[job][epoch].closedAt = _after(0);
        emit EpochClosed(job, epoch);
    }

    /// @dev Whether the challenge window of a closed epoch is over.
    function _isFinal(bytes32 job, uint32 epoch) private view returns (bool) {
        return block.timestamp >= uint256(_epochs[job][epoch].closedAt) + CHALLENGE_WINDOW;
    }
}
