// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IBonds} from "./IBonds.sol";
import {IOptions} from "./IOptions.sol";

/// @title What every way of settling a job shares: jobs with their terms, escrow, and credit.
/// @notice Two ways stand behind it. `TrainingLedger` counts each node's receipts and pays by counters; `MerkleLedger` pays
/// cumulative claims against roots and is cheaper above some 300 nodes an epoch.
///
/// Amounts are in the smallest unit of one ERC-20 token that is fixed at deployment and fit 96 bits. Times are Unix seconds;
/// durations are seconds. Nothing is upgradeable: a job trusts the code it was opened on.
///
/// A job's money moves only like this:
///
///     fund ──▶ free ──(an epoch closes, a root is posted, a voucher is redeemed)──▶ reserved ──▶ wallets or credit
///               ▲                                                                      │
///               └──────── dust, voided shares, advances that a share made good ◀───────┘
///
/// @dev A job's id is `keccak256(abi.encode(owner, salt))` and can be computed without a chain.
interface ISettlement is IOptions, IBonds {
    /// @notice What the owner of a job states when opening it. Only the spend limit can change, and only upwards.
    /// @param coordinator Signs receipts and vouchers and submits batches. What its key has signed counts for good, whatever code
    /// its account is given later. May be an ERC-1271 wallet, for instance m of n keys; such a contract is asked each time, so it
    /// can come to deny what it has signed: nodes trust its code.
    /// @param model Digest of the first model, BLAKE3-256.
    /// @param dataset Digest of the dataset's description.
    /// @param epochs How many epochs the owner expects. Recorded, not enforced: late receipts settle in later epochs.
    /// @param unitPrice Token units for 1,000,000 score; score is samples times quality in basis points.
    /// @param guaranteedBps The part of a contribution's full pay that is due before its quality is measured. Recorded for
    /// whoever checks vouchers.
    /// @param spendLimit The most that may be reserved in one period of the challenge window's length, so that one stolen
    /// key cannot empty the escrow in one block. Two periods may meet: up to twice as much around their boundary. It does not
    /// hold for epochs that are closed in the last window of an announced end.
    struct JobTerms {
        address coordinator;
        bytes32 model;
        bytes32 dataset;
        uint32 epochs;
        uint128 unitPrice;
        uint16 guaranteedBps;
        uint96 spendLimit;
    }

    /// @notice A job as it stands.
    /// @param free Escrow that nothing has reserved yet.
    /// @param spendable What may be reserved now: `free` under the limit.
    /// @param nextSeq The sequence number that the coordinator's next batch or root must carry.
    /// @param endsAt When the owner may take `free` back; nothing new is recorded in the challenge window before that. 0 while
    /// it was not asked for.
    struct Job {
        address owner;
        JobTerms terms;
        uint96 free;
        uint96 spendable;
        uint32 nextSeq;
        uint40 openedAt;
        uint40 endsAt;
    }

    event JobOpened(bytes32 indexed job, address indexed owner, address indexed coordinator, bytes32 salt);
    event JobFunded(bytes32 indexed job, address indexed from, uint256 amount, uint256 free);
    event SpendLimitRaised(bytes32 indexed job, uint256 limit);
    event ReclaimRequested(bytes32 indexed job, uint256 endsAt);
    event JobReclaimed(bytes32 indexed job, address indexed owner, uint256 amount);
    /// @notice The token refused a transfer, so the amount waits for `withdraw`.
    event Credited(address indexed account, uint256 amount);
    event Withdrawn(address indexed account, address indexed to, uint256 amount);

    error UnknownJob(bytes32 job);
    error JobExists();
    error JobEnded(uint256 endedAt);
    error NotOwner(address caller);
    error NotCoordinator(address caller);
    error WrongSequence(uint256 expected, uint256 given);
    error AlreadyRequested();
    error TooEarly(uint256 until);
    error SpendLimitExceeded(uint256 spendable, uint256 wanted);
    error LimitNotRaised();
    error BadTerms();
    /// @notice The token took a fee or did nothing; only what arrives in full is accepted.
    error TransferShort(uint256 expected, uint256 received);
    error NothingToWithdraw();
    error BadSignature(address signer);

    /// @notice Open a job that the caller owns and put `escrow` into it, which the caller has approved for this contract.
    /// @dev Reverts with `JobExists` for a salt that the caller used before; with `OwnerNotAllowed` where the caller is neither
    /// the coordinator nor allowed by it; with `BondMissing` where the coordinator has not posted the bond.
    /// @return job Its id.
    function openJob(bytes32 salt, JobTerms calldata terms, uint256 escrow) external returns (bytes32 job);

    /// @notice Add to a job's free escrow. Anyone may.
    function fund(bytes32 job, uint256 amount) external;

    /// @notice Let more be reserved in one period. It can only rise, so that an owner cannot shut the escrow before its nodes.
    function raiseSpendLimit(bytes32 job, uint96 limit) external;

    /// @notice Announce that the owner takes back what is free. Nodes have `UNBONDING` seconds to force their receipts and
    /// redeem their vouchers; after that nothing new is recorded. One challenge window more remains to close what is
    /// recorded: anyone may, and the spend limit does not hold any more, so that no backlog is left to the owner.
    /// @dev The limit bounds what a stolen key takes until its owner stops it. What the key recorded before that is closed
    /// with the rest and is up to the arbiters, who have the window of each closing.
    function requestReclaim(bytes32 job) external;

    /// @notice Pay the free escrow to the owner, once the announced time has come. What returns to it later (dust, voided
    /// shares) can be taken by calling again.
    function reclaim(bytes32 job) external;

    /// @notice Pay the caller's credit to `to`: the way to money that the token would not transfer to the caller itself.
    /// @dev Works while paused. Reverts where the token refuses again.
    function withdraw(address to) external returns (uint256 amount);

    /// @notice The job as it stands. Reverts with `UnknownJob`.
    function getJob(bytes32 job) external view returns (Job memory);

    /// @notice What waits for `withdraw`.
    function creditOf(address account) external view returns (uint256);

    /// @notice The id of the job that `owner` opens with `salt`.
    function jobId(address owner, bytes32 salt) external pure returns (bytes32);
}
