// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IBonds} from "../interfaces/IBonds.sol";
import {IDisputes} from "../interfaces/IDisputes.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev Voids, penalties, and the proof of equivocation.
contract DisputesTest is World {
    function tries(IDisputes.Verdict memory made, bytes[] memory signatures) private {
        ledger.voidContribution(made, signatures);
    }

    function test_a_quorum_voids_what_is_due() public {
        work(0, node, 10);
        close(0);
        uint256 free = ledger.getJob(job).free;
        vm.expectEmit(address(ledger));
        emit IDisputes.ContributionVoided(job, node, 0, 10 * PRICE, 0, "why");
        void(0, node, 0);
        assert(ledger.getContribution(job, 0, node).state == ITrainingLedger.ShareState.VOID);
        vm.assertEq(ledger.getContribution(job, 0, node).paid, 0);
        vm.assertEq(ledger.getJob(job).free, free + 10 * PRICE);
        vm.assertEq(ledger.getAccount(job, node).voided, 10 * PRICE);
        vm.assertEq(ledger.getAccount(job, node).earned, 0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), 0);
    }

    function test_a_voided_share_is_no_voucher_either() public {
        work(0, node, 10);
        close(0);
        void(0, node, 0);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, 10 * PRICE);
        vm.assertEq(redeem(node, 10 * PRICE + 3), 3);
    }

    function redeemed(address who, uint128 amount) external {
        redeem(who, amount);
    }

    function test_what_was_paid_comes_back_from_the_stake_it_locked() public {
        register(node, 30 * PRICE);
        work(0, node, 10);
        close(0);
        pay(0, node);
        uint256 free = ledger.getJob(job).free;
        void(0, node, 0);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        assert(staked == 20 * PRICE && locked == 0);
        vm.assertEq(ledger.getJob(job).free, free + 10 * PRICE);
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        assert(account.earned == 0 && account.paid == 0 && account.voided == 10 * PRICE);
        assert(ledger.getContribution(job, 0, node).state == ITrainingLedger.ShareState.VOID);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, 10 * PRICE);
    }

    function test_a_void_in_the_next_period_finds_its_lock() public {
        register(node, 30 * PRICE);
        vm.warp((block.timestamp / WINDOW + 1) * WINDOW + WINDOW / 2);
        work(0, node, 10);
        close(0);
        pay(0, node);
        vm.warp(block.timestamp + WINDOW - 1);
        work(1, node, 5);
        close(1);
        pay(1, node);
        void(0, node, 0);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        assert(staked == 20 * PRICE && locked == 5 * PRICE);
        void(1, node, 0);
        (staked, locked,,) = ledger.stakeOf(node);
        assert(staked == 15 * PRICE && locked == 0);
    }

    function test_a_void_in_one_job_leaves_what_other_jobs_lock() public {
        register(node, 15 * PRICE);
        give(OWNER, ESCROW);
        vm.prank(OWNER);
        bytes32 second = ledger.openJob("second", terms(), ESCROW);
        vm.prank(coordinator);
        ledger.submitAggregate(second, 0, 0, "", totals(node, 0, 1, 1_000, 8e6));
        vm.prank(coordinator);
        ledger.closeEpoch(second, 0);
        ledger.distributePayments(second, 0, only(node));
        work(0, node, 5);
        close(0);
        pay(0, node);
        void(0, node, type(uint128).max);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        assert(staked == 8 * PRICE && locked == 8 * PRICE);
        vm.assertEq(token.balanceOf(TREASURY), 2 * PRICE);
    }

    function test_a_penalty_takes_free_stake_and_then_what_unbonds() public {
        register(node, 100);
        vm.prank(node);
        ledger.unstake(60);
        work(0, node, 10);
        close(0);
        vm.expectEmit(address(ledger));
        emit IDisputes.ContributionVoided(job, node, 0, 10 * PRICE, 75, "why");
        void(0, node, 75);
        (uint256 staked,, uint256 unbonding,) = ledger.stakeOf(node);
        assert(staked == 0 && unbonding == 25);
        vm.assertEq(token.balanceOf(TREASURY), 75);
        work(1, node, 10);
        close(1);
        void(1, node, 1_000);
        (staked,, unbonding,) = ledger.stakeOf(node);
        assert(staked == 0 && unbonding == 0);
        vm.assertEq(token.balanceOf(TREASURY), 100);
    }

    function test_a_small_penalty_leaves_the_rest_of_the_stake() public {
        register(node, 100);
        vm.prank(node);
        ledger.unstake(60);
        work(0, node, 10);
        close(0);
        void(0, node, 30);
        (uint256 staked,, uint256 unbonding,) = ledger.stakeOf(node);
        assert(staked == 10 && unbonding == 60);
        vm.assertEq(token.balanceOf(TREASURY), 30);
    }

    function test_an_advance_that_a_voided_share_made_good_is_owed_again() public {
        register(node, 100_000);
        redeem(node, 1_000);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        work(0, node, 2);
        close(0);
        vm.assertEq(pay(0, node), 400);
        uint256 free = ledger.getJob(job).free;
        void(0, node, 0);
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        assert(account.earned == 0 && account.paid == 1_000 && account.voided == 1_400);
        vm.assertEq(ledger.getJob(job).free, free + 400);
        work(1, node, 2);
        close(1);
        vm.assertEq(pay(1, node), 400);
        vm.assertEq(token.balanceOf(node), 1_800);
        (uint256 staked,,,) = ledger.stakeOf(node);
        vm.assertEq(staked, 100_000 - 400);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 1_400);
    }

    /// @dev A claim of 1,000, of which a share of 700 makes good its whole worth.
    function madeGood() private {
        redeem(node, 1_000);
        work(0, node, 1);
        close(0);
        vm.assertEq(pay(0, node), 0);
    }

    function untouched() private view {
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        assert(account.earned == 0 && account.paid == 0 && account.pending == 0 && account.voided == PRICE);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
    }

    function test_a_claim_and_the_share_that_made_it_good_are_voided_in_either_order() public {
        madeGood();
        bar(node);
        vm.assertEq(ledger.getAccount(job, node).pending, PRICE);
        vm.expectEmit(address(ledger));
        emit IDisputes.ContributionVoided(job, node, 0, PRICE, 0, "why");
        void(0, node, 0);
        untouched();
    }

    function test_a_share_voided_before_its_claim_leaves_it_to_the_voucher_verdict() public {
        madeGood();
        void(0, node, 0);
        vm.assertEq(ledger.getAccount(job, node).pending, 1_000);
        bar(node);
        untouched();
    }

    function test_a_claim_whose_window_is_over_is_past_every_verdict() public {
        redeem(node, 1_000);
        vm.warp(block.timestamp + WINDOW - 1);
        work(0, node, 1);
        close(0);
        pay(0, node);
        bar(node);
        vm.warp(block.timestamp + 1);
        void(0, node, 0);
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        assert(account.pending == PRICE && account.voided == PRICE);
        ledger.releaseVoucher(job, node);
        vm.assertEq(token.balanceOf(node), PRICE);
        vm.assertEq(ledger.getAccount(job, node).paid, PRICE);
    }

    function test_a_void_needs_the_quorum() public {
        work(0, node, 10);
        close(0);
        IDisputes.Verdict memory made = verdict(0, node, 0);
        bytes32 structHash = this.hashOf(made);
        vm.expectRevert(abi.encodeWithSelector(IBonds.NoQuorum.selector, 1, 2));
        tries(made, quorum(structHash, 1));
        bytes[] memory signatures = quorum(structHash, 2);
        signatures[1] = signatures[0];
        vm.expectRevert(abi.encodeWithSelector(IBonds.BadArbiter.selector, vm.addr(arbiterKeys[0])));
        tries(made, signatures);
        signatures = quorum(structHash, 2);
        (signatures[0], signatures[1]) = (signatures[1], signatures[0]);
        vm.expectRevert(abi.encodeWithSelector(IBonds.BadArbiter.selector, vm.addr(arbiterKeys[0])));
        tries(made, signatures);
        signatures[0] = signature(NODE_KEY, digestOf(structHash));
        vm.expectRevert(abi.encodeWithSelector(IBonds.BadArbiter.selector, node));
        tries(made, signatures);
        signatures[0] = "short";
        vm.expectRevert(abi.encodeWithSelector(IBonds.BadArbiter.selector, address(0)));
        tries(made, signatures);
        tries(made, quorum(structHash, 3));
    }

    function test_a_void_comes_in_the_window_and_once() public {
        work(0, node, 10);
        IDisputes.Verdict memory made = verdict(0, node, 0);
        bytes[] memory signatures = quorum(this.hashOf(made), 2);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.EpochIsOpen.selector, 0));
        tries(made, signatures);
        close(0);
        uint256 closedAt = block.timestamp;
        vm.warp(closedAt + WINDOW);
        vm.expectRevert(abi.encodeWithSelector(IDisputes.WindowOver.selector, closedAt));
        tries(made, signatures);
        vm.warp(closedAt + WINDOW - 1);
        tries(made, signatures);
        vm.expectRevert(IDisputes.NothingToVoid.selector);
        tries(made, signatures);
        made = verdict(0, STRANGER, 0);
        signatures = quorum(this.hashOf(made), 2);
        vm.expectRevert(IDisputes.NothingToVoid.selector);
        tries(made, signatures);
    }

    function test_a_voucher_verdict_needs_the_quorum() public {
        IDisputes.VoucherVerdict memory made = IDisputes.VoucherVerdict(job, node, "why");
        bytes[] memory signatures = quorum(this.hashOf(made), 1);
        vm.expectPartialRevert(IBonds.NoQuorum.selector);
        ledger.voidVoucher(made, signatures);
    }

    function test_two_receipts_under_one_number_cost_the_bond() public {
        ITrainingLedger.Receipt memory first = receipt(node, 4);
        ITrainingLedger.Receipt memory second = receipt(node, 4);
        second.epoch = 1;
        bytes memory one = countersigned(first);
        bytes memory another = countersigned(second);
        vm.expectEmit(address(ledger));
        emit IDisputes.Equivocation(job, coordinator, STRANGER, BOND);
        vm.prank(STRANGER);
        vm.assertEq(ledger.proveEquivocation(first, one, second, another), BOND);
        vm.assertEq(token.balanceOf(STRANGER), BOND / 10);
        vm.assertEq(token.balanceOf(TREASURY), BOND - BOND / 10);
        (uint256 bond, uint256 jobs,) = ledger.bondOf(coordinator);
        assert(bond == 0 && jobs == 1);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        ledger.proveEquivocation(first, one, second, another);
        // The key is caught for good.
        give(coordinator, BOND);
        vm.prank(coordinator);
        ledger.postBond(BOND);
        vm.assertEq(ledger.proveEquivocation(first, one, second, another), BOND);
    }

    function test_honest_receipts_prove_nothing() public {
        ITrainingLedger.Receipt memory first = receipt(node, 4);
        bytes memory one = countersigned(first);
        vm.expectRevert(IDisputes.NoEquivocation.selector);
        ledger.proveEquivocation(first, one, first, one);
        ITrainingLedger.Receipt memory second = receipt(node, 5);
        bytes memory another = countersigned(second);
        vm.expectRevert(IDisputes.NoEquivocation.selector);
        ledger.proveEquivocation(first, one, second, another);
        second = receipt(other, 4);
        another = countersigned(second);
        vm.expectRevert(IDisputes.NoEquivocation.selector);
        ledger.proveEquivocation(first, one, second, another);
        second = receipt(node, 4);
        second.job = "no";
        another = countersigned(second);
        vm.expectRevert(IDisputes.NoEquivocation.selector);
        ledger.proveEquivocation(first, one, second, another);
        second = receipt(node, 4);
        second.samples = 3;
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        ledger.proveEquivocation(first, one, second, one);
        another = countersigned(second);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        ledger.proveEquivocation(first, another, second, another);
    }
}
