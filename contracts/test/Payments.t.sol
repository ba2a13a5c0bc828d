// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev Closing epochs, paying shares, and voiding them.
contract PaymentsTest is World {
    function assertState(uint32 epoch, address account, ITrainingLedger.ShareState state) private view {
        vm.assertEq(uint256(stateOf(epoch, account)), uint256(state));
    }

    function test_coordinator_and_owner_close_at_any_time() public {
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.EpochClosed(job, 0);
        close(0);
        vm.assertEq(ledger.getEpoch(job, 0).closedAt, block.timestamp);
        vm.prank(OWNER);
        ledger.closeEpoch(job, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsClosed.selector, 1));
        close(1);
    }

    function test_anyone_closes_an_epoch_that_was_open_for_long() public {
        vm.warp(block.timestamp + 10 * UNBONDING);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NotCoordinator.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        work(0, node, 1);
        uint256 until = block.timestamp + UNBONDING;
        vm.warp(until - 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooEarly.selector, until));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        vm.warp(until);
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
    }

    function test_anyone_closes_epochs_of_a_job_that_is_over() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + UNBONDING - 1);
        work(0, node, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooEarly.selector, block.timestamp + UNBONDING));
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
        vm.warp(block.timestamp + 1);
        vm.prank(STRANGER);
        ledger.closeEpoch(job, 0);
    }

    function test_shares_are_paid_after_the_window() public {
        work(0, node, 3);
        work(0, other, 4);
        close(0);
        uint256 end = block.timestamp + WINDOW;
        vm.warp(end - 1);
        vm.assertEq(pay(0, node), 0);
        assertState(0, node, ITrainingLedger.ShareState.DUE);
        vm.warp(end);
        uint256[] memory amounts = new uint256[](2);
        (amounts[0], amounts[1]) = (3 * PRICE, 4 * PRICE);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.PaymentsDistributed(job, 0, pair(node, other), amounts);
        vm.prank(STRANGER);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 7 * PRICE);
        vm.assertEq(token.balanceOf(node), 3 * PRICE);
        vm.assertEq(token.balanceOf(other), 4 * PRICE);
        assertState(0, node, ITrainingLedger.ShareState.PAID);
        vm.assertEq(ledger.calculateRewards(job, 0, node), 3 * PRICE);
        vm.assertEq(pay(0, node), 0);
        vm.assertEq(token.balanceOf(node), 3 * PRICE);
        vm.assertEq(ledger.getAccount(job, node).earned, 3 * PRICE);
    }

    function test_shares_are_paid_at_once_against_free_stake() public {
        register(node, 3 * PRICE);
        register(other, 4 * PRICE - 1);
        work(0, node, 3);
        work(0, other, 4);
        close(0);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 3 * PRICE);
        assertState(0, other, ITrainingLedger.ShareState.DUE);
        work(1, node, 1);
        close(1);
        vm.assertEq(pay(1, node), 0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, other) + pay(1, node), 5 * PRICE);
    }

    function test_paying_closes_the_epoch_of_its_coordinator() public {
        register(node, 3 * PRICE);
        work(0, node, 3);
        work(1, node, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 0));
        pay(0, node);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.EpochClosed(job, 0);
        vm.prank(coordinator);
        vm.assertEq(ledger.distributePayments(job, 0, only(node)), 3 * PRICE);
        vm.prank(OWNER);
        ledger.distributePayments(job, 1, only(node));
        vm.assertEq(ledger.getEpoch(job, 1).closedAt, block.timestamp);
        assertState(1, node, ITrainingLedger.ShareState.DUE);
    }

    function test_a_node_twice_in_a_list_is_paid_once() public {
        work(0, node, 3);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, node)), 3 * PRICE);
    }

    function test_a_list_has_at_most_250_nodes() public {
        close(0);
        ledger.distributePayments(job, 0, new address[](250));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooManyNodes.selector, 251, 250));
        ledger.distributePayments(job, 0, new address[](251));
    }

    function test_arbiters_void_a_share_that_is_due() public {
        work(0, node, 3);
        close(0);
        vm.warp(block.timestamp + WINDOW - 1);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.ContributionVoided(job, node, 0, 3 * PRICE, 0, "why");
        void(0, node, 50);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
        assertState(0, node, ITrainingLedger.ShareState.VOID);
        vm.assertEq(ledger.calculateRewards(job, 0, node), 0);
        vm.assertEq(ledger.getContribution(job, 0, node).amount, 3 * PRICE);
        vm.warp(block.timestamp + 1);
        vm.assertEq(pay(0, node), 0);
        vm.assertEq(ledger.getAccount(job, node).earned, 3 * PRICE);
        work(1, node, 2);
        vm.assertEq(ledger.calculateRewards(job, 1, node), 2 * PRICE);
    }

    function test_a_void_of_a_paid_share_takes_the_locked_stake_and_a_penalty() public {
        register(node, 10 * PRICE);
        work(0, node, 3);
        work(1, node, 2);
        close(0);
        close(1);
        pay(0, node);
        pay(1, node);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.ContributionVoided(job, node, 0, 3 * PRICE, PRICE, "why");
        void(0, node, PRICE);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        vm.assertEq(staked, 6 * PRICE);
        vm.assertEq(locked, 2 * PRICE);
        vm.assertEq(token.balanceOf(TREASURY), PRICE);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 2 * PRICE);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW - 2 * PRICE + 6 * PRICE);
    }

    function test_a_void_finds_the_lock_in_the_next_period() public {
        vm.warp((block.timestamp / WINDOW + 1) * WINDOW - 1);
        register(node, 10 * PRICE);
        work(0, node, 3);
        work(1, node, 2);
        close(0);
        pay(0, node);
        vm.warp(block.timestamp + WINDOW - 1);
        close(1);
        pay(1, node);
        void(0, node, 0);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        vm.assertEq(staked, 7 * PRICE);
        vm.assertEq(locked, 2 * PRICE);
        void(1, node, 0);
        (staked, locked,,) = ledger.stakeOf(node);
        vm.assertEq(staked, 5 * PRICE);
        vm.assertEq(locked, 0);
    }

    function test_a_penalty_takes_free_stake_and_then_what_unbonds() public {
        register(node, 1_000);
        register(other, 5);
        work(0, node, 1);
        work(0, other, 1);
        work(1, node, 1);
        close(0);
        close(1);
        pay(1, node);
        vm.prank(node);
        ledger.unstake(200);
        void(0, node, 150);
        (uint256 staked, uint256 locked, uint256 unbonding,) = ledger.stakeOf(node);
        vm.assertEq(staked, PRICE);
        vm.assertEq(locked, PRICE);
        vm.assertEq(unbonding, 150);
        void(0, other, type(uint128).max);
        vm.assertEq(token.balanceOf(TREASURY), 155);
        void(1, node, 160);
        (staked, locked, unbonding,) = ledger.stakeOf(node);
        vm.assertEq(staked + locked + unbonding, 0);
        vm.assertEq(token.balanceOf(TREASURY), 305);
    }

    function test_a_share_is_voided_once_and_inside_its_window() public {
        work(0, node, 3);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 0));
        this.voidAny(node);
        close(0);
        vm.expectRevert(ITrainingLedger.NothingToVoid.selector);
        this.voidAny(other);
        uint256 closedAt = block.timestamp;
        vm.warp(closedAt + WINDOW);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.WindowOver.selector, closedAt));
        this.voidAny(node);
        vm.warp(closedAt + WINDOW - 1);
        void(0, node, 0);
        vm.expectRevert(ITrainingLedger.NothingToVoid.selector);
        this.voidAny(node);
    }

    function voidAny(address account) external {
        void(0, account, 0);
    }

    function test_a_verdict_needs_its_quorum() public {
        work(0, node, 3);
        close(0);
        ITrainingLedger.Verdict memory made = verdict(0, node, 0);
        bytes[] memory signatures = quorum(made, 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.NoQuorum.selector, 1, 2));
        ledger.voidContribution(made, signatures);
        bytes[] memory twice = quorum(made, 2);
        twice[1] = twice[0];
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.BadArbiter.selector, vm.addr(arbiterKeys[0])));
        ledger.voidContribution(made, twice);
        signatures = quorum(made, 2);
        made.penalty = 1;
        vm.expectPartialRevert(ITrainingLedger.BadArbiter.selector);
        ledger.voidContribution(made, signatures);
        arbiterKeys[1] = NODE_KEY;
        signatures = quorum(made, 2);
        vm.expectPartialRevert(ITrainingLedger.BadArbiter.selector);
        ledger.voidContribution(made, signatures);
    }

    /// @dev A coordinator records too little and vanishes: the node needs its newest receipt and nobody's help.
    function test_an_undercounted_node_is_paid_in_full_by_its_newest_receipt() public {
        record(0, node, 3, 2 * POINT);
        record(1, node, 5, 3 * POINT);
        close(0);
        force(receipt(node, 19, 20 * POINT), NODE_KEY, 0);
        vm.warp(block.timestamp + UNBONDING);
        vm.prank(node);
        ledger.closeEpoch(job, 1);
        vm.warp(block.timestamp + WINDOW);
        vm.prank(node);
        vm.assertEq(pay(0, node) + pay(1, node), 20 * PRICE);
        vm.assertEq(token.balanceOf(node), 20 * PRICE);
    }
}
