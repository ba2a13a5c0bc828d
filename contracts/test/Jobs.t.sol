// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {LedgerOptions} from "../ledger/Roles.sol";
import {World} from "./harness/World.sol";

/// @dev Deployment, jobs and their escrow, from opening to reclaim.
contract JobsTest is World {
    function isMade(LedgerOptions memory given) private returns (bool) {
        return create("TrainingLedger", abi.encode(given)) != address(0);
    }

    function test_options_are_kept() public view {
        assert(address(ledger.TOKEN()) == address(token));
        vm.assertEq(ledger.CHALLENGE_WINDOW(), WINDOW);
        vm.assertEq(ledger.UNBONDING(), UNBONDING);
        vm.assertEq(ledger.QUORUM(), 2);
        vm.assertEq(ledger.TREASURY(), TREASURY);
        for (uint256 i = 0; i < 3; ++i) {
            assert(ledger.isArbiter(vm.addr(arbiterKeys[i])));
        }
        assert(!ledger.isArbiter(OWNER));
    }

    function test_least_and_most_options() public {
        LedgerOptions memory made = options();
        (made.window, made.unbonding, made.quorum) = (30, 30, 3);
        assert(isMade(made));
    }

    function test_bad_options_are_refused() public {
        for (uint256 i = 0; i < 7; ++i) {
            LedgerOptions memory made = options();
            if (i == 0) made.window = 29;
            if (i == 1) made.unbonding = WINDOW - 1;
            if (i == 2) made.treasury = address(0);
            if (i == 3) made.quorum = 0;
            if (i == 4) made.quorum = 4;
            if (i == 5) made.token = IERC20(STRANGER);
            if (i == 6) made.arbiters[1] = made.arbiters[0];
            assert(!isMade(made));
        }
    }

    function test_a_job_is_opened_with_its_terms_and_escrow() public {
        bytes32 expected = keccak256(abi.encode(OWNER, bytes32("second")));
        give(OWNER, 500);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.JobOpened(expected, OWNER, coordinator, "second", terms(), 500);
        vm.prank(OWNER);
        bytes32 second = ledger.openJob("second", terms(), 500);
        assert(second == expected && ledger.jobId(OWNER, "second") == expected);
        ITrainingLedger.Job memory opened = ledger.getJob(second);
        vm.assertEq(opened.owner, OWNER);
        vm.assertEq(keccak256(abi.encode(opened.terms)), keccak256(abi.encode(terms())));
        vm.assertEq(opened.free, 500);
        vm.assertEq(opened.nextSeq, 0);
        vm.assertEq(opened.endsAt, 0);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW + 500);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
    }

    function test_a_salt_opens_one_job_of_each_owner() public {
        vm.expectRevert(ITrainingLedger.JobExists.selector);
        vm.prank(OWNER);
        ledger.openJob(SALT, terms(), 0);
        vm.prank(STRANGER);
        assert(ledger.openJob(SALT, terms(), 0) != job);
    }

    function test_a_job_needs_a_coordinator() public {
        ITrainingLedger.JobTerms memory made = terms();
        made.coordinator = address(0);
        vm.expectRevert(ITrainingLedger.BadTerms.selector);
        ledger.openJob("x", made, 0);
    }

    function test_an_escrow_has_96_bits() public {
        vm.expectRevert();
        ledger.openJob("x", terms(), 1 << 96);
    }

    function test_an_unknown_job_is_refused() public {
        bytes memory unknown = abi.encodeWithSelector(ITrainingLedger.UnknownJob.selector, bytes32("no"));
        vm.expectRevert(unknown);
        ledger.getJob("no");
        vm.expectRevert(unknown);
        ledger.fund("no", 1);
        vm.expectRevert(unknown);
        ledger.requestReclaim("no");
        vm.expectRevert(unknown);
        ledger.submitAggregate("no", 0, 0, "", new bytes32[](0));
        vm.expectRevert(unknown);
        ledger.closeEpoch("no", 0);
        vm.expectRevert(unknown);
        ledger.distributePayments("no", 0, new address[](0));
    }

    function test_anyone_funds_a_job() public {
        give(STRANGER, 77);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.JobFunded(job, STRANGER, 77);
        vm.prank(STRANGER);
        ledger.fund(job, 77);
        vm.assertEq(ledger.getJob(job).free, ESCROW + 77);
        vm.assertEq(token.balanceOf(STRANGER), 0);
    }

    function request() private {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
    }

    function test_the_owner_alone_requests_and_reclaims() public {
        bytes memory refusal = abi.encodeWithSelector(ITrainingLedger.NotOwner.selector, coordinator);
        vm.expectRevert(refusal);
        vm.prank(coordinator);
        ledger.requestReclaim(job);
        vm.expectRevert(refusal);
        vm.prank(coordinator);
        ledger.reclaim(job);
    }

    function test_a_reclaim_waits_for_its_notice() public {
        vm.expectRevert(ITrainingLedger.NotRequested.selector);
        vm.prank(OWNER);
        ledger.reclaim(job);
        uint256 endsAt = block.timestamp + NOTICE;
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.ReclaimRequested(job, endsAt);
        request();
        vm.assertEq(ledger.getJob(job).endsAt, endsAt);
        vm.expectRevert(ITrainingLedger.AlreadyRequested.selector);
        request();
        vm.warp(endsAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooEarly.selector, endsAt));
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.warp(endsAt);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.JobReclaimed(job, OWNER, ESCROW);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW);
        vm.assertEq(ledger.getJob(job).free, 0);
    }

    function test_a_job_takes_nothing_new_in_its_last_window() public {
        request();
        uint256 over = block.timestamp + UNBONDING;
        vm.warp(over - 1);
        work(0, node, 1);
        ledger.fund(job, 0);
        vm.warp(over);
        bytes memory refusal = abi.encodeWithSelector(ITrainingLedger.JobEnded.selector, over);
        vm.expectRevert(refusal);
        ledger.fund(job, 0);
        vm.expectRevert(refusal);
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 1, "", new bytes32[](0));
        ITrainingLedger.Receipt memory made = receipt(node, 1, 9 * POINT);
        vm.expectRevert(refusal);
        ledger.submitContribution(made, "", "", 0);
    }

    function test_a_reclaim_leaves_shares_that_are_recorded() public {
        work(0, node, 3);
        request();
        vm.warp(block.timestamp + NOTICE);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW - 3 * PRICE);
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        vm.warp(block.timestamp + WINDOW - 1);
        void(0, node, 0);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW);
        vm.assertEq(token.balanceOf(address(ledger)), 0);
    }
}
