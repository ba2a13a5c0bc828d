// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Shares} from "../libraries/Shares.sol";
import {World} from "./harness/World.sol";

/// @dev Closing epochs, paying shares, dust.
contract PaymentsTest is World {
    function free() private view returns (uint256) {
        return ledger.getJob(job).free;
    }

    function test_closing_reserves_what_the_score_is_worth() public {
        work(0, node, 3);
        work(0, other, 4);
        vm.warp(block.timestamp + 9);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.EpochClosed(job, 0, 7 * PRICE, 7e6);
        vm.assertEq(close(0), 7 * PRICE);
        vm.assertEq(free(), ESCROW - 7 * PRICE);
        vm.assertEq(ledger.getEpoch(job, 0).closedAt, block.timestamp);
        vm.assertEq(ledger.getEpoch(job, 0).pool, 7 * PRICE);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 0));
        vm.prank(coordinator);
        ledger.closeEpoch(job, 0);
    }

    function test_fractions_of_the_price_are_rounded_down() public {
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 0, "", totals(node, 0, 1, 10_000, 999_999));
        vm.assertEq(close(0), PRICE - 1);
    }

    function test_the_pool_is_capped_by_what_is_free() public {
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, type(uint96).max);
        work(0, node, ESCROW / PRICE + 1);
        vm.assertEq(close(0), ESCROW);
        vm.assertEq(free(), 0);
        work(1, node, 5);
        vm.assertEq(close(1), 0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), ESCROW);
        vm.assertEq(pay(1, node), 0);
        assert(ledger.getContribution(job, 1, node).state == ITrainingLedger.ShareState.PAID);
    }

    function test_the_limit_holds_within_a_period() public {
        vm.warp((block.timestamp / WINDOW + 1) * WINDOW);
        work(0, node, 300);
        work(1, node, 300);
        work(2, node, 271);
        close(0);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT - 300 * PRICE);
        vm.expectRevert(
            abi.encodeWithSelector(ISettlement.SpendLimitExceeded.selector, LIMIT - 300 * PRICE, 300 * PRICE)
        );
        vm.prank(coordinator);
        ledger.closeEpoch(job, 1);
        close(2);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT - 571 * PRICE);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT);
        close(1);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT - 300 * PRICE);
    }

    function test_coordinator_or_owner_close_at_once_and_anyone_later() public {
        work(0, node, 1);
        work(1, node, 1);
        vm.prank(OWNER);
        ledger.closeEpoch(job, 0);
        uint256 opened = block.timestamp;
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, opened + UNBONDING));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotCoordinator.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 2);
        vm.warp(opened + UNBONDING);
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 1);
        vm.expectPartialRevert(ISettlement.UnknownJob.selector);
        ledger.closeEpoch("no", 0);
    }

    function test_anyone_closes_what_is_recorded_once_nothing_more_is() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        uint256 over = block.timestamp + UNBONDING;
        vm.warp(over - 1);
        work(0, node, 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, over - 1 + UNBONDING));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        vm.warp(over);
        vm.prank(STRANGER);
        vm.assertEq(ledger.closeEpoch(job, 0), PRICE);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotCoordinator.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 1);
    }

    function test_no_stranger_closes_ahead_of_receipts_while_a_job_ends() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotCoordinator.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        force(receipt(node, 0), NODE_KEY, 0);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, block.timestamp + UNBONDING));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        force(receipt(node, 1), NODE_KEY, 0);
        vm.assertEq(ledger.getContribution(job, 0, node).receipts, 2);
    }

    function test_an_epoch_worth_more_than_the_limit_is_closed_before_the_owner_takes_the_rest() public {
        work(0, node, 600);
        work(1, other, 300);
        bytes memory exceeded =
            abi.encodeWithSelector(ISettlement.SpendLimitExceeded.selector, LIMIT, 600 * uint256(PRICE));
        vm.expectRevert(exceeded);
        vm.prank(coordinator);
        ledger.closeEpoch(job, 0);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        // While receipts may still be recorded the limit holds, whoever knows that the job ends.
        vm.warp(block.timestamp + UNBONDING - 1);
        vm.expectRevert(exceeded);
        vm.prank(coordinator);
        ledger.closeEpoch(job, 0);
        vm.warp(block.timestamp + 1);
        vm.prank(STRANGER);
        vm.assertEq(ledger.closeEpoch(job, 0), 600 * PRICE);
        vm.assertEq(free(), ESCROW - 600 * PRICE);
        vm.assertEq(close(1), 300 * PRICE);
        vm.assertEq(ledger.getJob(job).spendable, ESCROW - 900 * PRICE);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), 600 * PRICE);
        vm.assertEq(pay(1, other), 300 * PRICE);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW - 900 * PRICE);
    }

    function test_what_is_closed_at_the_end_is_capped_by_what_is_free() public {
        work(0, node, ESCROW / PRICE + 1);
        work(1, other, 1);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        vm.assertEq(close(0), ESCROW);
        vm.assertEq(close(1), 0);
        void(0, node, 0);
        vm.assertEq(free(), ESCROW);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW);
    }

    function test_at_the_end_vouchers_still_have_the_limit() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + UNBONDING);
        vm.assertEq(redeem(node, ESCROW), LIMIT);
    }

    function test_an_epoch_without_receipts_closes_empty() public {
        vm.assertEq(close(6), 0);
        vm.assertEq(ledger.calculateRewards(job, 6, node), 0);
        vm.assertEq(ledger.sweepDust(job, 6, new address[](0)), 0);
    }

    function test_shares_are_by_score_and_paid_once() public {
        work(0, node, 30);
        work(0, other, 70);
        vm.assertEq(ledger.calculateRewards(job, 0, node), 0);
        close(0);
        vm.assertEq(ledger.calculateRewards(job, 0, node), 30 * PRICE);
        vm.assertEq(ledger.calculateRewards(job, 0, STRANGER), 0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 100 * PRICE);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 0);
        vm.assertEq(token.balanceOf(node), 30 * PRICE);
        vm.assertEq(token.balanceOf(other), 70 * PRICE);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW + BOND - 100 * PRICE);
        ITrainingLedger.Contribution memory share = ledger.getContribution(job, 0, node);
        assert(share.state == ITrainingLedger.ShareState.PAID);
        assert(share.paid == 30 * PRICE && share.reward == 30 * PRICE && share.receipts == 10);
        vm.assertEq(ledger.getAccount(job, node).earned, 30 * PRICE);
        vm.assertEq(ledger.getAccount(job, node).paid, 30 * PRICE);
    }

    function test_strangers_and_repeats_in_the_list_are_passed_over() public {
        work(0, node, 1);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (STRANGER, node, node);
        vm.assertEq(ledger.distributePayments(job, 0, list), PRICE);
        vm.assertEq(token.balanceOf(STRANGER), 0);
    }

    function test_payment_needs_a_closed_epoch_and_a_bounded_list() public {
        work(0, node, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 0));
        ledger.distributePayments(job, 0, only(node));
        close(0);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooManyNodes.selector, 251, 250));
        ledger.distributePayments(job, 0, new address[](251));
        ledger.distributePayments(job, 0, new address[](250));
    }

    function test_a_pause_defers_pay_against_stake() public {
        register(node, 10 * PRICE);
        work(0, node, 1);
        close(0);
        uint256 until = block.timestamp + WINDOW;
        vm.prank(GUARDIAN);
        ledger.pause();
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, until));
        ledger.distributePayments(job, 0, only(node));
        vm.warp(until);
        vm.assertEq(pay(0, node), PRICE);
    }

    function test_dust_returns_to_the_job_once() public {
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 0, "", totals(node, 0, 1, 200, 1_500_000));
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 1, "", totals(other, 0, 1, 200, 1_499_999));
        vm.assertEq(close(0), 2_099);
        uint256 before = free();
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NodesMissing.selector, 2_999_999, 1_500_000));
        ledger.sweepDust(job, 0, only(node));
        address[] memory twice = new address[](2);
        (twice[0], twice[1]) = (node, node);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotAscending.selector, node));
        ledger.sweepDust(job, 0, twice);
        address[] memory both = pair(node, other);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.DustSwept(job, 0, 1);
        vm.assertEq(ledger.sweepDust(job, 0, both), 1);
        vm.assertEq(free(), before + 1);
        vm.assertTrue(ledger.getEpoch(job, 0).swept);
        vm.expectRevert(ITrainingLedger.AlreadySwept.selector);
        ledger.sweepDust(job, 0, both);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 1));
        ledger.sweepDust(job, 1, both);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(ledger.distributePayments(job, 0, both), 2_098);
    }

    function test_a_node_that_has_earned_96_bits_in_a_job_is_paid_no_more() public {
        ISettlement.JobTerms memory wanted = terms();
        (wanted.unitPrice, wanted.spendLimit) = (type(uint128).max, type(uint96).max);
        give(OWNER, 1 << 96);
        vm.prank(OWNER);
        job = ledger.openJob("rich", wanted, type(uint96).max);
        work(0, node, 1);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), type(uint96).max);
        vm.prank(OWNER);
        ledger.fund(job, 1);
        work(1, node, 1);
        vm.assertEq(close(1), 1);
        vm.warp(block.timestamp + WINDOW);
        vm.expectRevert(ITrainingLedger.FieldIsFull.selector);
        pay(1, node);
    }

    function test_metrics_sum_over_jobs() public {
        work(0, node, 2);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        pay(0, node);
        give(OWNER, ESCROW);
        vm.prank(OWNER);
        bytes32 second = ledger.openJob("second", terms(), ESCROW);
        vm.prank(coordinator);
        ledger.submitAggregate(second, 0, 0, "", totals(node, 0, 7, 300, 3e6));
        vm.prank(coordinator);
        ledger.closeEpoch(second, 0);
        vm.warp(block.timestamp + WINDOW);
        ledger.distributePayments(second, 0, only(node));
        bytes32[] memory jobs = new bytes32[](2);
        (jobs[0], jobs[1]) = (job, second);
        ITrainingLedger.NodeMetrics memory metrics = ledger.getNodeMetrics(node, jobs);
        vm.assertEq(metrics.receipts, 17);
        vm.assertEq(metrics.samples, 500);
        vm.assertEq(metrics.earned, 5 * PRICE);
        vm.assertEq(metrics.paid, 5 * PRICE);
        assert(metrics.id == 0 && metrics.credit == 0);
    }

    /// forge-config: default.fuzz.runs = 300
    function test_shares_never_exceed_their_pool(uint128 price, uint96 purse, uint80[5] memory scores) public pure {
        uint88 total;
        for (uint256 i = 0; i < 5; ++i) {
            scores[i] >>= 3;
            total += scores[i];
        }
        uint96 pool = Shares.pool(price, total, purse);
        vm.assertTrue(pool <= purse && pool <= uint256(price) * total / 1_000_000);
        uint256 sum;
        for (uint256 i = 0; i < 5; ++i) {
            sum += Shares.share(pool, scores[i], total);
        }
        vm.assertTrue(sum <= pool && (total == 0 || pool - sum < 5));
    }
}
