// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev Batches and forced receipts: totals rise, and what they rise by is allotted.
contract RecordingTest is World {
    function assertAccount(address account, uint256 counted, uint256 score, uint256 earned) private view {
        ITrainingLedger.Account memory now_ = ledger.getAccount(job, account);
        vm.assertEq(now_.counted, counted, "counted");
        vm.assertEq(now_.score, score, "score");
        vm.assertEq(now_.earned, earned, "earned");
    }

    function assertShare(uint32 epoch, address account, uint256 amount) private view {
        ITrainingLedger.Share memory share = ledger.getContribution(job, epoch, account);
        vm.assertEq(share.amount, amount, "share");
        vm.assertEq(ledger.calculateRewards(job, epoch, account), amount, "reward");
        ITrainingLedger.ShareState due = ITrainingLedger.ShareState.DUE;
        assert(share.state == (amount == 0 ? ITrainingLedger.ShareState.NONE : due));
    }

    function test_a_batch_records_each_of_its_nodes() public {
        bytes32[] memory made = new bytes32[](2);
        made[0] = entry(node, 3, 2 * POINT);
        made[1] = entry(other, 5, 4 * POINT + 1);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.BatchRecorded(job, 0, 0, "root");
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 0, "root", made);
        assertAccount(node, 3, 2 * POINT, 2 * PRICE);
        assertAccount(other, 5, 4 * POINT + 1, 4 * PRICE);
        assertShare(0, node, 2 * PRICE);
        assertShare(0, other, 4 * PRICE);
        ITrainingLedger.Job memory now_ = ledger.getJob(job);
        vm.assertEq(now_.free, ESCROW - 6 * PRICE);
        vm.assertEq(now_.nextSeq, 1);
        vm.assertEq(ledger.getEpoch(job, 0).openedAt, block.timestamp);
        bytes32[] memory jobs = new bytes32[](2);
        jobs[0] = job;
        ITrainingLedger.NodeMetrics memory metrics = ledger.getNodeMetrics(node, jobs);
        vm.assertEq(metrics.receipts, 3);
        vm.assertEq(metrics.score, 2 * POINT);
        vm.assertEq(metrics.earned, 2 * PRICE);
    }

    function test_later_batches_add_the_difference() public {
        work(0, node, 2);
        vm.warp(block.timestamp + 5);
        work(0, node, 1);
        work(1, node, 4);
        assertAccount(node, 3, 7 * POINT, 7 * PRICE);
        assertShare(0, node, 3 * PRICE);
        assertShare(1, node, 4 * PRICE);
        vm.assertEq(ledger.getEpoch(job, 0).openedAt, block.timestamp - 5);
    }

    function test_rounding_down_loses_nothing_over_time() public {
        for (uint32 i = 1; i <= 7; ++i) {
            record(0, node, i, i * POINT / 7);
        }
        assertAccount(node, 7, POINT, PRICE);
        assertShare(0, node, PRICE);
    }

    function test_old_and_mixed_entries_raise_what_they_can() public {
        record(0, node, 5, 5 * POINT);
        record(0, node, 5, 5 * POINT);
        record(0, node, 4, 3 * POINT);
        assertAccount(node, 5, 5 * POINT, 5 * PRICE);
        record(0, node, 2, 6 * POINT);
        assertAccount(node, 5, 6 * POINT, 6 * PRICE);
        record(0, node, 9, 1);
        assertAccount(node, 9, 6 * POINT, 6 * PRICE);
        assertShare(0, node, 6 * PRICE);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 6 * PRICE);
    }

    function test_the_coordinator_alone_records_batches() public {
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotCoordinator.selector, OWNER));
        vm.prank(OWNER);
        ledger.submitAggregate(job, 0, 0, "", new bytes32[](0));
    }

    function test_a_batch_sent_twice_is_refused() public {
        work(0, node, 1);
        for (uint32 given = 0; given < 3; given += 2) {
            vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.WrongSequence.selector, 1, given));
            vm.prank(coordinator);
            ledger.submitAggregate(job, 0, given, "", new bytes32[](0));
        }
    }

    function test_a_batch_for_a_closed_epoch_goes_to_the_next_open_one() public {
        close(3);
        close(4);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.BatchRecorded(job, 5, 0, "root");
        work(3, node, 2);
        assertShare(3, node, 0);
        assertShare(5, node, 2 * PRICE);
    }

    function test_a_short_escrow_is_made_good_after_funding() public {
        uint64 points = uint64(ESCROW / PRICE);
        uint256 left = ESCROW % PRICE;
        work(0, other, points);
        work(0, node, 2);
        assertAccount(node, 1, 2 * POINT, left);
        assertShare(0, node, left);
        work(0, node, 0);
        assertAccount(node, 2, 2 * POINT, left);
        give(OWNER, 9 * PRICE);
        vm.prank(OWNER);
        ledger.fund(job, 9 * PRICE);
        record(1, node, 2, 2 * POINT);
        assertAccount(node, 2, 2 * POINT, 2 * PRICE);
        assertShare(1, node, 2 * PRICE - left);
        vm.assertEq(ledger.getJob(job).free, 7 * PRICE + left);
    }

    function test_the_most_a_node_can_earn_fits_its_field() public {
        ITrainingLedger.JobTerms memory dear = terms();
        dear.unitPrice = type(uint128).max;
        uint96 most = type(uint96).max;
        for (uint256 i = 0; i < 2; ++i) {
            give(OWNER, most);
        }
        vm.prank(OWNER);
        job = ledger.openJob("dear", dear, most);
        record(0, node, 1, type(uint64).max);
        assertAccount(node, 1, type(uint64).max, most);
        vm.prank(OWNER);
        ledger.fund(job, 1);
        vm.expectRevert();
        this.recordAgain();
        record(0, other, 1, type(uint64).max);
        assertAccount(other, 1, type(uint64).max, 1);
    }

    function recordAgain() external {
        record(0, node, 1, type(uint64).max);
    }

    function test_anyone_forces_a_receipt_in() public {
        work(0, node, 1);
        ITrainingLedger.Receipt memory made = receipt(node, 4, 6 * POINT);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.ContributionRecorded(job, node, 0, 4, 6 * POINT, 5 * PRICE);
        vm.prank(STRANGER);
        ledger.submitContribution(made, own, counter, 0);
        assertAccount(node, 5, 6 * POINT, 6 * PRICE);
        assertShare(0, node, 6 * PRICE);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 6 * PRICE);
        vm.assertEq(ledger.getJob(job).nextSeq, 1);
        vm.expectRevert(ITrainingLedger.NothingNew.selector);
        ledger.submitContribution(made, own, counter, 0);
        work(0, node, 1);
        assertAccount(node, 6, 7 * POINT, 7 * PRICE);
    }

    function test_a_receipt_of_no_score_is_counted() public {
        force(receipt(node, 0, 0), NODE_KEY, 0);
        assertAccount(node, 1, 0, 0);
        assertShare(0, node, 0);
    }

    function test_both_signatures_are_needed() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0, POINT);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory wrong = signature(OTHER_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadSignature.selector, node));
        ledger.submitContribution(made, wrong, counter, 0);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadSignature.selector, coordinator));
        ledger.submitContribution(made, own, own, 0);
        made.totalScore += 1;
        vm.expectPartialRevert(ITrainingLedger.BadSignature.selector);
        ledger.submitContribution(made, own, counter, 0);
    }

    function test_nobody_signs_for_no_account() public {
        ITrainingLedger.Receipt memory made = receipt(address(0), 0, POINT);
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadSignature.selector, address(0)));
        ledger.submitContribution(made, "", counter, 0);
    }

    function test_signatures_hold_on_one_chain_and_ledger() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0, POINT);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.chainId(block.chainid + 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadSignature.selector, node));
        ledger.submitContribution(made, own, counter, 0);
    }

    function test_a_receipt_settles_in_its_epoch_or_one_that_follows_on_a_closed_one() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0, POINT);
        made.epoch = 2;
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        close(0);
        for (uint32 wrong = 1; wrong < 5; ++wrong) {
            if (wrong == 2) continue;
            vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.WrongEpoch.selector, wrong));
            ledger.submitContribution(made, own, counter, wrong);
        }
        close(4);
        close(5);
        ledger.submitContribution(made, own, counter, 5);
        assertShare(6, node, PRICE);
    }

    function test_a_sequence_has_32_bits() public {
        force(receipt(node, type(uint32).max - 1, POINT), NODE_KEY, 0);
        assertAccount(node, type(uint32).max, POINT, PRICE);
        ITrainingLedger.Receipt memory made = receipt(node, type(uint32).max, 2 * POINT);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectRevert();
        ledger.submitContribution(made, own, counter, 0);
    }

    /// @dev Totals of one node by batches and receipts, in any order, give the same account.
    function test_order_does_not_matter(uint64[6] memory scores, uint256 order) public {
        uint64 most;
        uint32 count;
        for (uint32 i = 0; i < 6; ++i) {
            uint64 score = scores[i] % (100 * POINT);
            uint32 sequence = uint32(order >> (i * 8)) % 50;
            if (score > most) most = score;
            if (sequence + 1 > count) count = sequence + 1;
            if (order >> (200 + i) & 1 == 0) record(0, node, sequence + 1, score);
            else try this.forceAny(sequence, score) {} catch {}
        }
        assertAccount(node, count, most, uint256(most) * PRICE / POINT);
        vm.assertEq(ledger.calculateRewards(job, 0, node), uint256(most) * PRICE / POINT);
    }

    function forceAny(uint64 sequence, uint64 score) external {
        force(receipt(node, sequence, score), NODE_KEY, 0);
    }
}
