// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Roles} from "./Roles.sol";

/// @title Jobs and their escrow.
abstract contract JobEscrow is Roles {
    using SafeCast for uint256;

    /// @dev In slots: a batch reads the first two and writes the second alone. `coordinator` is zero in a job that is not open.
    struct JobRecord {
        address coordinator;
        uint40 endsAt;
        uint32 epochs;
        uint128 unitPrice;
        uint96 free;
        uint32 nextSeq;
        address owner;
        bytes32 model;
        bytes32 dataset;
    }

    mapping(bytes32 job => JobRecord) internal _jobs;

    function openJob(bytes32 salt, JobTerms calldata terms, uint256 escrow) external nonReentrant returns (bytes32 job) {
        if (terms.coordinator == address(0)) revert BadTerms();
        job = jobId(msg.sender, salt);
        if (_jobs[job].coordinator != address(0)) revert JobExists();
        _jobs[job] = JobRecord({
            coordinator: terms.coordinator,
            endsAt: 0,
            epochs: terms.epochs,
            unitPrice: terms.unitPrice,
            free: escrow.toUint96(),
            nextSeq: 0,
            owner: msg.sender,
            model: terms.model,
            dataset: terms.dataset
        });
        emit JobOpened(job, msg.sender, terms.coordinator, salt, terms, escrow);
        _pull(escrow);
    }

    function fund(bytes32 job, uint256 amount) external nonReentrant {
        _running(job).free += amount.toUint96();
        emit JobFunded(job, msg.sender, amount);
        _pull(amount);
    }

    function requestReclaim(bytes32 job) external {
        JobRecord storage record = _owned(job);
        if (record.endsAt != 0) revert AlreadyRequested();
        record.endsAt = _after(uint256(UNBONDING) + CHALLENGE_WINDOW);
        emit ReclaimRequested(job, record.endsAt);
    }

    function reclaim(bytes32 job) external nonReentrant {
        JobRecord storage record = _owned(job);
        if (record.endsAt == 0) revert NotRequested();
        _requireReached(record.endsAt);
        uint96 amount = record.free;
        record.free = 0;
        emit JobReclaimed(job, msg.sender, amount);
        _push(msg.sender, amount);
    }

    function getJob(bytes32 job) external view returns (Job memory) {
        JobRecord storage record = _opened(job);
        JobTerms memory terms =
            JobTerms(record.coordinator, record.model, record.dataset, record.unitPrice, record.epochs);
        return Job(record.owner, terms, record.free, record.nextSeq, record.endsAt);
    }

    function jobId(address owner, bytes32 salt) public pure returns (bytes32) {
        return keccak256(abi.encode(owner, salt));
    }

    /// @dev The job, if it was ever opened.
    function _opened(bytes32 job) internal view returns (JobRecord storage record) {
        record = _jobs[job];
        if (record.coordinator == address(0)) revert UnknownJob(job);
    }

    /// @dev The job, if it is the caller's.
    function _owned(bytes32 job) private view returns (JobRecord storage record) {
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

    /// @dev Whether the caller may close a job's epochs at any time.
    function _isCloser(JobRecord storage record) internal view returns (bool) {
        return msg.sender == record.coordinator || msg.sender == record.owner;
    }
}
