// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title Nodes and their stake.
/// @notice A node without stake is paid all the same, after the challenge window. Stake buys pay of shares at once: what a
/// node got for a share inside its window is locked in its stake until the window is over, each payment with stake of its own.
/// So a void always finds what it has to take back, whatever happens in other jobs. Vouchers wait for their window whatever the
/// stake.
interface IStaking {
    /// @param id Dense from 1, in the order of registration.
    /// @param meta Digest of a document about the node.
    event NodeRegistered(address indexed node, uint32 indexed id, bytes32 meta);
    event Staked(address indexed node, uint256 amount, uint256 staked);
    event UnstakeRequested(address indexed node, uint256 amount, uint256 releaseAt);
    event StakeWithdrawn(address indexed node, uint256 amount);

    error AlreadyRegistered();
    error NotRegistered();
    error StakeLocked(uint256 available, uint256 wanted);

    /// @notice Register the caller as a node, with optional stake. Registration gives an id and the right to stake.
    function registerNode(bytes32 meta, uint256 stakeAmount) external returns (uint32 id);

    /// @notice Add to the caller's stake (at most 2^80 - 1 units in all). What is unbonding stays as it is.
    function stake(uint256 amount) external;

    /// @notice Start unbonding stake that no payment locks. It no longer buys pay at once and can still be slashed. Asking
    /// again adds to it and starts the wait afresh.
    /// @dev `UNBONDING` is never shorter than the challenge window.
    function unstake(uint256 amount) external;

    /// @notice Pay out what has unbonded. Works while paused.
    function withdrawStake() external returns (uint256 amount);

    /// @notice A node's stake.
    /// @return staked With what is locked, without what is unbonding.
    /// @return locked What payments inside their windows lock. Released in steps of one window: after one to two.
    /// @return unbonding What waits for `releaseAt`.
    function stakeOf(address node)
        external
        view
        returns (uint256 staked, uint256 locked, uint256 unbonding, uint256 releaseAt);

    /// @notice How many nodes have registered, which is the newest id. `NodeRegistered` tells their addresses.
    function nodeCount() external view returns (uint32);
}
