// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev The three ways to record a receipt, and that none of them records one twice.
contract RecordingTest is World {
    function submit(uint32 epoch, uint32 seq, ITrainingLedger.NodeTotals[] memory batch) private {
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, "root", batch);
    }

    function submit(uint32 epoch, uint32 seq, bytes memory packed) private {
        vm.prank(coordinator);
        ledger.submitContributions(job, epoch, seq, "root", packed);
    }

    function head(address account, uint48 first, uint16 receipts) private pure returns (bytes memory) {
        return abi.encodePacked(account, first, receipts);
    }

    function one(uint32 samples, uint16 qualityBps) private pure returns (bytes memory) {
        return abi.encodePacked(uint32(3), samples, qualityBps, bytes6("digest"));
    }

    function counted(address account) private view returns (uint256) {
        return ledger.getAccount(job, account).counted;
    }

    function test_only_the_coordinator_submits_and_in_sequence() public {
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotCoordinator.selector, OWNER));
        vm.prank(OWNER);
        ledger.submitAggregate(job, 0, 0, "", totals(node, 0, 1, 1, 1));
        vm.expectRevert(abi.encodeWithSelector(ISettlement.WrongSequence.selector, 0, 1));
        submit(0, 1, totals(node, 0, 1, 1, 1));
        submit(0, 0, totals(node, 0, 1, 1, 1));
        vm.expectRevert(abi.encodeWithSelector(ISettlement.WrongSequence.selector, 1, 0));
        submit(0, 0, totals(node, 1, 1, 1, 1));
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotCoordinator.selector, OWNER));
        vm.prank(OWNER);
        ledger.submitContributions(job, 0, 1, "", "");
        vm.expectRevert(abi.encodeWithSelector(ISettlement.UnknownJob.selector, bytes32("no")));
        vm.prank(coordinator);
        ledger.submitAggregate("no", 0, 0, "", totals(node, 0, 1, 1, 1));
        vm.assertEq(ledger.getJob(job).nextSeq, 1);
    }

    function test_sums_add_up_over_batches() public {
        submit(4, 0, totals(node, 0, 10, 500, 4_000_000));
        vm.warp(block.timestamp + 5);
        submit(4, 1, totals(node, 10, 3, 70, 600_000));
        ITrainingLedger.Contribution memory share = ledger.getContribution(job, 4, node);
        assert(share.state == ITrainingLedger.ShareState.DUE && share.reward == 0 && share.paid == 0);
        vm.assertEq(share.receipts, 13);
        vm.assertEq(share.score, 4_600_000);
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        vm.assertEq(account.counted, 13);
        vm.assertEq(account.samples, 570);
        ITrainingLedger.Epoch memory epoch = ledger.getEpoch(job, 4);
        vm.assertEq(epoch.totalScore, 4_600_000);
        vm.assertEq(epoch.openedAt, block.timestamp - 5);
        assert(epoch.closedAt == 0 && epoch.pool == 0 && !epoch.swept);
    }

    function test_a_part_that_does_not_start_at_counted_is_skipped_and_the_rest_recorded() public {
        force(receipt(node, 0), NODE_KEY, 0);
        ITrainingLedger.NodeTotals[] memory batch = new ITrainingLedger.NodeTotals[](3);
        batch[0] = ITrainingLedger.NodeTotals(node, 0, 5, 100, 100);
        batch[1] = ITrainingLedger.NodeTotals(other, 0, 2, 60, 70);
        batch[2] = ITrainingLedger.NodeTotals(STRANGER, 3, 2, 60, 70);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.NodeSkipped(job, node, 0, 0, 1);
        submit(0, 0, batch);
        vm.assertEq(counted(node), 1);
        vm.assertEq(counted(other), 2);
        vm.assertEq(counted(STRANGER), 0);
        vm.assertEq(ledger.getEpoch(job, 0).totalScore, 9_000_000 + 70);
        submit(0, 1, totals(node, 1, 4, 80, 80));
        vm.assertEq(counted(node), 5);
    }

    function test_totals_that_cannot_be_are_refused() public {
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadTotals.selector, node));
        submit(0, 0, totals(node, 0, 0, 1, 1));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadTotals.selector, node));
        submit(0, 0, totals(node, 0, 1, 1, 10_001));
        submit(0, 0, totals(node, 0, 1, 1, 10_000));
    }

    function test_more_than_the_books_can_hold_is_refused() public {
        uint48 most = type(uint32).max;
        submit(0, 0, totals(node, 0, type(uint32).max, 1, 1));
        vm.expectRevert(ITrainingLedger.FieldIsFull.selector);
        submit(0, 1, totals(node, most, 1, 1, 1));
        submit(1, 1, totals(node, most, 1, type(uint64).max - 1, 1));
        vm.assertEq(ledger.getAccount(job, node).samples, type(uint64).max);
        vm.expectRevert(ITrainingLedger.FieldIsFull.selector);
        submit(2, 2, totals(node, most + 1, 1, 1, 1));
    }

    function test_a_packed_batch_is_summed_on_chain() public {
        bytes memory packed = bytes.concat(
            head(node, 0, 2), one(100, 10_000), one(50, 5_000), head(other, 0, 1), one(type(uint32).max, 9_999)
        );
        submit(2, 0, packed);
        vm.assertEq(counted(node), 2);
        vm.assertEq(ledger.getContribution(job, 2, node).score, 1_250_000);
        vm.assertEq(ledger.getContribution(job, 2, node).receipts, 2);
        vm.assertEq(ledger.getAccount(job, node).samples, 150);
        uint256 large = uint256(type(uint32).max) * 9_999;
        vm.assertEq(ledger.getContribution(job, 2, other).score, large);
        vm.assertEq(ledger.getEpoch(job, 2).totalScore, 1_250_000 + large);
    }

    function test_packed_receipts_that_are_recorded_are_passed_over() public {
        force(receipt(node, 0), NODE_KEY, 0);
        force(receipt(node, 1), NODE_KEY, 0);
        bytes memory packed = bytes.concat(head(node, 0, 3), one(1_000, 9_000), one(1_000, 9_000), one(7, 1_000));
        submit(0, 0, packed);
        vm.assertEq(counted(node), 3);
        vm.assertEq(ledger.getContribution(job, 0, node).score, 18_007_000);
        submit(0, 1, bytes.concat(head(node, 1, 2), one(1, 1), one(1, 1)));
        vm.assertEq(counted(node), 3);
        vm.assertEq(ledger.getContribution(job, 0, node).receipts, 3);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.NodeSkipped(job, node, 2, 1, 3);
        submit(0, 2, bytes.concat(head(node, 0, 1), one(1, 1)));
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.NodeSkipped(job, node, 3, 4, 3);
        submit(0, 3, bytes.concat(head(node, 4, 1), one(1, 1)));
        submit(9, 4, bytes.concat(head(node, 1, 2), one(1, 1), one(1, 1)));
        assert(ledger.getContribution(job, 9, node).state == ITrainingLedger.ShareState.NONE);
        vm.assertEq(counted(node), 3);
        vm.assertEq(ledger.getEpoch(job, 0).totalScore, 18_007_000);
    }

    function test_of_packed_receipts_those_are_recorded_that_follow_the_known_ones() public {
        submit(0, 0, bytes.concat(head(node, 0, 3), one(1, 1), one(1, 1), one(1, 1)));
        submit(0, 1, bytes.concat(head(node, 2, 2), one(1, 1), one(50, 10_000)));
        vm.assertEq(counted(node), 4);
        vm.assertEq(ledger.getContribution(job, 0, node).score, 3 + 500_000);
    }

    function test_packed_bytes_that_do_not_end_where_they_should_are_refused() public {
        bytes memory whole = bytes.concat(head(node, 0, 1), one(1, 1));
        bytes4 bad = ITrainingLedger.BadPacking.selector;
        for (uint256 cut = 1; cut < whole.length; ++cut) {
            bytes memory part = new bytes(cut);
            for (uint256 i = 0; i < cut; ++i) {
                part[i] = whole[i];
            }
            vm.expectRevert(abi.encodeWithSelector(bad, 0));
            submit(0, 0, part);
        }
        vm.expectRevert(abi.encodeWithSelector(bad, 44));
        submit(0, 0, bytes.concat(whole, hex"00"));
        vm.expectRevert(abi.encodeWithSelector(bad, 0));
        submit(0, 0, head(node, 0, 0));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.QualityOutOfRange.selector, 10_001));
        submit(0, 0, bytes.concat(head(node, 0, 1), one(1, 10_001)));
        submit(0, 0, "");
        submit(0, 1, whole);
    }

    function test_anyone_forces_a_receipt_in() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.ContributionForced(job, node, 0, 0, 9_000_000);
        vm.prank(STRANGER);
        ledger.submitContribution(made, own, counter, 0);
        vm.assertEq(counted(node), 1);
        vm.assertEq(ledger.getAccount(job, node).samples, 1_000);
        vm.assertEq(ledger.getContribution(job, 0, node).receipts, 1);
        vm.assertEq(ledger.getEpoch(job, 0).totalScore, 9_000_000);
    }

    function test_a_receipt_is_recorded_once_whichever_way_comes_first() public {
        force(receipt(node, 0), NODE_KEY, 0);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotNext.selector, 1, 0));
        this.forceFirst(node);
        submit(0, 0, totals(other, 0, 1, 1_000, 9_000_000));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotNext.selector, 1, 0));
        this.forceFirst(other);
    }

    function forceFirst(address account) external {
        ledger.submitContribution(receipt(account, 0), "", "", 0);
    }

    function test_a_gap_is_refused() public {
        ITrainingLedger.Receipt memory made = receipt(node, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotNext.selector, 0, 1));
        ledger.submitContribution(made, "", "", 0);
    }

    function test_both_signatures_are_needed() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, node));
        ledger.submitContribution(made, counter, counter, 0);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        ledger.submitContribution(made, own, own, 0);
        made.samples += 1;
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        ledger.submitContribution(made, own, counter, 0);
    }

    function test_a_receipt_of_another_job_chain_or_contract_is_refused() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.prank(OWNER);
        made.job = ledger.openJob("second", terms(), 0);
        vm.expectPartialRevert(ISettlement.BadSignature.selector);
        ledger.submitContribution(made, own, counter, 0);
        made.job = job;
        vm.chainId(2);
        vm.expectPartialRevert(ISettlement.BadSignature.selector);
        ledger.submitContribution(made, own, counter, 0);
        vm.chainId(31_337);
        ITrainingLedger twin = ITrainingLedger(deployed("TrainingLedger", abi.encode(options())));
        vm.prank(coordinator);
        token.approve(address(twin), BOND);
        token.mint(coordinator, BOND);
        vm.prank(coordinator);
        twin.postBond(BOND);
        vm.prank(coordinator);
        twin.allowOwner(OWNER, true);
        vm.prank(OWNER);
        twin.openJob(SALT, terms(), 0);
        vm.expectPartialRevert(ISettlement.BadSignature.selector);
        twin.submitContribution(made, own, counter, 0);
        ledger.submitContribution(made, own, counter, 0);
    }

    function test_a_quality_above_full_is_refused() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        made.qualityBps = 10_001;
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.QualityOutOfRange.selector, 10_001));
        ledger.submitContribution(made, "", "", 0);
        made.qualityBps = 10_000;
        force(made, NODE_KEY, 0);
    }

    function test_a_late_receipt_settles_in_a_later_epoch() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        made.epoch = 3;
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 3));
        ledger.submitContribution(made, "", "", 4);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 2));
        ledger.submitContribution(made, "", "", 2);
        close(3);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 3));
        ledger.submitContribution(made, own, counter, 3);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 4));
        ledger.submitContribution(made, own, counter, 5);
        close(6);
        ledger.submitContribution(made, own, counter, 7);
        vm.assertEq(ledger.getContribution(job, 7, node).score, 9_000_000);
        made = receipt(node, 1);
        made.epoch = 3;
        own = signature(NODE_KEY, digestOf(made.contribution));
        counter = countersigned(made);
        ledger.submitContribution(made, own, counter, 4);
        vm.assertEq(ledger.getContribution(job, 4, node).score, 9_000_000);
    }

    function test_a_receipt_is_not_moved_past_its_own_open_epoch() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        made.epoch = 1;
        close(2);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 1));
        ledger.submitContribution(made, "", "", 3);
    }

    function test_a_closed_epoch_takes_no_batch() public {
        close(0);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 0));
        submit(0, 0, totals(node, 0, 1, 1, 1));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 0));
        submit(0, 0, bytes.concat(head(node, 0, 1), one(1, 1)));
    }

    function test_the_digest_commits_to_every_batch() public {
        ITrainingLedger.NodeTotals[] memory batch = totals(node, 0, 1, 1, 1);
        bytes32 payload = keccak256(
            abi.encode(batch[0].node, batch[0].firstSequence, batch[0].receipts, batch[0].samples, batch[0].score)
        );
        bytes32 first = keccak256(abi.encode(bytes32(0), uint256(0), uint256(0), bytes32("root"), payload));
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.BatchSubmitted(job, 0, 0, "root", first);
        submit(0, 0, batch);
        vm.assertEq(ledger.digestOf(job), first);
        bytes memory packed = bytes.concat(head(node, 1, 1), one(1, 1));
        submit(5, 1, packed);
        bytes32 second = keccak256(abi.encode(first, uint256(1), uint256(5), bytes32("root"), keccak256(packed)));
        vm.assertEq(ledger.digestOf(job), second);
    }

    /// forge-config: default.fuzz.runs = 100
    function test_packed_and_summed_batches_come_to_the_same(uint32[20] memory samples, uint16[20] memory quality)
        public
    {
        bytes memory packed = head(node, 0, 20);
        uint256 sum;
        uint256 score;
        for (uint256 i = 0; i < 20; ++i) {
            quality[i] = uint16(quality[i] % 10_001);
            packed = bytes.concat(packed, one(samples[i], quality[i]));
            sum += samples[i];
            score += uint256(samples[i]) * quality[i];
        }
        submit(0, 0, packed);
        submit(0, 1, totals(other, 0, 20, uint64(sum), uint80(score)));
        vm.assertEq(
            keccak256(abi.encode(ledger.getContribution(job, 0, node))),
            keccak256(abi.encode(ledger.getContribution(job, 0, other)))
        );
        vm.assertEq(ledger.getAccount(job, node).samples, ledger.getAccount(job, other).samples);
        vm.assertEq(ledger.getContribution(job, 0, node).score, score);
    }
}
