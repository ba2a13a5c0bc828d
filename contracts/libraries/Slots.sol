// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";

/// @title The ledger's records, each in one storage slot.
/// @dev Packed by hand: the compiler writes a struct's fields one by one, which costs 200 gas for each field after the first,
/// and that for every node of every batch and payment.
library Slots {
    /// @notice A node's share of an epoch.
    /// @param paidIn The stake's period in which it was paid, where that was inside the window.
    struct Cell {
        uint80 score;
        uint32 receipts;
        ITrainingLedger.ShareState state;
        uint16 paidIn;
        uint96 paid;
    }

    /// @notice A node in a job.
    /// @param hasAdvance Whether its `Promises` hold an advance: most never do, and need not be read.
    struct Line {
        uint48 counted;
        uint64 samples;
        uint96 earned;
        bool hasAdvance;
    }

    function toCell(uint256 word) internal pure returns (Cell memory cell) {
        cell.score = uint80(word);
        cell.receipts = uint32(word >> 80);
        cell.state = ITrainingLedger.ShareState(uint8(word >> 112));
        cell.paidIn = uint16(word >> 120);
        cell.paid = uint96(word >> 136);
    }

    function pack(Cell memory cell) internal pure returns (uint256) {
        return uint256(cell.score) | uint256(cell.receipts) << 80 | uint256(cell.state) << 112
            | uint256(cell.paidIn) << 120 | uint256(cell.paid) << 136;
    }

    function toLine(uint256 word) internal pure returns (Line memory line) {
        line.counted = uint48(word);
        line.samples = uint64(word >> 48);
        line.earned = uint96(word >> 112);
        line.hasAdvance = word >> 208 != 0;
    }

    function pack(Line memory line) internal pure returns (uint256) {
        return uint256(line.counted) | uint256(line.samples) << 48 | uint256(line.earned) << 112
            | (line.hasAdvance ? 1 << 208 : 0);
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
