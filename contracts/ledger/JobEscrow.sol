// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Purse} from "../libraries/Purses.sol";
import {Shares} from "../libraries/Shares.sol";
import {Bonds} from "./Bonds.sol";

/// @title Jobs and their escrow.
abstract contract JobEscrow is Bonds {
    using SafeCast for uint256;

    /// @dev A batch writes `purse` alone, closing an epoch too.
    struct JobRecord {
        address coordinator;
        uint40 openedAt;
        uint40 endsAt;
        uint16 guaranteedBps;
        Purse purse;
        uint128 unitPrice;
        uint96 spendLimit;
        uint32 epochs;
        address owner;
        bool isRetired;
        bytes32 model;
        bytes32 dataset;
    }

    mapping(bytes32 job => JobRecord) internal _jobs;

    function openJob(bytes32 salt, JobTerms calldata terms, uint256 escrow)
        external
        nonReentrant
        whenNotPaused
        returns (bytes32 job)
    {
        if (terms.coordinator == address(0) || terms.guaranteedBps > Shares.FULL_QUALITY_BPS || terms.epochs == 0) {
            revert BadTerms();
        }
        job = jobId(msg.sender, salt);
        JobRecord storage record = _jobs[job];
        if (record.openedAt != 0) revert JobExists();
        _engageBond(terms.coordinator);
        record.coordinator = terms.coordinator;
        record.openedAt = _after(0);
        record.guaranteedBps = terms.guaranteedBps;
        record.purse = record.purse.withFree(escrow.toUint96());
        record.unitPrice = terms.unitPrice;
        record.spendLimit = terms.spendLimit;
        record.epochs = terms.epochs;
        record.owner = msg.sender;
        record.model = terms.model;
        record.dataset = terms.dataset;
        emit JobOpened(job, msg.sender, terms.coordinator, salt);
        emit JobFunded(job, msg.sender, escrow, escrow);
        _pull(escrow);
    }

    function fund(bytes32 job, uint256 amount) external nonReentrant whenNotPaused {
        _running(job);
        _release(job, amount);
        emit JobFunded(job, msg.sender, amount, _jobs[job].purse.free());
        _pull(amount);
    }

    function raiseSpendLimit(bytes32 job, uint96 limit) external {
        JobRecord storage record = _owned(job);
        if (limit <= record.spendLimit) revert LimitNotRaised();
        record.spendLimit = limit;
        emit SpendLimitRaised(job, limit);
    }

    function requestReclaim(bytes32 job) external {
        JobRecord storage record = _owned(job);
        if (record.endsAt != 0) revert AlreadyRequested();
        record.endsAt = _after(uint256(UNBONDING) + CHALLENGE_WINDOW);
        emit ReclaimRequested(job, record.endsAt);
    }

    function reclaim(bytes32 job) external nonReentrant {
        JobRecord storage record = _owned(job);
        _ended(job);
        uint96 amount = record.purse.free();
        record.purse = record.purse.withFree(0);
        emit JobReclaimed(job, msg.sender, amount);
        _push(msg.sender, amount);
    }

    function retireJob(bytes32 job) external {
        JobRecord storage record = _ended(job);
        if (record.isRetired) revert AlreadyRetired();
        record.isRetired = true;
        _disengageBond(record.coordinator);
    }

    function getJob(bytes32 job) external view returns (Job memory) {
        JobRecord storage record = _opened(job);
        return Job({
            owner: record.owner,
            terms: JobTerms({
                coordinator: record.coordinator,
                model: record.model,
                dataset: record.dataset,
                epochs: record.epochs,
                unitPrice: record.unitPrice,
                guaranteedBps: record.guaranteedBps,
                spendLimit: record.spendLimit
            }),
            free: record.purse.free(),
            spendable: _spendable(record),
            nextSeq: record.purse.nextSeq(),
            openedAt: record.openedAt,
            endsAt: record.endsAt
        });
    }

    function jobId(address owner, bytes32 salt) public pure returns (bytes32) {
        return keccak256(abi.encode(owner, salt));
    }

    /// @dev The job, if it was ever opened.
    function _opened(bytes32 job) internal view returns (JobRecord storage record) {
        record = _jobs[job];
        if (record.openedAt == 0) revert UnknownJob(job);
    }

    /// @dev The job, if it is the caller's.
    function _owned(bytes32 job) internal view returns (JobRecord storage record) {
        record = _opened(job);
        if (msg.sender != record.owner) revert NotOwner(msg.sender);
    }

    /// @dev The job, if new work may still be recorded in it.
    function _running(bytes32 job) internal view returns (JobRecord storage record) {
        record = _opened(job);
        if (_isOver(record)) revert JobEnded(record.endsAt - CHALLENGE_WINDOW);
    }

    /// @dev Whether a job takes nothing new any more: the last window before its announced end has begun.
    function _isOver(JobRecord storage record) internal view returns (bool) {
        uint40 endsAt = record.endsAt;
        return endsAt != 0 && block.timestamp >= endsAt - CHALLENGE_WINDOW;
    }

    /// @dev The job, if its announced end has come.
    function _ended(bytes32 job) internal view returns (JobRecord storage record) {
        record = _opened(job);
        if (record.endsAt == 0) revert JobNotEnded();
        _requireReached(record.endsAt);
    }

    /// @dev Let the coordinator take the next number of the job's one sequence.
    function _takeSequence(bytes32 job, uint32 seq) internal {
        JobRecord storage record = _running(job);
        if (msg.sender != record.coordinator) revert NotCoordinator(msg.sender);
        Purse purse = record.purse;
        if (seq != purse.nextSeq()) revert WrongSequence(purse.nextSeq(), seq);
        record.purse = purse.withNextSeq(seq + 1);
    }

    /// @dev Move `amount` from free to reserved, inside the spend limit.
    function _reserve(bytes32 job, uint96 amount) internal {
        if (amount == 0) return;
        JobRecord storage record = _jobs[job];
        Purse purse = record.purse.inPeriod(_period());
        uint96 spendable = purse.spendable(record.spendLimit);
        if (amount > spendable) revert SpendLimitExceeded(spendable, amount);
        record.purse = purse.reserve(amount);
    }

    /// @dev Move `amount`, which is free, to reserved in a job that is over: whatever the limit, or what is recorded and worth more
    /// could not be reserved before the owner takes the rest.
    function _reserveAtEnd(bytes32 job, uint96 amount) internal {
        JobRecord storage record = _jobs[job];
        record.purse = record.purse.withFree(record.purse.free() - amount);
    }

    /// @dev Return reserved money to a job's free escrow, or add new money to it.
    function _release(bytes32 job, uint256 amount) internal {
        if (amount == 0) return;
        JobRecord storage record = _jobs[job];
        record.purse = record.purse.withFree(record.purse.free() + amount.toUint96());
    }

    function _spendable(JobRecord storage record) internal view returns (uint96) {
        return record.purse.inPeriod(_period()).spendable(record.spendLimit);
    }

    /// @dev Which challenge window it is, counted from 1970.
    function _period() internal view returns (uint32) {
        return (block.timestamp / CHALLENGE_WINDOW).toUint32();
    }
}
