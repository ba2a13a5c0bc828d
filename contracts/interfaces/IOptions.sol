// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";

/// @title What is fixed when a ledger is deployed, for all of its jobs and for good.
/// @notice The EIP-712 domain, `HyperGPU` version `1`, can be read by ERC-5267 (`eip712Domain`), and a pause by `paused`.
interface IOptions {
    /// @notice The one token that is paid in.
    function TOKEN() external view returns (IERC20);

    /// @notice For how many seconds arbiters may take back: a share from the closing of its epoch, a voucher's claim from its
    /// redemption, a root from its posting. At least 30. Spend limits and locks count in periods of this length.
    function CHALLENGE_WINDOW() external view returns (uint32);

    /// @notice How many seconds stake and bonds wait to leave, nodes have from the announcement of a job's end, and an epoch is
    /// open before anyone may close it. At least the challenge window.
    function UNBONDING() external view returns (uint32);

    /// @notice What a coordinator must have posted when a job names it.
    function MINIMUM_BOND() external view returns (uint96);

    /// @notice How many arbiters must sign a verdict.
    function QUORUM() external view returns (uint8);

    /// @notice Gets penalties, and nine tenths of a bond that was lost.
    function TREASURY() external view returns (address);

    /// @notice May pause new work, and nothing else.
    function GUARDIAN() external view returns (address);

    /// @notice Whether an account's signature counts in verdicts.
    function isArbiter(address account) external view returns (bool);
}
