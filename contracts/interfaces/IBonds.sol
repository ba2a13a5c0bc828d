// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title What coordinators stand for with money, and who may stop what.
/// @notice A coordinator posts a bond before a job names it, and has it back when none of its jobs runs any more. A job is opened
/// by its coordinator, or by an owner whom the coordinator has allowed: the bond is held until the owner ends the job. A proof
/// that it signed two different receipts under one number costs it the whole bond.
interface IBonds {
    event BondPosted(address indexed coordinator, uint256 amount, uint256 bond);
    event UnbondRequested(address indexed coordinator, uint256 releaseAt);
    event BondWithdrawn(address indexed coordinator, uint256 amount);
    event OwnerAllowed(address indexed coordinator, address indexed owner, bool isAllowed);

    error BadOptions();
    error NotGuardian();
    error BondMissing(uint256 required, uint256 posted);
    /// @notice The coordinator that the job would name has not allowed its opener.
    error OwnerNotAllowed(address owner);
    error JobsRunning(uint256 jobs);
    error JobNotEnded();
    error AlreadyRetired();
    error NoQuorum(uint256 valid, uint256 required);
    /// @notice The signer is no arbiter, or does not come after the one before.
    error BadArbiter(address signer);

    /// @notice Add to the caller's bond as a coordinator.
    function postBond(uint256 amount) external;

    /// @notice Start unbonding the caller's bond; only while none of its jobs runs. Opening a job with it ends the wait.
    function unbond() external;

    /// @notice Pay out the bond, `UNBONDING` seconds after `unbond`. Works while paused.
    function withdrawBond() external returns (uint256 amount);

    /// @notice Let an account open jobs that name the caller as their coordinator, or no more from now on. Jobs that are open
    /// stay: only their owner announces their end, and until then they hold the caller's bond.
    function allowOwner(address owner, bool isAllowed) external;

    /// @notice Whether an account may open jobs that name a coordinator. A coordinator may always open its own.
    function isAllowedOwner(address coordinator, address owner) external view returns (bool);

    /// @notice Count a job as over for its coordinator's bond: its announced end has come. Anyone may, once a job.
    function retireJob(bytes32 job) external;

    /// @notice A coordinator's bond, how many of its jobs are not retired, and when the bond is free (0: not asked for).
    function bondOf(address coordinator) external view returns (uint256 bond, uint256 jobs, uint256 releaseAt);

    /// @notice Stop new work: opening and funding jobs, stake, bonds, batches, roots, pay against stake. Recording one's own
    /// receipt, closing, paying after the window, vouchers, claims and withdrawals go on.
    function pause() external;

    /// @notice End the pause.
    function unpause() external;
}
