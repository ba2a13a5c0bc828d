// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";

/// @notice A node's share of an epoch, from the lowest bit: `score[80] receipts[32] state[8] paidIn[16] paid[96]`. `paidIn` is
/// the stake's period in which it was paid, where that was inside the window.
type Cell is uint256;

/// @notice A node in a job, from the lowest bit: `counted[48] samples[64] earned[96] hasAdvance[1]`. `hasAdvance` tells whether
/// its `Promises` hold an advance: most never do, and need not be read.
type Line is uint256;

using Slots for Cell global;
using Slots for Line global;

/// @title The ledger's records, each in one storage slot.
/// @dev Words with accessors: the compiler writes a struct's fields one by one, which costs 200 gas for each field after the
/// first, and that for every node of every batch and payment. Sums are checked to fit their fields; what is only moved about
/// is as wide as a word, since narrower types are masked at every step.
library Slots {
    uint256 private constant DUE = uint256(ITrainingLedger.ShareState.DUE);
    uint256 private constant RECORDED = type(uint112).max; // The bits that batches write, of a cell and of a line.

    function score(Cell self) internal pure returns (uint80) {
        return uint80(Cell.unwrap(self));
    }

    function receipts(Cell self) internal pure returns (uint32) {
        return uint32(Cell.unwrap(self) >> 80);
    }

    function state(Cell self) internal pure returns (ITrainingLedger.ShareState) {
        return ITrainingLedger.ShareState(uint8(Cell.unwrap(self) >> 112));
    }

    function isDue(Cell self) internal pure returns (bool) {
        return uint8(Cell.unwrap(self) >> 112) == DUE;
    }

    function paidIn(Cell self) internal pure returns (uint16) {
        return uint16(Cell.unwrap(self) >> 120);
    }

    function paid(Cell self) internal pure returns (uint96) {
        return uint96(Cell.unwrap(self) >> 136);
    }

    /// @notice The share with more receipts in it. Its epoch is open, so nothing of it is paid.
    function plus(Cell self, ITrainingLedger.NodeTotals memory totals) internal pure returns (Cell) {
        unchecked {
            // A score is at most 10,000 times its samples, whose sum fits 64 bits or `Line` refuses it: 80 bits are enough.
            uint256 sum = uint256(self.score()) + totals.score;
            uint256 count = uint256(self.receipts()) + totals.receipts; // 32 bits each.
            if (count >> 32 != 0) revert ITrainingLedger.FieldIsFull();
            return Cell.wrap(sum | count << 80 | DUE << 112);
        }
    }

    /// @notice The share once it is paid or void.
    /// @param amount Of 96 bits.
    /// @param period Of 16 bits.
    function settled(Cell self, ITrainingLedger.ShareState now_, uint256 amount, uint256 period)
        internal
        pure
        returns (Cell)
    {
        return Cell.wrap(Cell.unwrap(self) & RECORDED | uint256(now_) << 112 | period << 120 | amount << 136);
    }

    function counted(Line self) internal pure returns (uint48) {
        return uint48(Line.unwrap(self));
    }

    function samples(Line self) internal pure returns (uint64) {
        return uint64(Line.unwrap(self) >> 48);
    }

    function earned(Line self) internal pure returns (uint96) {
        return uint96(Line.unwrap(self) >> 112);
    }

    function hasAdvance(Line self) internal pure returns (bool) {
        return Line.unwrap(self) >> 208 != 0;
    }

    /// @notice The node with more receipts counted.
    function plus(Line self, ITrainingLedger.NodeTotals memory totals) internal pure returns (Line) {
        unchecked {
            uint256 count = uint256(self.counted()) + totals.receipts; // 48 and 32 bits, 64 bits each.
            uint256 sum = uint256(self.samples()) + totals.samples;
            if (count >> 48 | sum >> 64 != 0) revert ITrainingLedger.FieldIsFull();
            return Line.wrap(Line.unwrap(self) >> 112 << 112 | sum << 48 | count);
        }
    }

    /// @notice The node with another sum of settled shares.
    function withEarned(Line self, uint256 sum, bool isAdvanced) internal pure returns (Line) {
        if (sum >> 96 != 0) revert ITrainingLedger.FieldIsFull();
        return Line.wrap(Line.unwrap(self) & RECORDED | sum << 112 | (isAdvanced ? 1 << 208 : 0));
    }

    function toEpoch(uint256 word) internal pure returns (ITrainingLedger.Epoch memory epoch) {
        epoch.totalScore = uint88(word);
        epoch.pool = uint96(word >> 88);
        epoch.openedAt = uint32(word >> 184);
        epoch.closedAt = uint32(word >> 216);
        epoch.swept = word >> 248 != 0;
    }

    function pack(ITrainingLedger.Epoch memory epoch) internal pure returns (uint256) {
        return uint256(epoch.totalScore) | uint256(epoch.pool) << 88 | uint256(epoch.openedAt) << 184
            | uint256(epoch.closedAt) << 216 | (epoch.swept ? 1 << 248 : 0);
    }
}
