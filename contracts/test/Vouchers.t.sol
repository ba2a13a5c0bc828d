// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IDisputes} from "../interfaces/IDisputes.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev Vouchers, and that they and shares never pay the same thing twice.
contract VouchersTest is World {
    function account() private view returns (ITrainingLedger.Account memory) {
        return ledger.getAccount(job, node);
    }

    /// @dev Let a pending claim's window pass, and pay it.
    function release() private {
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
    }

    function test_a_voucher_waits_for_its_window() public {
        uint256 releaseAt = block.timestamp + WINDOW;
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.VoucherRedeemed(job, node, 900, releaseAt);
        vm.assertEq(redeem(node, 900), 900);
        assert(account().pending == 900 && account().releaseAt == releaseAt && account().paid == 0);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 900);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.ClaimPending.selector, releaseAt));
        this.redeemed(node, 950);
        vm.warp(releaseAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, releaseAt));
        ledger.releaseVoucher(job, node);
        vm.warp(releaseAt);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.VoucherPaid(job, node, 900);
        ledger.releaseVoucher(job, node);
        vm.assertEq(token.balanceOf(node), 900);
        assert(account().pending == 0 && account().paid == 900 && account().earned == 0);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        ledger.releaseVoucher(job, node);
    }

    function redeemed(address who, uint128 amount) external {
        redeem(who, amount);
    }

    function test_no_stake_lets_a_voucher_escape_its_window() public {
        register(node, 1_000);
        redeem(node, 1_000);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        assert(staked == 1_000 && locked == 0 && token.balanceOf(node) == 0);
        work(0, node, 1);
        close(0);
        void(0, node, 250);
        bar(node);
        assert(account().pending == 0 && account().paid == 0 && account().voided == PRICE);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
        (staked,,,) = ledger.stakeOf(node);
        vm.assertEq(staked, 750);
        vm.warp(block.timestamp + WINDOW);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        ledger.releaseVoucher(job, node);
        vm.assertEq(token.balanceOf(node), 0);
    }

    function test_a_voided_share_that_had_made_good_a_claim_gives_it_back_to_the_arbiters() public {
        register(node, 1_000);
        redeem(node, 1_000);
        work(0, node, 1);
        close(0);
        vm.assertEq(pay(0, node), 0);
        void(0, node, 0);
        assert(account().pending == 1_000 && account().earned == 0 && account().voided == PRICE);
        bar(node);
        assert(account().pending == 0 && account().paid == 0);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        assert(staked == 1_000 && locked == 0);
    }

    function test_a_voucher_is_cumulative_and_pays_once() public {
        redeem(node, 900);
        release();
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, 900);
        vm.assertEq(redeem(node, 1_000), 100);
        release();
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, 950);
        vm.assertEq(token.balanceOf(node), 1_000);
    }

    function test_only_the_node_with_the_coordinators_signature() public {
        ITrainingLedger.Voucher memory made = voucher(node, 900);
        bytes memory counter = signature(COORDINATOR_KEY, digestOf(this.hashOf(made)));
        bytes memory own = signature(NODE_KEY, digestOf(this.hashOf(made)));
        vm.expectRevert(ITrainingLedger.NotNode.selector);
        ledger.redeemVoucher(made, counter);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        vm.prank(node);
        ledger.redeemVoucher(made, own);
        made.amount = 901;
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, coordinator));
        vm.prank(node);
        ledger.redeemVoucher(made, counter);
        made.job = "no";
        vm.expectPartialRevert(ISettlement.UnknownJob.selector);
        vm.prank(node);
        ledger.redeemVoucher(made, counter);
    }

    function test_shares_make_good_what_a_voucher_paid() public {
        register(node, 100_000);
        redeem(node, 1_000);
        release();
        for (uint32 epoch = 0; epoch < 3; ++epoch) {
            work(epoch, node, 1);
            close(epoch);
        }
        uint256 free = ledger.getJob(job).free;
        vm.assertEq(pay(0, node), 0);
        vm.assertEq(ledger.getJob(job).free, free + 700);
        assert(ledger.getContribution(job, 0, node).state == ITrainingLedger.ShareState.PAID);
        assert(account().earned == 700 && account().paid == 1_000);
        vm.assertEq(pay(1, node), 400);
        vm.assertEq(ledger.getContribution(job, 1, node).paid, 400);
        vm.assertEq(ledger.getContribution(job, 1, node).reward, 700);
        vm.assertEq(ledger.getJob(job).free, free + 1_000);
        vm.assertEq(pay(2, node), 700);
        vm.assertEq(token.balanceOf(node), 2_100);
        assert(account().earned == 2_100 && account().paid == 2_100);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, 2_100);
        redeem(node, 2_101);
        release();
        vm.assertEq(token.balanceOf(node), 2_101);
    }

    function test_a_share_that_just_covers_the_advance_ends_it() public {
        redeem(node, 700);
        work(0, node, 1);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), 0);
        assert(account().earned == 700 && account().paid == 0 && account().pending == 700);
        work(1, node, 2);
        close(1);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(1, node), 1_400);
        ledger.releaseVoucher(job, node);
        vm.assertEq(token.balanceOf(node), 2_100);
    }

    function test_a_voucher_is_capped_by_what_may_be_spent() public {
        vm.warp((block.timestamp / WINDOW + 1) * WINDOW);
        vm.assertEq(redeem(node, LIMIT + 5), LIMIT);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        vm.assertEq(redeem(node, LIMIT + 5), 5);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        vm.assertEq(redeem(node, ESCROW * 2), LIMIT);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        vm.assertEq(redeem(node, ESCROW * 2), ESCROW - 2 * LIMIT - 5);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        this.redeemed(node, ESCROW * 2);
    }

    function test_arbiters_stop_a_claim_that_is_pending() public {
        redeem(node, 900);
        vm.expectEmit(address(ledger));
        emit IDisputes.VoucherVoided(job, node, 900, "why");
        bar(node);
        assert(account().pending == 0 && account().paid == 0 && account().isBarred);
        vm.assertEq(ledger.getJob(job).free, ESCROW);
        vm.expectRevert(ITrainingLedger.NodeIsBarred.selector);
        this.redeemed(node, 900);
        vm.expectRevert(ITrainingLedger.NothingDue.selector);
        ledger.releaseVoucher(job, node);
        work(0, node, 1);
        close(0);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(pay(0, node), 700);
    }

    function test_what_shares_made_good_of_a_claim_stays_when_arbiters_stop_it() public {
        redeem(node, 1_000);
        work(0, node, 1);
        close(0);
        vm.assertEq(pay(0, node), 0);
        vm.expectEmit(address(ledger));
        emit IDisputes.VoucherVoided(job, node, 300, "why");
        bar(node);
        assert(account().pending == 700 && account().earned == 700 && account().paid == 0);
        vm.assertEq(ledger.getJob(job).free, ESCROW - 700);
        bar(node);
        vm.assertEq(account().pending, 700);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        assert(token.balanceOf(node) == 700 && account().paid == 700);
    }

    function test_a_claim_whose_window_is_over_stays() public {
        redeem(node, 900);
        vm.warp(block.timestamp + WINDOW);
        bar(node);
        vm.assertEq(account().pending, 900);
        ledger.releaseVoucher(job, node);
        vm.assertEq(token.balanceOf(node), 900);
    }

    /// forge-config: default.fuzz.runs = 100
    function test_shares_and_vouchers_together_pay_the_larger_of_both(uint256[10] memory dice) public {
        register(node, 100_000);
        uint256 promised;
        uint256 earned;
        for (uint32 i = 0; i < 10; ++i) {
            if (dice[i] % 2 == 0) {
                uint128 amount = uint128((dice[i] >> 8) % 9_000);
                uint256 had = promised > earned ? promised : earned;
                if (amount <= had) continue;
                if (account().pending != 0) release();
                vm.assertEq(redeem(node, amount), amount - had);
                promised = amount;
            } else {
                uint256 score = (dice[i] >> 8) % 5;
                work(i, node, score);
                close(i);
                pay(i, node);
                earned += score * PRICE;
            }
            uint256 has = token.balanceOf(node) + account().pending;
            vm.assertEq(has, promised > earned ? promised : earned);
            vm.assertEq(token.balanceOf(node), account().paid);
            vm.assertEq(ledger.getJob(job).free, ESCROW - has);
            if (account().pending != 0 && dice[i] >> 255 == 0) release();
        }
    }
}
