// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @notice What of a job changes with every batch and closing, from the lowest bit:
/// `free[96] spent[96] period[32] nextSeq[32]`. `spent` was reserved in `period`, counted in challenge windows.
type Purse is uint256;

using Purses for Purse global;

/// @title A job's free escrow under its spend limit, and its sequence, in one storage slot.
library Purses {
    function free(Purse self) internal pure returns (uint96) {
        return uint96(Purse.unwrap(self));
    }

    function spent(Purse self) internal pure returns (uint96) {
        return uint96(Purse.unwrap(self) >> 96);
    }

    function period(Purse self) internal pure returns (uint32) {
        return uint32(Purse.unwrap(self) >> 192);
    }

    function nextSeq(Purse self) internal pure returns (uint32) {
        return uint32(Purse.unwrap(self) >> 224);
    }

    /// @notice The purse as it stands in a period: what was spent before no longer counts.
    function inPeriod(Purse self, uint32 now_) internal pure returns (Purse) {
        if (self.period() == now_) return self;
        return Purse.wrap(uint256(self.free()) | uint256(now_) << 192 | uint256(self.nextSeq()) << 224);
    }

    /// @notice What may be reserved in the purse's period.
    function spendable(Purse self, uint96 limit) internal pure returns (uint96) {
        uint96 left = self.spent() < limit ? limit - self.spent() : 0;
        return left < self.free() ? left : self.free();
    }

    /// @notice The purse with `amount`, which the caller has found spendable, reserved.
    function reserve(Purse self, uint96 amount) internal pure returns (Purse) {
        uint96 sum = self.spent() + amount;
        uint256 rest = Purse.unwrap(self) >> 192 << 192;
        return Purse.wrap(rest | uint256(sum) << 96 | self.free() - amount);
    }

    /// @notice The purse with more, or all, or none in it.
    function withFree(Purse self, uint96 amount) internal pure returns (Purse) {
        return Purse.wrap(Purse.unwrap(self) >> 96 << 96 | amount);
    }

    /// @notice The purse with the next number of the job's sequence taken.
    function withNextSeq(Purse self, uint32 next) internal pure returns (Purse) {
        uint256 rest = uint224(Purse.unwrap(self));
        return Purse.wrap(rest | uint256(next) << 224);
    }
}
