// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {IStaking} from "../interfaces/IStaking.sol";
import {Stake} from "../libraries/StakeLocks.sol";
import {JobEscrow} from "./JobEscrow.sol";

/// @title The register of nodes, and their stake.
abstract contract NodeStakes is JobEscrow, IStaking {
    using SafeCast for uint256;

    struct Registration {
        bytes32 meta;
        uint32 id;
        uint96 unbonding;
        uint40 releaseAt;
        Stake stake;
    }

    /// @inheritdoc IStaking
    uint32 public nodeCount;
    mapping(address node => Registration) internal _registrations;

    function registerNode(bytes32 meta, uint256 stakeAmount) external nonReentrant whenNotPaused returns (uint32 id) {
        Registration storage registration = _registrations[msg.sender];
        if (registration.id != 0) revert AlreadyRegistered();
        id = ++nodeCount;
        registration.id = id;
        registration.meta = meta;
        emit NodeRegistered(msg.sender, id, meta);
        if (stakeAmount != 0) _addStake(stakeAmount);
    }

    function stake(uint256 amount) external nonReentrant whenNotPaused {
        if (_registrations[msg.sender].id == 0) revert NotRegistered();
        _addStake(amount);
    }

    function unstake(uint256 amount) external {
        Registration storage registration = _registrations[msg.sender];
        Stake held = _stakeNow(registration);
        if (amount > held.free()) revert StakeLocked(held.free(), amount);
        registration.stake = held.withStaked(held.staked() - amount);
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
        external
        view
        returns (uint256 staked, uint256 locked, uint256 unbonding, uint256 releaseAt)
    {
        Registration storage registration = _registrations[node];
        Stake held = _stakeNow(registration);
        return (held.staked(), held.locked(), registration.unbonding, registration.releaseAt);
    }

    function _stakeNow(Registration storage registration) internal view returns (Stake) {
        return registration.stake.inPeriod(_stakePeriod());
    }

    /// @dev The period as stakes store it, modulo 2^16.
    function _stakePeriod() internal view returns (uint16) {
        unchecked {
            // forge-lint: disable-next-line(unsafe-typecast)
            return uint16(block.timestamp / CHALLENGE_WINDOW);
        }
    }

    /// @dev Lock `amount` of a node's stake for a payment in its window; false where too little of it is free.
    function _tryLock(address node, uint256 amount, uint16 period) internal returns (bool) {
        Registration storage registration = _registrations[node];
        Stake held = registration.stake.inPeriod(period);
        if (amount > held.free()) return false;
        registration.stake = held.lock(amount);
        return true;
    }

    /// @dev Take back a payment from the stake that it locked.
    function _seizeLocked(address node, uint256 amount, uint16 paidIn) internal {
        Registration storage registration = _registrations[node];
        registration.stake = _stakeNow(registration).seize(amount, paidIn);
    }

    /// @dev Take a penalty from what no payment locks: free stake first, then what is unbonding.
    /// @return taken `most`, or all there is.
    function _seizeFree(address node, uint256 most) internal returns (uint256 taken) {
        Registration storage registration = _registrations[node];
        Stake held = _stakeNow(registration);
        uint256 fromStake = most < held.free() ? most : held.free();
        registration.stake = held.withStaked(held.staked() - fromStake);
        uint256 rest = most - fromStake;
        uint256 fromUnbonding = rest < registration.unbonding ? rest : registration.unbonding;
        registration.unbonding -= fromUnbonding.toUint96();
        return fromStake + fromUnbonding;
    }

    function _addStake(uint256 amount) private {
        Registration storage registration = _registrations[msg.sender];
        Stake held = _stakeNow(registration);
        uint256 sum = amount + held.staked();
        registration.stake = held.withStaked(sum.toUint80());
        emit Staked(msg.sender, amount, sum);
        _pull(amount);
    }
}
