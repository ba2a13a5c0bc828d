// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title What can be taken back, by whom, and until when.
/// @notice Arbiters judge the quality of work, m of n of them, and only inside the challenge window. Equivocation needs no
/// judge: two signatures prove it, at any time, and anyone may show them.
///
/// Voided pay returns to the job's escrow. Penalties and bonds go to the treasury, less a tenth of a bond for whoever proved
/// the case: nobody who decides gains by it, and a coordinator that reports itself loses nine tenths.
interface IDisputes {
    /// @notice What arbiters sign (EIP-712) to void a node's share of an epoch.
    /// @param penalty The most to take from the node's stake on top, from what no other payment locks.
    /// @param evidence Digest of a document that says why.
    struct Verdict {
        bytes32 job;
        uint32 epoch;
        address node;
        uint128 penalty;
        bytes32 evidence;
    }

    /// @notice What arbiters sign (EIP-712) to stop a voucher's pending claim and the node's further vouchers in the job.
    struct VoucherVerdict {
        bytes32 job;
        address node;
        bytes32 evidence;
    }

    event ContributionVoided(
        bytes32 indexed job, address indexed node, uint32 epoch, uint256 returned, uint256 penalty, bytes32 evidence
    );
    event VoucherVoided(bytes32 indexed job, address indexed node, uint256 returned, bytes32 evidence);
    event Equivocation(bytes32 indexed job, address indexed coordinator, address indexed prover, uint256 slashed);

    error WindowOver(uint256 closedAt);
    error NothingToVoid();
    error NoEquivocation();

    /// @notice Void a node's share of a closed epoch inside its challenge window. What was paid already is taken from the
    /// stake that the payment locked; what it had made good of a claim that `voidVoucher` stopped is taken from what is still
    /// pending, inside the claim's window.
    /// @param signatures Of at least `QUORUM` arbiters over the verdict, in ascending order of their addresses. Each is 65
    /// bytes r, s, v.
    function voidContribution(Verdict calldata verdict, bytes[] calldata signatures) external;

    /// @notice Return a voucher's claim to the job, if its window is not over, and refuse the node's vouchers in this job from
    /// now on. Its shares of epochs are untouched: what they have made good of the claim stays pending, and `voidContribution`
    /// takes those back.
    function voidVoucher(VoucherVerdict calldata verdict, bytes[] calldata signatures) external;
}
