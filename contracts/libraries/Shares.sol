// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title The arithmetic of pay: pools and shares, always rounded down.
library Shares {
    /// @dev A receipt's full score a sample, and what prices are quoted for.
    uint256 internal constant FULL_QUALITY_BPS = 10_000;
    uint256 internal constant PRICED_SCORE = 1_000_000;

    /// @notice What an epoch's score is worth, capped by what is free. 128 + 88 bits do not overflow.
    function pool(uint128 unitPrice, uint88 totalScore, uint96 free) internal pure returns (uint96) {
        uint256 worth = uint256(unitPrice) * totalScore / PRICED_SCORE;
        // forge-lint: disable-next-line(unsafe-typecast)
        return worth < free ? uint96(worth) : free; // Smaller than 96 bits by the comparison.
    }

    /// @notice A score's share of a pool: 96, 80 and 88 bits. The shares of all scores never exceed the pool.
    function share(uint256 pool_, uint256 score, uint256 totalScore) internal pure returns (uint96) {
        if (score == 0) return 0;
        unchecked {
            // forge-lint: disable-next-line(unsafe-typecast)
            return uint96(pool_ * score / totalScore); // 96 and 80 bits; at most the pool, as score <= totalScore.
        }
    }
}
