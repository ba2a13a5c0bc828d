// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title Stake and what payments lock of it, in one storage slot.
/// @notice Time is cut into periods of one challenge window. A payment locks its amount in its period's bucket. Two buckets
/// are kept, this period's and the one before, so a lock holds for one to two windows and is then dropped
/// without anybody's doing. One slot is why the amounts have 80 bits and periods are counted modulo 2^16; a stake that
/// rests for exactly 65,536 periods shows its old locks for one more, which errs on the safe side.
library StakeLocks {
    struct Stake {
        uint80 staked;
        uint80 recent;
        uint80 older;
        uint16 period;
    }

    /// @notice A stake as storage holds it: packed by hand, as in `Slots`.
    function toStake(uint256 word) internal pure returns (Stake memory) {
        return Stake(uint80(word), uint80(word >> 80), uint80(word >> 160), uint16(word >> 240));
    }

    function pack(Stake memory self) internal pure returns (uint256) {
        return uint256(self.staked) | uint256(self.recent) << 80 | uint256(self.older) << 160
            | uint256(self.period) << 240;
    }

    /// @notice The stake as it stands in `period`: buckets that are over are dropped.
    function inPeriod(Stake memory self, uint16 period) internal pure returns (Stake memory) {
        uint16 passed;
        unchecked {
            passed = period - self.period;
        }
        if (passed == 0) return self;
        uint80 older = passed == 1 ? self.recent : 0;
        return Stake({staked: self.staked, recent: 0, older: older, period: period});
    }

    /// @notice What is locked.
    function locked(Stake memory self) internal pure returns (uint256) {
        return uint256(self.recent) + self.older;
    }

    /// @notice What is not locked. Locks never exceed the stake: only free stake is locked or leaves.
    function free(Stake memory self) internal pure returns (uint256) {
        return self.staked - locked(self);
    }

    /// @notice Lock `amount`, which the caller has found free, in the stake's present period.
    function lock(Stake memory self, uint256 amount) internal pure {
        // forge-lint: disable-next-line(unsafe-typecast)
        self.recent += uint80(amount); // At most `staked`, which has 80 bits.
    }

    /// @notice Take a payment's locked amount out of the stake, and its lock with it.
    /// @param paidIn The period of the payment: the stake's present one or the one before.
    function seize(Stake memory self, uint80 amount, uint16 paidIn) internal pure {
        if (paidIn == self.period) self.recent -= amount;
        else self.older -= amount;
        self.staked -= amount;
    }
}
