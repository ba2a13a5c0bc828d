// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {WrongToken} from "./harness/Tokens.sol";
import {World} from "./harness/World.sol";

/// @dev Tokens that refuse, lie, take a fee or call back.
contract HostileTest is World {
    bytes32 private constant ENTERED = bytes4(keccak256("ReentrancyGuardReentrantCall()"));
    WrongToken private wrong;

    function setUp() public override {
        super.setUp();
        wrong = new WrongToken();
        found(address(wrong));
        work(0, node, 3);
        work(0, other, 4);
        close(0);
    }

    function refuseAndWithdraw(WrongToken.Wrong how) private {
        vm.warp(block.timestamp + WINDOW);
        wrong.turn(how, node);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.Credited(node, 3 * PRICE);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 7 * PRICE);
        vm.assertEq(token.balanceOf(other), 4 * PRICE);
        vm.assertEq(ledger.creditOf(node), 3 * PRICE);
        vm.assertEq(ledger.getNodeMetrics(node, new bytes32[](0)).credit, 3 * PRICE);
        vm.expectRevert();
        vm.prank(node);
        ledger.withdrawCredit(node);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.CreditWithdrawn(node, STRANGER, 3 * PRICE);
        vm.prank(node);
        vm.assertEq(ledger.withdrawCredit(STRANGER), 3 * PRICE);
        vm.assertEq(token.balanceOf(STRANGER), 3 * PRICE);
        vm.expectRevert(ITrainingLedger.NothingToWithdraw.selector);
        vm.prank(node);
        ledger.withdrawCredit(STRANGER);
    }

    function test_a_refused_payment_waits_as_credit() public {
        refuseAndWithdraw(WrongToken.Wrong.REFUSES);
    }

    function test_a_payment_answered_with_false_waits_as_credit() public {
        refuseAndWithdraw(WrongToken.Wrong.RETURNS_FALSE);
    }

    function test_credit_adds_up() public {
        work(1, node, 2);
        close(1);
        vm.warp(block.timestamp + WINDOW);
        wrong.turn(WrongToken.Wrong.REFUSES, node);
        pay(0, node);
        pay(1, node);
        vm.assertEq(ledger.creditOf(node), 5 * PRICE);
    }

    function test_a_fee_on_the_way_in_is_refused() public {
        give(OWNER, 1_000);
        wrong.turn(WrongToken.Wrong.TAKES_A_FEE, address(0));
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TransferShort.selector, 1_000, 990));
        vm.prank(OWNER);
        ledger.fund(job, 1_000);
    }

    function test_a_token_that_calls_back_pays_nobody_twice() public {
        vm.warp(block.timestamp + WINDOW);
        wrong.callBack(address(ledger), abi.encodeCall(ledger.distributePayments, (job, 0, pair(node, other))));
        vm.assertEq(pay(0, node), 3 * PRICE);
        assert(wrong.hasCalled() && wrong.answer() == ENTERED);
        vm.assertEq(token.balanceOf(node), 3 * PRICE);
    }

    function test_nothing_that_moves_money_can_be_entered_again() public {
        bytes[9] memory calls = [
            abi.encodeCall(ledger.distributePayments, (job, 0, pair(node, other))),
            abi.encodeCall(ledger.openJob, ("x", terms(), 0)),
            abi.encodeCall(ledger.fund, (job, 0)),
            abi.encodeCall(ledger.reclaim, (job)),
            abi.encodeCall(ledger.withdrawCredit, (node)),
            abi.encodeCall(ledger.registerNode, (meta(), 0)),
            abi.encodeCall(ledger.stake, (0)),
            abi.encodeCall(ledger.withdrawStake, ()),
            abi.encodeCall(ledger.voidContribution, (verdict(0, node, 0), new bytes[](0)))
        ];
        for (uint256 i = 0; i < calls.length; ++i) {
            give(OWNER, 10);
            wrong.callBack(address(ledger), calls[i]);
            vm.prank(OWNER);
            ledger.fund(job, 10);
            assert(wrong.hasCalled() && wrong.answer() == ENTERED);
        }
    }

    /// @dev Each function that pays, called while the token calls back into another one.
    function test_what_pays_guards_all_the_rest() public {
        bytes memory again = abi.encodeCall(ledger.fund, (job, 0));
        register(node, 2_000);
        vm.prank(node);
        ledger.unstake(1_000);
        wrong.callBack(address(ledger), again);
        void(0, node, 100);
        vm.assertEq(wrong.answer(), ENTERED);
        vm.warp(block.timestamp + UNBONDING);
        wrong.callBack(address(ledger), again);
        vm.prank(node);
        ledger.withdrawStake();
        vm.assertEq(wrong.answer(), ENTERED);
        wrong.turn(WrongToken.Wrong.REFUSES, other);
        pay(0, other);
        wrong.callBack(address(ledger), again);
        vm.prank(other);
        ledger.withdrawCredit(STRANGER);
        vm.assertEq(wrong.answer(), ENTERED);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        wrong.callBack(address(ledger), again);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(wrong.answer(), ENTERED);
    }
}
