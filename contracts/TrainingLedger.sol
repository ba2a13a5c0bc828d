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

    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes) external nonReentrant returns (uint256 total) {
        if (nodes.length > MOST_PAYEES) revert TooManyNodes(nodes.length, MOST_PAYEES);
        if (_epochs[job][epoch].closedAt == 0) {
            if (!_isCloser(_opened(job))) revert EpochIsOpen(epoch);
            _close(job, epoch);
        }
        bool isFinal = _isFinal(job, epoch);
        uint16 period = _stakePeriod();
        mapping(address node => uint256) storage shares = _shares[job][epoch];
        uint256[] memory amounts = new uint256[](nodes.length);
        for (uint256 i = 0; i < nodes.length; ++i) {
            address node = nodes[i];
            uint256 share = shares[node];
            uint96 amount = uint96(share);
            if (_stateOf(share) != ShareState.DUE || !(isFinal || _tryLock(node, amount, period))) continue;
            shares[node] = _settled(share, ShareState.PAID, period);
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
        uint96 amount = _void(job, epoch, node);
        uint256 penalty = _seizeFree(node, verdict.penalty);
        emit ContributionVoided(job, node, epoch, amount, penalty, verdict.evidence);
        _push(TREASURY, penalty);
    }

    function calculateRewards(bytes32 job, uint32 epoch, address node) external view returns (uint256) {
        Share memory share = getContribution(job, epoch, node);
        return share.state == ShareState.VOID ? 0 : share.amount;
    }

    function getContribution(bytes32 job, uint32 epoch, address node) public view returns (Share memory) {
        uint256 share = _shares[job][epoch][node];
        return Share(_stateOf(share), uint96(share));
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

    /// @dev Void a share that is due or paid inside the window, and return it to the job.
    function _void(bytes32 job, uint32 epoch, address node) private returns (uint96 amount) {
        uint256 share = _shares[job][epoch][node];
        amount = uint96(share);
        bool isPaid = _stateOf(share) == ShareState.PAID;
        if (!isPaid && _stateOf(share) != ShareState.DUE) revert NothingToVoid();
        _shares[job][epoch][node] = _settled(share, ShareState.VOID, 0);
        _jobs[job].free += amount;
        if (isPaid) _seizeLocked(node, amount, uint16(share >> 104));
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
