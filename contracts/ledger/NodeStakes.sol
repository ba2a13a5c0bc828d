// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {JobEscrow} from "./JobEscrow.sol";

/// @notice A node's stake, from the lowest bit: `staked[80] recent[80] older[80] period[16]`. `recent` is locked by payments of
/// `period`, which is counted modulo 2^16, `older` by those of the period before.
type Stake is uint256;

using StakeLocks for Stake global;

/// @title Stake and what payments lock of it, in one storage slot.
/// @notice Time is cut into periods of one challenge window. A payment locks its amount in its period's bucket. Two buckets are
/// kept, so a lock holds for one to two windows and is then dropped without anybody's doing. A stake that rests for exactly
/// 65,536 periods shows its old locks for one more, which errs on the safe side.
library StakeLocks {
    function staked(Stake self) internal pure returns (uint256) {
        return uint80(Stake.unwrap(self));
    }

    function locked(Stake self) internal pure returns (uint256) {
        return uint256(uint80(Stake.unwrap(self) >> 80)) + uint80(Stake.unwrap(self) >> 160);
    }

    /// @notice Stake that is not locked. Locks never exceed the stake: only free stake is locked or leaves.
    function free(Stake self) internal pure returns (uint256) {
        return self.staked() - self.locked();
    }

    /// @notice The stake as it stands in a period: buckets that are over are dropped.
    function inPeriod(Stake self, uint16 now_) internal pure returns (Stake) {
        uint256 last = Stake.unwrap(self) >> 240;
        if (last == now_) return self;
        uint256 older = uint16(last + 1) == now_ ? uint80(Stake.unwrap(self) >> 80) : 0;
        return Stake.wrap(self.staked() | older << 160 | uint256(now_) << 240);
    }

    /// @notice The stake with `amount`, which the caller has found free, locked in its present period.
    function lock(Stake self, uint256 amount) internal pure returns (Stake) {
        return Stake.wrap(Stake.unwrap(self) + (amount << 80));
    }

    /// @notice The stake without a payment's amount, and without its lock in the present period or the one before.
    function seize(Stake self, uint256 amount, uint16 paidIn) internal pure returns (Stake) {
        bool isRecent = paidIn == uint16(Stake.unwrap(self) >> 240);
        return Stake.wrap(Stake.unwrap(self) - (amount << (isRecent ? 80 : 160)) - amount);
    }

    /// @notice The stake with another sum, of 80 bits, and the same locks.
    function withStaked(Stake self, uint256 sum) internal pure returns (Stake) {
        return Stake.wrap(Stake.unwrap(self) >> 80 << 80 | sum);
    }
}

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
        Stake now_ = _stakeOf(msg.sender);
        if (amount > now_.free()) revert StakeLocked(now_.free(), amount);
        registration.stake = now_.withStaked(now_.staked() - amount);
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

    function stakeOf(address node) public view returns (uint256 staked, uint256 locked, uint256 unbonding, uint256 releaseAt) {
        Registration storage registration = _registrations[node];
        Stake now_ = _stakeOf(node);
        return (now_.staked(), now_.locked(), registration.unbonding, registration.releaseAt);
    }

    /// @dev Challenge windows since 1970, modulo 2^16 as stakes store it.
    function _stakePeriod() internal view returns (uint16) {
        // forge-lint: disable-next-line(unsafe-typecast)
        return uint16(block.timestamp / CHALLENGE_WINDOW);
    }

    /// @dev Lock `amount` of a node's stake for a payment in its window; false where too little of it is free.
    function _tryLock(address node, uint256 amount, uint16 period) internal returns (bool) {
        Registration storage registration = _registrations[node];
        Stake now_ = registration.stake.inPeriod(period);
        if (amount > now_.free()) return false;
        registration.stake = now_.lock(amount);
        return true;
    }

    /// @dev Take back a payment from the stake that it locked.
    function _seizeLocked(address node, uint256 amount, uint16 paidIn) internal {
        _registrations[node].stake = _stakeOf(node).seize(amount, paidIn);
    }

    /// @dev Take a penalty from what no payment locks: free stake first, then what is unbonding.
    /// @return taken `most`, or all there is.
    function _seizeFree(address node, uint256 most) internal returns (uint256 taken) {
        Registration storage registration = _registrations[node];
        Stake now_ = _stakeOf(node);
        uint256 fromStake = Math.min(most, now_.free());
        uint256 fromUnbonding = Math.min(most - fromStake, registration.unbonding);
        registration.stake = now_.withStaked(now_.staked() - fromStake);
        registration.unbonding -= fromUnbonding.toUint96();
        return fromStake + fromUnbonding;
    }

    function _stakeOf(address node) private view returns (Stake) {
        return _registrations[node].stake.inPeriod(_stakePeriod());
    }

    function _addStake(uint256 amount) private {
        Stake now_ = _stakeOf(msg.sender);
        uint256 sum = now_.staked() + amount;
        _registrations[msg.sender].stake = now_.withStaked(sum.toUint80());
        emit Staked(msg.sender, amount, sum);
        _pull(amount);
    }
}
