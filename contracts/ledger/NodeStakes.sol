// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Stake} from "./StakeLocks.sol";
import {JobEscrow} from "./JobEscrow.sol";

/// @title The register of nodes, and their stake.
abstract contract NodeStakes is JobEscrow {
    using SafeCast for uint256;

    struct Registration {
        Stake stake;
        uint32 id;
        uint96 unbonding;
        uint40 releaseAt;
        NodeMeta meta;
    }

    uint32 public nodeCount;
    mapping(address node => Registration) internal _registrations;

    function registerNode(NodeMeta calldata meta, uint256 stakeAmount) external nonReentrant returns (uint32 id) {
        Registration storage registration = _registrations[msg.sender];
        if (registration.id != 0) revert AlreadyRegistered();
        id = ++nodeCount;
        registration.id = id;
        registration.meta = meta;
        emit NodeRegistered(msg.sender, id, meta);
        if (stakeAmount != 0) _addStake(stakeAmount);
    }

    function stake(uint256 amount) external nonReentrant {
        if (_registrations[msg.sender].id == 0) revert NotRegistered();
        _addStake(amount);
    }

    function unstake(uint256 amount) external {
        Registration storage registration = _registrations[msg.sender];
        Stake memory now_ = _stakeNow(registration);
        if (amount > now_.free()) revert StakeLocked(now_.free(), amount);
        registration.stake.staked -= amount.toUint80();
        registration.unbonding += amount.toUint96();
        registration.releaseAt = _after(UNBONDING);
        emit UnstakeRequested(msg.sender, amount, registration.releaseAt);
    }

    function withdrawStake() external nonReentrant returns (uint256 amount) {
        Registration storage registration = _registrations[msg.sender];
        amount = registration.unbonding;
        if (amount == 0) revert NothingToWithdraw();
        _requireReached(registration.releaseAt);
        registration.unbonding = 0;
        emit StakeWithdrawn(msg.sender, amount);
        _push(msg.sender, amount);
    }

    function stakeOf(address node)
        public
        view
        returns (uint256 staked, uint256 locked, uint256 unbonding, uint256 releaseAt)
    {
        Registration storage registration = _registrations[node];
        Stake memory now_ = _stakeNow(registration);
        return (now_.staked, now_.locked(), registration.unbonding, registration.releaseAt);
    }

    /// @dev Challenge windows since 1970, modulo 2^16 as stakes store it.
    function _stakePeriod() internal view returns (uint16) {
        unchecked {
            // forge-lint: disable-next-line(unsafe-typecast)
            return uint16(block.timestamp / CHALLENGE_WINDOW);
        }
    }

    /// @dev Lock `amount` of a node's stake for a payment in its window; false where too little of it is free.
    function _tryLock(address node, uint96 amount, uint16 period) internal returns (bool) {
        Stake storage kept = _registrations[node].stake;
        Stake memory now_ = kept.inPeriod(period);
        if (amount > now_.free()) return false;
        kept.recent = now_.recent + uint80(amount);
        if (kept.period != period) (kept.older, kept.period) = (now_.older, period);
        return true;
    }

    /// @dev Take back a payment from the stake that it locked: in the stake's present period or the one before.
    function _seizeLocked(address node, uint96 amount, uint16 paidIn) internal {
        Stake memory now_ = _stakeNow(_registrations[node]);
        now_.staked -= uint80(amount);
        if (paidIn == now_.period) now_.recent -= uint80(amount);
        else now_.older -= uint80(amount);
        _registrations[node].stake = now_;
    }

    /// @dev Take a penalty from what no payment locks: free stake first, then what is unbonding.
    /// @return taken `most`, or all there is.
    function _seizeFree(address node, uint256 most) internal returns (uint256 taken) {
        Registration storage registration = _registrations[node];
        uint256 fromStake = _stakeNow(registration).free();
        if (most < fromStake) fromStake = most;
        uint256 fromUnbonding = registration.unbonding;
        if (most - fromStake < fromUnbonding) fromUnbonding = most - fromStake;
        registration.stake.staked -= fromStake.toUint80();
        registration.unbonding -= fromUnbonding.toUint96();
        return fromStake + fromUnbonding;
    }

    function _stakeNow(Registration storage registration) private view returns (Stake memory) {
        return registration.stake.inPeriod(_stakePeriod());
    }

    function _addStake(uint256 amount) private {
        Stake storage kept = _registrations[msg.sender].stake;
        kept.staked += amount.toUint80();
        emit Staked(msg.sender, amount, kept.staked);
        _pull(amount);
    }
}
