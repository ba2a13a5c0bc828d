// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";

/// @title The ledger of training jobs: it holds a job's escrow and pays each node for its accepted work, once.
/// @notice # Theory of operation
/// A coordinator signs a receipt for each contribution that it accepts. The score of a receipt is its samples times its quality in
/// basis points, and every receipt states `totalScore`: the sum of the node's scores in the job up to and including this one.
/// So the newest receipt of a node alone proves everything that the node has earned in the job.
///
/// The ledger keeps three numbers for each node in a job, and none of them ever falls:
///     counted   receipts recorded
///     score     the highest total score recorded
///     earned    units allotted so far
///
/// Recording anything means raising these numbers:
///     counted' = max(counted, given count)      score' = max(score, given total score)
///     worth    = unitPrice * score' / 1,000,000     (rounded down)
///     delta    = min(worth - earned, free escrow)
///     earned' += delta      free escrow -= delta      the node's share of the epoch += delta
///
/// Three properties follow, whatever the order of calls:
/// 1. No unit is paid twice: `earned` never exceeds what the recorded score is worth.
/// 2. Old news is harmless: an older receipt or an overlapping batch raises nothing. A batch of the coordinator and a receipt
///    that its node forces in meanwhile merge by maximum.
/// 3. Nothing is lost while the escrow is short: `worth - earned` stays open, and the next record of the node after a funding
///    makes it good, also where it carries no higher score. Who is recorded first is served first.
///
/// Epochs group shares for the challenge window and for payment:
///     epoch:  open ── closeEpoch ──▶ closed, with a challenge window from then on
///     share:  NONE ── record ──▶ DUE ── distributePayments ──▶ PAID
///                                 │                              │  (inside the window)
///                                 └───── voidContribution ───────┴──▶ VOID
///
/// A share is paid once the window of its epoch is over, or before that against free stake of its node: the payment locks as much
/// stake until the window is over, so a void always finds what it has to take back.
/// Each unit of the ledger's balance is a job's free escrow, a share that is due, a node's stake, or credit.
///
/// | who | may | may not |
/// |---|---|---|
/// | owner of a job | open it, close epochs, take back free escrow after a notice | touch a share that is recorded |
/// | coordinator | sign receipts, record batches, close epochs | touch stake; lower anything that is recorded |
/// | node | register, stake, force its receipts in, close what stays open | be paid without a coordinator's signature |
/// | anyone | fund a job, force a receipt in, pay nodes their shares | direct money anywhere but to its node |
/// | arbiters, m of n | void a share inside its window | act after the window, take what other payments lock |
///
/// Nobody can change the code, the token, the windows or the arbiters. Amounts are in the smallest unit of one ERC-20 token, which
/// takes no fees and does not rebase, and have 96 bits (stake 80). A transfer that the token refuses becomes credit of the payee
/// and never stops another payee. Times are Unix seconds.
///
/// @dev Signatures are EIP-712 in the domain `HyperGPU`, version `2`, 65 bytes r, s, v with v 27 or 28, of plain accounts. Signed
/// are the structs `Receipt` and `Verdict` below, and the node's Contribution, of which the ledger sees the hashStruct alone.
interface ITrainingLedger {
    /// @notice What the owner of a job states when opening it. It never changes.
    /// @param coordinator Signs receipts and records batches.
    /// @param model Digest of the first model, as `dataset` is of the dataset's description.
    /// @param unitPrice Token units for a score of 1,000,000, which is 100 samples of full quality.
    /// @param epochs The owner's plan: recorded, not enforced.
    struct JobTerms {
        address coordinator;
        bytes32 model;
        bytes32 dataset;
        uint128 unitPrice;
        uint32 epochs;
    }
    /// @notice A job.
    /// @param free Escrow that is allotted to no share.
    /// @param nextSeq The sequence number that the coordinator's next batch must carry.
    /// @param endsAt When the owner may take `free` back; 0 while that was not requested.
    struct Job {
        address owner;
        JobTerms terms;
        uint96 free;
        uint32 nextSeq;
        uint40 endsAt;
    }
    /// @notice What a node says it is: a digest of its capabilities, the name of its device's class, and its memory.
    struct NodeMeta {
        bytes32 capabilities;
        bytes32 device;
        uint32 memoryMb;
    }
    /// @notice The coordinator's receipt for one contribution.
    /// @param sequence Dense for each node in a job, from 0.
    /// @param contribution hashStruct of the Contribution that the node signed.
    /// @param evaluator Names what measured the quality.
    /// @param totalScore Sum of samples times quality over the node's receipts in the job, this one included.
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
        uint64 totalScore;
    }
    /// @notice The arbiters' decision to void a node's share of an epoch. `evidence` is the digest of a document that says why.
    /// @param penalty The most to take from the node's stake on top, from what no payment locks.
    struct Verdict {
        bytes32 job;
        uint32 epoch;
        address node;
        uint128 penalty;
        bytes32 evidence;
    }
    /// @notice Where a node's share of an epoch stands. `NONE`: nothing was allotted in this epoch.
    enum ShareState {
        NONE,
        DUE,
        PAID,
        VOID
    }
    /// @notice A node's share of an epoch: what is due, was paid or was voided.
    struct Share {
        ShareState state;
        uint96 amount;
    }
    /// @notice An epoch of a job: the times of its first record and of its closing, 0 before that.
    struct Epoch {
        uint40 openedAt;
        uint40 closedAt;
    }
    /// @notice A node in a job. `earned` is what was allotted, whether it is due, paid or void by now.
    struct Account {
        uint32 counted;
        uint64 score;
        uint96 earned;
    }
    /// @notice A node, with its sums over some jobs.
    struct NodeMetrics {
        uint32 id;
        NodeMeta meta;
        uint256 staked;
        uint256 locked;
        uint256 credit;
        uint256 receipts;
        uint256 score;
        uint256 earned;
    }

    event JobOpened(
        bytes32 indexed job, address indexed owner, address indexed coordinator, bytes32 salt, JobTerms terms, uint256 escrow
    );
    event JobFunded(bytes32 indexed job, address indexed from, uint256 amount);
    event ReclaimRequested(bytes32 indexed job, uint256 endsAt);
    event JobReclaimed(bytes32 indexed job, address indexed owner, uint256 amount);
    event NodeRegistered(address indexed node, uint32 indexed id, NodeMeta meta);
    event Staked(address indexed node, uint256 amount, uint256 staked);
    event UnstakeRequested(address indexed node, uint256 amount, uint256 releaseAt);
    event StakeWithdrawn(address indexed node, uint256 amount);
    /// @notice The token refused a transfer, so the amount waits for `withdrawCredit`.
    event Credited(address indexed account, uint256 amount);
    event CreditWithdrawn(address indexed account, address indexed to, uint256 amount);
    /// @notice `epoch` took a batch.
    event BatchRecorded(bytes32 indexed job, uint32 indexed epoch, uint32 seq, bytes32 root);
    /// @notice `epoch` took a receipt, which added `amount` to the node's share.
    event ContributionRecorded(
        bytes32 indexed job, address indexed node, uint32 indexed epoch, uint64 sequence, uint64 totalScore, uint256 amount
    );
    event EpochClosed(bytes32 indexed job, uint32 indexed epoch);
    /// @notice Each node got its amount; 0 where it was passed over.
    event PaymentsDistributed(bytes32 indexed job, uint32 indexed epoch, address[] nodes, uint256[] amounts);
    event ContributionVoided(
        bytes32 indexed job, address indexed node, uint32 indexed epoch, uint256 amount, uint256 penalty, bytes32 evidence
    );

    error BadOptions();
    error BadTerms();
    error UnknownJob(bytes32 job);
    error JobExists();
    error JobEnded(uint256 endedAt);
    error NotOwner(address caller);
    error NotCoordinator(address caller);
    error WrongSequence(uint256 expected, uint256 given);
    error AlreadyRequested();
    error NotRequested();
    error TooEarly(uint256 until);
    /// @notice The token took a fee: only what arrives in full is accepted.
    error TransferShort(uint256 expected, uint256 received);
    error NothingToWithdraw();
    error AlreadyRegistered();
    error NotRegistered();
    error StakeLocked(uint256 available, uint256 wanted);
    error BadSignature(address signer);
    /// @notice The receipt adds nothing to what is recorded.
    error NothingNew();
    /// @notice The receipt cannot be recorded in this epoch.
    error WrongEpoch(uint32 epoch);
    error EpochIsOpen(uint32 epoch);
    error EpochIsClosed(uint32 epoch);
    error TooManyNodes(uint256 given, uint256 most);
    error WindowOver(uint256 closedAt);
    error NothingToVoid();
    error NoQuorum(uint256 valid, uint256 required);
    /// @notice The signer is no arbiter, or does not come after the signer before.
    error BadArbiter(address signer);

    /// @notice The one token that is paid in.
    function TOKEN() external view returns (IERC20);
    /// @notice Seconds from the closing of an epoch in which arbiters may void its shares. At least 30.
    function CHALLENGE_WINDOW() external view returns (uint32);
    /// @notice Seconds that stake waits to leave, that nodes have from the announcement of a job's end, and that an epoch is open
    /// before anyone may close it. At least the challenge window.
    function UNBONDING() external view returns (uint32);
    /// @notice How many arbiters must sign a verdict.
    function QUORUM() external view returns (uint8);
    /// @notice Where penalties go.
    function TREASURY() external view returns (address);
    /// @notice Whether an account's signature counts in verdicts.
    function isArbiter(address account) external view returns (bool);

    // Jobs

    /// @notice Open a job that the caller owns and put `escrow` into it, which the caller has approved for this contract.
    /// @return job Its key. Reverts with `JobExists` for a salt that the caller used before.
    function openJob(bytes32 salt, JobTerms calldata terms, uint256 escrow) external returns (bytes32 job);
    /// @notice Add to a job's free escrow. Anyone may, until the job takes nothing new any more.
    function fund(bytes32 job, uint256 amount) external;
    /// @notice Announce that the owner takes back what is free, `UNBONDING + CHALLENGE_WINDOW` seconds from now. Nodes have
    /// `UNBONDING` seconds of them to force their receipts in; after that nothing new is recorded and anyone may close epochs.
    function requestReclaim(bytes32 job) external;
    /// @notice Pay the free escrow to the owner, once the announced time has come; again where voided shares return to it later.
    function reclaim(bytes32 job) external;
    /// @notice A job. Reverts with `UnknownJob`.
    function getJob(bytes32 job) external view returns (Job memory);
    /// @notice The key of the job that `owner` opens with `salt`.
    function jobId(address owner, bytes32 salt) external pure returns (bytes32);

    // Nodes

    /// @notice Register the caller as a node, with optional stake. A node that is not registered is paid after the window.
    /// @return id Dense from 1, in the order of registration.
    function registerNode(NodeMeta calldata meta, uint256 stakeAmount) external returns (uint32 id);
    /// @notice Add to the caller's stake. What is unbonding stays as it is.
    function stake(uint256 amount) external;
    /// @notice Start unbonding stake that no payment locks. It no longer buys payment at once and can still be slashed. Asking
    /// again adds to it and starts the wait afresh.
    function unstake(uint256 amount) external;
    /// @notice Pay out what has unbonded.
    function withdrawStake() external returns (uint256 amount);
    /// @notice Pay the caller's credit to `to`: the way to money that the token would not transfer to the caller itself.
    function withdrawCredit(address to) external returns (uint256 amount);
    /// @notice What waits for `withdrawCredit`.
    function creditOf(address account) external view returns (uint256);
    /// @notice A node's stake.
    /// @return staked With what is locked, without what is unbonding.
    /// @return locked What payments lock, each for one to two windows.
    /// @return unbonding What waits for `releaseAt`.
    function stakeOf(address node) external view returns (uint256 staked, uint256 locked, uint256 unbonding, uint256 releaseAt);
    /// @notice How many nodes have registered, which is the newest id. `NodeRegistered` tells their addresses.
    function nodeCount() external view returns (uint32);
    /// @notice A node, with its sums over `jobs` (events tell which).
    function getNodeMetrics(address node, bytes32[] calldata jobs) external view returns (NodeMetrics memory);

    // Recording

    /// @notice Record a batch of receipts by the totals of its nodes. Only the job's coordinator may.
    /// @param epoch Where shares are added; where this epoch is closed, the first open one after it.
    /// @param seq Must be the job's `nextSeq`: the same transaction sent twice reverts with `WrongSequence`.
    /// @param root Merkle root over the batch's receipts, for whoever checks the totals: OpenZeppelin's tree, each leaf
    /// `keccak256(bytes.concat(hashStruct))`.
    /// @param entries One word a node: `address[160] counted[32] totalScore[64]`, the address highest, both numbers after this
    /// batch. An entry that is old in part or as a whole raises what it can.
    function submitAggregate(bytes32 job, uint32 epoch, uint32 seq, bytes32 root, bytes32[] calldata entries) external;
    /// @notice Record the totals that one receipt states. Anyone may: a coordinator cannot censor what it has signed.
    /// @param nodeSignature The node's, over the Contribution whose hashStruct the receipt names.
    /// @param coordinatorSignature The coordinator's, over the receipt.
    /// @param epoch The receipt's own, or a later one that follows on a closed one, so that nobody opens epochs ahead of time.
    /// Where it is closed, the first open one after it is taken.
    /// @dev Reverts with `NothingNew` where it raises nothing.
    function submitContribution(
        Receipt calldata receipt,
        bytes calldata nodeSignature,
        bytes calldata coordinatorSignature,
        uint32 epoch
    ) external;
    /// @notice A node in a job.
    function getAccount(bytes32 job, address node) external view returns (Account memory);

    // Paying

    /// @notice Close an epoch: its shares change no more, and its challenge window begins. The coordinator and the owner may at
    /// any time; anyone may `UNBONDING` seconds after the epoch's first record, or once the job takes nothing new any more.
    function closeEpoch(bytes32 job, uint32 epoch) external;
    /// @notice Pay the shares of at most 250 nodes, each to its node. Anyone may, as often as they like: a share that is not due,
    /// or that has to wait for the end of the window, is passed over. Where the coordinator or the owner calls and the epoch is
    /// still open, it is closed first.
    /// @return total What was paid or credited.
    function distributePayments(bytes32 job, uint32 epoch, address[] calldata nodes) external returns (uint256 total);
    /// @notice What a node gets for an epoch; 0 where arbiters voided it. It can still grow while the epoch is open.
    function calculateRewards(bytes32 job, uint32 epoch, address node) external view returns (uint256);
    /// @notice A node's share of an epoch.
    function getContribution(bytes32 job, uint32 epoch, address node) external view returns (Share memory);
    /// @notice An epoch of a job.
    function getEpoch(bytes32 job, uint32 epoch) external view returns (Epoch memory);
    /// @notice Void a node's share of a closed epoch inside its challenge window: the amount returns to the job's free escrow, out
    /// of the stake that the payment locked where it was paid already. A penalty goes from free stake to the treasury.
    /// @param signatures Of at least `QUORUM` arbiters over the verdict, in ascending order of their addresses.
    /// @dev The voided amount stays part of `earned`, so it is never allotted again.
    function voidContribution(Verdict calldata verdict, bytes[] calldata signatures) external;
}
