// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ISettlement} from "./ISettlement.sol";
import {IStaking} from "./IStaking.sol";
import {IDisputes} from "./IDisputes.sol";

/// @title Records accepted contributions and pays for each exactly once.
/// @notice A contribution is known by its receipt: (job, node, sequence), the sequences of a node in a job being dense from 0.
/// The ledger keeps one number for each (job, node), `counted`: every receipt below it is recorded, none from it on.
/// Both ways to record a receipt start at exactly `counted` and move it, so no receipt is recorded twice, none is left out
/// in between, and it does not matter which way comes first:
///
/// | way | who | what is on chain |
/// |---|---|---|
/// | `submitAggregate` | coordinator | five words a node and batch; the receipts lie behind a Merkle root |
/// | `submitContributions` | coordinator | 16 bytes a receipt, and the root |
/// | `submitContribution` | anyone | one whole receipt with both signatures: forced inclusion |
///
/// An epoch of a job goes `open ──closeEpoch──▶ closed`, and then each node's share of its pool `due ──▶ paid | void`.
///
/// A share is paid once the challenge window after the closing is over, or before that against the node's free stake,
/// which is then locked until the window is over. What a voucher claims is pending for a window of its own, in which arbiters
/// may stop it, and is taken off later shares.
interface ITrainingLedger is ISettlement, IStaking, IDisputes {
    /// @notice The coordinator's receipt for one contribution, as it is signed (EIP-712).
    /// @param sequence Dense for each (job, node), from 0.
    /// @param contribution hashStruct of what the node signed.
    /// @param samples As checked by the coordinator.
    /// @param qualityBps In [0, 10000].
    /// @param evaluator Who measured it.
    struct Receipt {
        bytes32 job;
        uint32 epoch;
        uint32 round;
        address node;
        uint64 sequence;
        bytes32 contribution;
        uint64 samples;
        uint16 qualityBps;
        bytes32 evaluator;
    }

    /// @notice The coordinator's promise of everything a node has earned in a job so far, as it is signed (EIP-712).
    /// @param sequence How many receipts it counts.
    /// @param amount Cumulative: it never falls.
    struct Voucher {
        bytes32 job;
        address node;
        uint64 sequence;
        uint128 amount;
    }

    /// @notice What a batch adds for one node: the receipts [firstSequence, firstSequence + receipts).
    /// @param score Sum over the receipts of samples times quality in basis points.
    struct NodeTotals {
        address node;
        uint48 firstSequence;
        uint32 receipts;
        uint64 samples;
        uint80 score;
    }

    /// @notice Where a node's share of an epoch stands. `NONE`: nothing recorded.
    enum ShareState {
        NONE,
        DUE,
        PAID,
        VOID
    }

    /// @notice A node's share of an epoch.
    /// @param reward 0 while the epoch is open.
    /// @param paid What went to the wallet or into credit; less than `reward` where a voucher had paid before.
    struct Contribution {
        ShareState state;
        uint32 receipts;
        uint80 score;
        uint96 reward;
        uint96 paid;
    }

    /// @notice An epoch.
    /// @param closedAt 0 while it is open.
    /// @param openedAt 0 before anything is recorded in it.
    struct Epoch {
        uint88 totalScore;
        uint96 pool;
        uint32 openedAt;
        uint32 closedAt;
        bool swept;
    }

    /// @notice A node in a job.
    /// @param counted Its recorded receipts, which is also the next sequence.
    /// @param earned Shares that were settled and not voided.
    /// @param paid What it got by every way, less what was slashed.
    /// @param pending Of `paid`, what a voucher claims and the window still holds.
    /// @param releaseAt When that may be paid.
    /// @param voided Shares that arbiters voided.
    /// @param isBarred Vouchers are no longer accepted.
    struct Account {
        uint48 counted;
        uint64 samples;
        uint96 earned;
        uint96 paid;
        uint96 pending;
        uint40 releaseAt;
        uint96 voided;
        bool isBarred;
    }

    /// @notice A node over several jobs.
    /// @param id 0 for a node that never registered.
    struct NodeMetrics {
        uint32 id;
        bytes32 meta;
        uint64 receipts;
        uint128 samples;
        uint128 earned;
        uint128 paid;
        uint96 staked;
        uint96 locked;
        uint256 credit;
    }

    /// @notice A batch was recorded.
    /// @param digest The job's digest after it, see `digestOf`.
    event BatchSubmitted(bytes32 indexed job, uint32 indexed epoch, uint32 seq, bytes32 root, bytes32 digest);
    /// @notice A batch's part for one node was left out because it does not start at `counted`: somebody forced receipts in.
    /// Nothing of it is recorded; the coordinator puts what is missing into a later batch.
    event NodeSkipped(bytes32 indexed job, address indexed node, uint32 seq, uint256 firstSequence, uint256 counted);
    event ContributionForced(bytes32 indexed job, address indexed node, uint32 indexed epoch, uint256 sequence, uint256 score);
    event EpochClosed(bytes32 indexed job, uint32 indexed epoch, uint256 pool, uint256 totalScore);
    /// @notice Shares were settled: one event for all, since each costs as much as a transfer's. The token's own events tell a
    /// node what came to its wallet, and `Credited` what did not.
    /// @param isFinal Whether the window was over; otherwise as much of each node's stake is locked.
    /// @param amounts Paid or credited, in the order of `nodes`; 0 where nothing was due, nothing could be paid yet, or a
    /// voucher had paid all of it.
    event SharesPaid(bytes32 indexed job, uint32 indexed epoch, bool isFinal, address[] nodes, uint256[] amounts);
    event DustSwept(bytes32 indexed job, uint32 indexed epoch, uint256 amount);
    /// @notice A voucher's claim is pending until `releaseAt`.
    event VoucherRedeemed(bytes32 indexed job, address indexed node, uint256 amount, uint256 releaseAt);
    /// @notice A voucher's claim was released.
    event VoucherPaid(bytes32 indexed job, address indexed node, uint256 amount);

    error EpochIsClosed(uint32 epoch);
    error EpochIsOpen(uint32 epoch);
    error BadTotals(address node);
    error BadPacking(uint256 offset);
    error NotNext(uint256 counted, uint256 given);
    error QualityOutOfRange(uint256 qualityBps);
    /// @notice A sum outgrew its field: 2^32 receipts of a node in an epoch; 2^48 receipts, 2^64 samples or 2^96 units earned of a
    /// node in a job. Nothing is recorded or paid by the call.
    error FieldIsFull();
    error TooManyNodes(uint256 given, uint256 most);
    error NotAscending(address node);
    error NodesMissing(uint256 expectedScore, uint256 givenScore);
    error AlreadySwept();
    error NotNode();
    error ClaimPending(uint256 releaseAt);
    error NothingDue();
    error NodeIsBarred();

    /// @notice Record one receipt. Anyone may, and needs nobody's leave: a coordinator cannot censor what it has signed.
    /// @param receipt Must be the node's next: `receipt.sequence == counted`, otherwise `NotNext`.
    /// @param nodeSignature The node's, over the Contribution whose hashStruct the receipt names.
    /// @param coordinatorSignature Over the receipt.
    /// @param epoch Where it is settled: the receipt's own epoch, or where that is closed a later one that follows on a closed
    /// one, so that nobody opens epochs ahead of time. Not closed itself.
    /// @dev 65 bytes r, s, v with v 27 or 28, or what an ERC-1271 wallet wants. Works while paused.
    function submitContribution(
        Receipt calldata receipt,
        bytes calldata nodeSignature,
        bytes calldata coordinatorSignature,
        uint32 epoch
    ) external;

    /// @notice Record a batch with every receipt in the call data.
    /// @param seq Must be the job's `nextSeq`; the same transaction sent twice reverts with `WrongSequence`.
    /// @param root Of the OpenZeppelin tree over the double-hashed hashStructs of the batch's receipts.
    /// @param packed For each node `address[20] firstSequence[6] receipts[2]` and then `receipts` times
    /// `round[4] samples[4] qualityBps[2] contribution[6]`, all big-endian; `contribution` is the first six bytes of the hash.
    /// @dev Receipts below `counted` are passed over, since they are recorded; a node that starts above it is skipped.
    function submitContributions(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes calldata packed) external;

    /// @notice Record a batch by its sums alone.
    /// @dev A node whose `firstSequence` is not `counted` is skipped whole (`NodeSkipped`), the others are recorded.
    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, NodeTotals[] calldata totals) external;

    /// @notice Close an epoch: freeze its scores and reserve `min(unitPrice * totalScore / 1e6, free)` as its pool.
    /// @dev The coordinator or the owner may at any time; anyone may close an epoch that has a record, `UNBONDING` seconds after its
    /// first one, or once the job takes nothing new any more.
    /// Reverts with `SpendLimitExceeded` where the limit leaves less; an epoch that is worth more than the limit itself waits
    /// for the owner to raise it, or for the window before the job's end, in which no limit holds (`ISettlement.requestReclaim`).
    /// Until then vouchers pay within the limit what the epoch would.
    function closeEpoch(bytes32 job, uint32 epoch) external returns (uint256 pool);

    /// @notice A node's share of a closed epoch: `pool * score / totalScore`, rounded down. 0 while the epoch is open.
    /// @dev Says what the share is, not whether it was paid or voided: see `getContribution`.
    function calculateRewards(bytes32 job, uint32 epoch, address node) external view returns (uint256);

    /// @notice Pay the shares of at most 250 nodes. Anyone may, as often as they like: who is paid, void or cannot be paid yet
    /// is passed over. A transfer that the token refuses becomes credit.
    /// @return total What was paid or credited.
    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes) external returns (uint256 total);

    /// @notice Return what rounding left of a closed epoch's pool to the job's free escrow, once.
    /// @param nodes Every node with a score in the epoch, in ascending order; their scores must add up to the epoch's.
    /// @dev All of them in one call, at about 4,500 gas each. An epoch of more nodes than a transaction can name keeps its dust,
    /// which is less than one unit a node.
    function sweepDust(bytes32 job, uint32 epoch, address[] calldata nodes) external returns (uint256 dust);

    /// @notice Claim what a voucher promises beyond everything paid, out of the job's free escrow; later shares make it good.
    /// The caller must be the node. Needs neither coordinator nor epochs, only the coordinator's signature.
    /// @dev It is pending for a challenge window, whatever the node's stake: `releaseVoucher` pays it then, `voidVoucher` can stop
    /// it before. One claim at a time. Capped by what is free and by the spend limit; the same voucher then serves again.
    /// @return amount What is pending now.
    function redeemVoucher(Voucher calldata voucher, bytes calldata coordinatorSignature) external returns (uint256 amount);

    /// @notice Pay a voucher's pending claim once its window is over. Anyone may; the node gets it.
    function releaseVoucher(bytes32 job, address node) external;

    /// @notice Show that a job's coordinator signed two different receipts for one (node, sequence), which costs it its bond:
    /// a tenth to the caller, the rest to the treasury. Anyone may, at any time.
    /// @dev The same proof takes each later bond of that account too: a key that was caught is worth nothing any more, and its
    /// operator goes on with another.
    function proveEquivocation(
        Receipt calldata first,
        bytes calldata firstSignature,
        Receipt calldata second,
        bytes calldata secondSignature
    ) external returns (uint256 slashed);

    /// @notice Sums of a node over jobs (which ones events tell). The fields beside jobs do not depend on them.
    function getNodeMetrics(address node, bytes32[] calldata jobs) external view returns (NodeMetrics memory);

    /// @notice A node's share of an epoch.
    function getContribution(bytes32 job, uint32 epoch, address node) external view returns (Contribution memory);

    /// @notice A node in a job.
    function getAccount(bytes32 job, address node) external view returns (Account memory);

    /// @notice An epoch of a job.
    function getEpoch(bytes32 job, uint32 epoch) external view returns (Epoch memory);

    /// @notice What all batches of a job come to: `digest' = keccak256(abi.encode(digest, seq, epoch, root, payload))` from
    /// zero on, `payload` being the keccak256 of `packed`, or of the totals' words one after another.
    function digestOf(bytes32 job) external view returns (bytes32);
}
