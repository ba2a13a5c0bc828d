// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @notice `recent` is locked by payments of `period` (counted modulo 2^16), `older` by those of the period before.
struct Stake {
    uint80 staked;
    uint80 recent;
    uint80 older;
    uint16 period;
}

using StakeLocks for Stake global;

/// @title Stake and what payments lock of it, in one storage slot.
/// @notice Time is cut into periods of one challenge window. A payment locks its amount in its period's bucket. Two buckets are
/// kept, so a lock holds for one to two windows and is then dropped without anybody's doing. A stake that rests for exactly
/// 65,536 periods shows its old locks for one more, which errs on the safe side.
library StakeLocks {
    /// @notice The stake as it stands in a period: buckets that are over are dropped.
    function inPeriod(Stake memory self, uint16 now_) internal pure returns (Stake memory) {
        uint16 passed;
        unchecked {
            passed = now_ - self.period;
        }
        if (passed == 0) return self;
        return Stake(self.staked, 0, passed == 1 ? self.recent : 0, now_);
    }

    function locked(Stake memory self) internal pure returns (uint80) {
        return self.recent + self.older;
    }

    /// @notice Stake that is not locked. Locks never exceed the stake: only free stake is locked or leaves.
    function free(Stake memory self) internal pure returns (uint80) {
        return self.staked - self.locked();
    }
}
