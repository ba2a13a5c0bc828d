// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IMerkleLedger} from "../interfaces/IMerkleLedger.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Denial, Wallet, WrongToken} from "./harness/Tokens.sol";
import {IMintable, World} from "./harness/World.sol";

/// @dev Tokens that refuse, lie, take a fee or call back, and wallets that are contracts.
contract HostileTest is World {
    bytes32 private constant ENTERED = bytes4(keccak256("ReentrancyGuardReentrantCall()"));
    WrongToken private wrong;

    function setUp() public override {
        super.setUp();
        wrong = new WrongToken();
        token = IMintable(address(wrong));
        ledger = ITrainingLedger(deployed("TrainingLedger", abi.encode(options())));
        give(coordinator, BOND);
        vm.prank(coordinator);
        ledger.postBond(BOND);
        vm.prank(coordinator);
        ledger.allowOwner(OWNER, true);
        give(OWNER, ESCROW);
        vm.prank(OWNER);
        job = ledger.openJob(SALT, terms(), ESCROW);
        work(0, node, 3);
        work(0, other, 4);
        close(0);
    }

    function refusedThenWithdrawn(WrongToken.Wrong how) private {
        vm.warp(block.timestamp + WINDOW);
        wrong.turn(how, node);
        vm.expectEmit(address(ledger));
        emit ISettlement.Credited(node, 3 * PRICE);
        vm.assertEq(ledger.distributePayments(job, 0, pair(node, other)), 7 * PRICE);
        vm.assertEq(token.balanceOf(other), 4 * PRICE);
        vm.assertEq(ledger.creditOf(node), 3 * PRICE);
        vm.assertEq(ledger.getNodeMetrics(node, new bytes32[](0)).credit, 3 * PRICE);
        vm.expectRevert();
        vm.prank(node);
        ledger.withdraw(node);
        vm.expectEmit(address(ledger));
        emit ISettlement.Withdrawn(node, STRANGER, 3 * PRICE);
        vm.prank(node);
        vm.assertEq(ledger.withdraw(STRANGER), 3 * PRICE);
        vm.assertEq(token.balanceOf(STRANGER), 3 * PRICE);
        vm.expectRevert(ISettlement.NothingToWithdraw.selector);
        vm.prank(node);
        ledger.withdraw(STRANGER);
    }

    function test_a_refused_payment_waits_as_credit() public {
        refusedThenWithdrawn(WrongToken.Wrong.REFUSES);
    }

    function test_a_payment_answered_with_false_waits_as_credit() public {
        refusedThenWithdrawn(WrongToken.Wrong.RETURNS_FALSE);
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
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TransferShort.selector, 1_000, 990));
        vm.prank(OWNER);
        ledger.fund(job, 1_000);
    }

    function test_a_token_that_calls_back_pays_nobody_twice() public {
        vm.warp(block.timestamp + WINDOW);
        bytes memory again = abi.encodeCall(ledger.distributePayments, (job, 0, pair(node, other)));
        wrong.callBack(address(ledger), again);
        vm.assertEq(pay(0, node), 3 * PRICE);
        assert(wrong.hasCalled() && wrong.answer() == ENTERED);
        vm.assertEq(token.balanceOf(node), 3 * PRICE);
    }

    function test_nothing_that_moves_money_can_be_entered_again() public {
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        bytes[14] memory calls = [
            abi.encodeCall(ledger.distributePayments, (job, 0, pair(node, other))),
            abi.encodeCall(ledger.openJob, ("x", terms(), 0)),
            abi.encodeCall(ledger.fund, (job, 0)),
            abi.encodeCall(ledger.reclaim, (job)),
            abi.encodeCall(ledger.withdraw, (node)),
            abi.encodeCall(ledger.postBond, (0)),
            abi.encodeCall(ledger.withdrawBond, ()),
            abi.encodeCall(ledger.registerNode, ("", 0)),
            abi.encodeCall(ledger.stake, (0)),
            abi.encodeCall(ledger.withdrawStake, ()),
            abi.encodeCall(ledger.redeemVoucher, (voucher(node, 1), "")),
            abi.encodeCall(ledger.releaseVoucher, (job, node)),
            abi.encodeCall(ledger.voidContribution, (verdict(0, node, 0), new bytes[](0))),
            abi.encodeCall(ledger.proveEquivocation, (made, "", made, ""))
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
        redeem(node, 2_000);
        vm.warp(block.timestamp + UNBONDING);
        wrong.callBack(address(ledger), again);
        ledger.releaseVoucher(job, node);
        vm.assertEq(wrong.answer(), ENTERED);
        wrong.callBack(address(ledger), again);
        vm.prank(node);
        ledger.withdrawStake();
        vm.assertEq(wrong.answer(), ENTERED);
        work(1, other, 1);
        close(1);
        register(other, 100);
        wrong.callBack(address(ledger), again);
        void(1, other, 100);
        vm.assertEq(wrong.answer(), ENTERED);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        wrong.callBack(address(ledger), again);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(wrong.answer(), ENTERED);
        ledger.retireJob(job);
        vm.prank(coordinator);
        ledger.unbond();
        vm.warp(block.timestamp + UNBONDING);
        wrong.callBack(address(ledger), again);
        vm.prank(coordinator);
        ledger.withdrawBond();
        vm.assertEq(wrong.answer(), ENTERED);
    }

    /// @dev Both ways to claim, called while the token calls back from the other one.
    function test_claims_guard_each_other() public {
        IMerkleLedger merkle = merkleLedger();
        (address[] memory nodes, uint96[] memory amounts) = (only(node), new uint96[](1));
        bytes32[] memory none = new bytes32[](0);
        bytes32[2] memory roots = [leafOf(merkle, node, 100), leafOf(merkle, node, 250)];
        for (uint32 i = 0; i < 2; ++i) {
            vm.prank(coordinator);
            merkle.postRoot(job, i, roots[i], i == 0 ? 100 : 250);
        }
        vm.warp(block.timestamp + WINDOW);
        amounts[0] = 250;
        bytes memory many = abi.encodeCall(merkle.claimMany, (job, 1, roots[1], nodes, amounts, none, new bool[](0)));
        wrong.callBack(address(merkle), many);
        vm.assertEq(merkle.claim(job, 0, roots[0], node, 100, none), 100);
        assert(wrong.hasCalled() && wrong.answer() == ENTERED);
        wrong.callBack(address(merkle), abi.encodeCall(merkle.claim, (job, 1, roots[1], node, 250, none)));
        vm.assertEq(merkle.claimMany(job, 1, roots[1], nodes, amounts, none, new bool[](0)), 150);
        assert(wrong.hasCalled() && wrong.answer() == ENTERED);
        vm.assertEq(token.balanceOf(node), 250);
    }

    function test_wallets_that_are_contracts_sign() public {
        address wallet = address(new Wallet(vm.addr(NODE_KEY)));
        ITrainingLedger.Receipt memory made = receipt(wallet, 0);
        bytes memory own = signature(NODE_KEY, digestOf(made.contribution));
        bytes memory wrongKey = signature(OTHER_KEY, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, wallet));
        ledger.submitContribution(made, wrongKey, counter, 1);
        ledger.submitContribution(made, own, counter, 1);
        vm.assertEq(ledger.getAccount(job, wallet).counted, 1);
    }

    function test_a_key_that_delegates_takes_nothing_back() public {
        ITrainingLedger.Receipt memory made = receipt(node, 10);
        ITrainingLedger.Receipt memory second = receipt(node, 10);
        second.samples = 1;
        vm.etch(coordinator, abi.encodePacked(hex"ef0100", new Denial())); // What EIP-7702 makes of an account.
        vm.etch(node, coordinator.code);
        force(made, NODE_KEY, 1);
        vm.assertEq(redeem(node, 10_000), 10_000);
        bytes memory one = countersigned(made);
        bytes memory another = countersigned(second);
        vm.assertEq(ledger.proveEquivocation(made, one, second, another), BOND);
    }

    function test_nobody_signs_for_no_account() public {
        ITrainingLedger.Receipt memory made = receipt(address(0), 0);
        bytes memory counter = countersigned(made);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.BadSignature.selector, address(0)));
        ledger.submitContribution(made, "", counter, 1);
    }
}
