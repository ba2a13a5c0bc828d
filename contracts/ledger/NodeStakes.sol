// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {IStaking} from "../interfaces/IStaking.sol";
import {StakeLocks} from "../libraries/StakeLocks.sol";
import {JobEscrow} from "./JobEscrow.sol";

/// @title The register of nodes, and their stake.
abstract contract NodeStakes is JobEscrow, IStaking {
    using SafeCast for uint256;
    using StakeLocks for StakeLocks.Stake;

    struct Registration {
        bytes32 meta;
        uint32 id;
        uint96 unbonding;
        uint40 releaseAt;
    }

    /// @inheritdoc IStaking
    uint32 public nodeCount;
    mapping(address node => Registration) internal _registrations;
    mapping(address node => uint256 stake) private _stakes;

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
        StakeLocks.Stake memory held = _stakeNow(msg.sender);
        if (amount > held.free()) revert StakeLocked(held.free(), amount);
        held.staked -= amount.toUint80();
        _stakes[msg.sender] = held.pack();
        Registration storage registration = _registrations[msg.sender];
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
        StakeLocks.Stake memory held = _stakeNow(node);
        Registration storage registration = _registrations[node];
        return (held.staked, held.locked(), registration.unbonding, registration.releaseAt);
    }

    function _stakeNow(address node) internal view returns (StakeLocks.Stake memory) {
        return StakeLocks.toStake(_stakes[node]).inPeriod(_stakePeriod());
    }

    function _lockedOf(address node) internal view returns (uint256) {
        return _stakeNow(node).locked();
    }

    /// @dev The period as stakes store it, modulo 2^16.
    function _stakePeriod() internal view returns (uint16) {
        unchecked {
            // forge-lint: disable-next-line(unsafe-typecast)
            return uint16(_period());
        }
    }

    /// @dev Lock `amount` of a node's stake for a payment in its window; false where too little of it is free.
    function _tryLock(address node, uint256 amount) internal returns (bool) {
        StakeLocks.Stake memory held = _stakeNow(node);
        if (amount > held.free()) return false;
        held.lock(amount);
        _stakes[node] = held.pack();
        return true;
    }

    /// @dev Take back a payment from the stake that it locked.
    function _seizeLocked(address node, uint96 amount, uint16 paidIn) internal {
        StakeLocks.Stake memory held = _stakeNow(node);
        held.seize(uint256(amount).toUint80(), paidIn);
        _stakes[node] = held.pack();
    }

    /// @dev Take a penalty from what no payment locks: free stake first, then what is unbonding.
    /// @return taken `most`, or all there is.
    function _seizeFree(address node, uint256 most) internal returns (uint256 taken) {
        StakeLocks.Stake memory held = _stakeNow(node);
        uint256 fromStake = most < held.free() ? most : held.free();
        held.staked -= fromStake.toUint80();
        _stakes[node] = held.pack();
        Registration storage registration = _registrations[node];
        uint256 rest = most - fromStake;
        uint256 fromUnbonding = rest < registration.unbonding ? rest : registration.unbonding;
        registration.unbonding -= fromUnbonding.toUint96();
        return fromStake + fromUnbonding;
    }

    function _addStake(uint256 amount) private {
        StakeLocks.Stake memory held = _stakeNow(msg.sender);
        held.staked = (held.staked + amount).toUint80();
        _stakes[msg.sender] = held.pack();
        emit Staked(msg.sender, amount, held.staked);
        _pull(amount);
    }
}
