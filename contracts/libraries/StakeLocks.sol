// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @notice A node's stake, from the lowest bit: `staked[80] recent[80] older[80] period[16]`.
type Stake is uint256;

using StakeLocks for Stake global;

/// @title Stake and what payments lock of it, in one storage slot.
/// @notice Time is cut into periods of one challenge window. A payment locks its amount in its period's bucket. Two buckets
/// are kept, this period's and the one before, so a lock holds for one to two windows and is then dropped
/// without anybody's doing. One slot is why the amounts have 80 bits and periods are counted modulo 2^16; a stake that
/// rests for exactly 65,536 periods shows its old locks for one more, which errs on the safe side.
library StakeLocks {
    /// @notice A stake of fields that fit.
    function packed(uint256 staked_, uint256 recent_, uint256 older_, uint256 period_) internal pure returns (Stake) {
        return Stake.wrap(staked_ | recent_ << 80 | older_ << 160 | period_ << 240);
    }

    function staked(Stake self) internal pure returns (uint80) {
        return uint80(Stake.unwrap(self));
    }

    function recent(Stake self) internal pure returns (uint80) {
        return uint80(Stake.unwrap(self) >> 80);
    }

    function older(Stake self) internal pure returns (uint80) {
        return uint80(Stake.unwrap(self) >> 160);
    }

    function period(Stake self) internal pure returns (uint16) {
        return uint16(Stake.unwrap(self) >> 240);
    }

    /// @notice The stake as it stands in a period: buckets that are over are dropped.
    function inPeriod(Stake self, uint16 now_) internal pure returns (Stake) {
        uint16 passed;
        unchecked {
            passed = now_ - self.period();
        }
        if (passed == 0) return self;
        return packed(self.staked(), 0, passed == 1 ? self.recent() : 0, now_);
    }

    /// @notice What is locked.
    function locked(Stake self) internal pure returns (uint256) {
        unchecked {
            return uint256(self.recent()) + self.older(); // 80 bits each.
        }
    }

    /// @notice What is not locked. Locks never exceed the stake: only free stake is locked or leaves.
    function free(Stake self) internal pure returns (uint256) {
        return self.staked() - self.locked();
    }

    /// @notice The stake with `amount`, which the caller has found free, locked in its present period.
    function lock(Stake self, uint256 amount) internal pure returns (Stake) {
        unchecked {
            return Stake.wrap(Stake.unwrap(self) + (amount << 80)); // `recent` stays below `staked`, which has 80 bits.
        }
    }

    /// @notice The stake without a payment's locked amount, and without its lock.
    /// @param paidIn The period of the payment: the stake's present one or the one before.
    function seize(Stake self, uint256 amount, uint256 paidIn) internal pure returns (Stake) {
        bool isRecent = paidIn == self.period();
        uint256 recent_ = isRecent ? self.recent() - amount : self.recent();
        uint256 older_ = isRecent ? self.older() : self.older() - amount;
        return packed(self.staked() - amount, recent_, older_, self.period());
    }

    /// @notice The stake with another sum, of 80 bits, and the same locks.
    function withStaked(Stake self, uint256 sum) internal pure returns (Stake) {
        return Stake.wrap(Stake.unwrap(self) >> 80 << 80 | sum);
    }
}
