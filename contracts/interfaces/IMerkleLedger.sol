// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ISettlement} from "./ISettlement.sol";

/// @title Settles a job for many nodes at once: one root an epoch, and nodes pull.
/// @notice Jobs, escrow, bonds, arbiters and credit are those of `ISettlement`. Instead of counters for each node the
/// coordinator posts the Merkle root of what every node has earned *since the job began*. A root costs the same for ten nodes
/// and for a million; a node that claims every tenth root pays a tenth of the gas and loses nothing.
///
/// A root goes `posted ──activation delay──▶ active`, or out: within its delay a quorum of arbiters may disable it, and every
/// later root of the job with it.
///
/// @dev A leaf is `keccak256(bytes.concat(keccak256(abi.encode(block.chainid, address(this), job, node, cumulative))))` and
/// the tree OpenZeppelin's: sorted pairs. Roots of a job have indexes from 0; a disabled index is given again, which is
/// why claims name the root as well.
interface IMerkleLedger is ISettlement {
    /// @param total Sum of all leaves: cumulative, it never falls.
    /// @param activeAt From when on it may be claimed.
    struct Root {
        bytes32 root;
        uint96 total;
        uint40 activeAt;
    }

    event RootPosted(bytes32 indexed job, uint32 indexed index, uint32 seq, bytes32 root, uint256 total, uint256 activeAt);
    event RootDisabled(bytes32 indexed job, uint32 indexed index, bytes32 root, uint256 returned, bytes32 evidence);
    event Claimed(bytes32 indexed job, address indexed node, uint256 amount, uint256 cumulative);

    error TotalFell(uint256 last, uint256 given);
    error UnknownRoot(uint256 index);
    error RootIsActive(uint256 activeAt);
    error BadProof();
    error LengthsDiffer();
    error RootOverdrawn(uint256 left, uint256 wanted);

    /// @notice Post the next root and reserve what its total adds, all of it or nothing.
    /// @param seq Must be the job's `nextSeq`.
    /// @return index Of the root among the job's.
    function postRoot(bytes32 job, uint32 seq, bytes32 root, uint96 total) external returns (uint32 index);

    /// @notice Disable a root that is not active yet, and all after it; what they had reserved is free again, less what an
    /// active root that promises more than its total has paid out of it.
    /// @param signatures Of arbiters over `RootVerdict(bytes32 job,uint32 index,bytes32 root,uint96 total,bytes32 evidence)`
    /// (EIP-712), as in `IDisputes.voidContribution`. They hold against the same root with the same total wherever it is posted
    /// at this index again.
    function disableRoot(bytes32 job, uint32 index, bytes32 root, bytes32 evidence, bytes[] calldata signatures) external;

    /// @notice Pay a node what an active root says beyond what it has claimed. Anyone may; the node gets it.
    /// @return amount 0 where it has claimed as much already.
    function claim(bytes32 job, uint32 index, bytes32 root, address node, uint96 cumulative, bytes32[] calldata proof)
        external
        returns (uint256 amount);

    /// @notice The same for several nodes with one multiproof (OpenZeppelin's `multiProofVerify`), in the proof's leaf order.
    function claimMany(
        bytes32 job,
        uint32 index,
        bytes32 root,
        address[] calldata nodes,
        uint96[] calldata cumulatives,
        bytes32[] calldata proof,
        bool[] calldata proofFlags
    ) external returns (uint256 total);

    /// @notice How many roots of a job stand.
    function rootCount(bytes32 job) external view returns (uint256);

    /// @notice A standing root. Reverts with `UnknownRoot`.
    function getRoot(bytes32 job, uint32 index) external view returns (Root memory);

    /// @notice What a node has claimed in a job so far.
    function claimedOf(bytes32 job, address node) external view returns (uint256);
}
