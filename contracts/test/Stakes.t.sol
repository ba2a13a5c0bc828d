// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

/// @dev Registration, stake and its locks.
contract StakesTest is World {
    function assertStake(uint256 staked, uint256 locked, uint256 unbonding) private view {
        (uint256 staked_, uint256 locked_, uint256 unbonding_,) = ledger.stakeOf(node);
        vm.assertEq(staked_, staked, "staked");
        vm.assertEq(locked_, locked, "locked");
        vm.assertEq(unbonding_, unbonding, "unbonding");
    }

    function unstake(uint256 amount) private {
        vm.prank(node);
        ledger.unstake(amount);
    }

    function test_nodes_get_ids_in_order() public {
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.NodeRegistered(node, 1, meta());
        vm.prank(node);
        vm.assertEq(ledger.registerNode(meta(), 0), 1);
        register(other, 30);
        vm.assertEq(ledger.nodeCount(), 2);
        ITrainingLedger.NodeMetrics memory metrics = ledger.getNodeMetrics(other, new bytes32[](0));
        vm.assertEq(metrics.id, 2);
        vm.assertEq(metrics.staked, 30);
        vm.assertEq(keccak256(abi.encode(metrics.meta)), keccak256(abi.encode(meta())));
        vm.expectRevert(ITrainingLedger.AlreadyRegistered.selector);
        vm.prank(node);
        ledger.registerNode(meta(), 0);
    }

    function test_stake_adds_up() public {
        register(node, 100);
        give(node, 50);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.Staked(node, 50, 150);
        vm.prank(node);
        ledger.stake(50);
        assertStake(150, 0, 0);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW + 150);
    }

    function test_stake_needs_a_registration_and_has_80_bits() public {
        vm.expectRevert(ITrainingLedger.NotRegistered.selector);
        ledger.stake(1);
        register(node, 1);
        give(node, 1 << 80);
        vm.expectRevert();
        vm.prank(node);
        ledger.stake((1 << 80) - 1);
        vm.prank(node);
        ledger.stake((1 << 80) - 2);
    }

    function test_stake_leaves_after_unbonding() public {
        register(node, 100);
        vm.expectRevert(ITrainingLedger.NothingToWithdraw.selector);
        vm.prank(node);
        ledger.withdrawStake();
        uint256 releaseAt = block.timestamp + UNBONDING;
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.UnstakeRequested(node, 30, releaseAt);
        unstake(30);
        assertStake(70, 0, 30);
        vm.warp(releaseAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooEarly.selector, releaseAt));
        vm.prank(node);
        ledger.withdrawStake();
        unstake(70);
        vm.warp(releaseAt);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.TooEarly.selector, releaseAt - 1 + UNBONDING));
        vm.prank(node);
        ledger.withdrawStake();
        vm.warp(releaseAt - 1 + UNBONDING);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.StakeWithdrawn(node, 100);
        vm.prank(node);
        vm.assertEq(ledger.withdrawStake(), 100);
        vm.assertEq(token.balanceOf(node), 100);
        assertStake(0, 0, 0);
    }

    function test_a_payment_in_its_window_locks_stake_for_one_to_two_windows() public {
        register(node, 10 * PRICE);
        work(0, node, 4);
        close(0);
        pay(0, node);
        assertStake(10 * PRICE, 4 * PRICE, 0);
        vm.assertEq(ledger.getNodeMetrics(node, new bytes32[](0)).locked, 4 * PRICE);
        vm.expectRevert(abi.encodeWithSelector(ITrainingLedger.StakeLocked.selector, 6 * PRICE, 6 * PRICE + 1));
        unstake(6 * PRICE + 1);
        unstake(5 * PRICE);
        assertStake(5 * PRICE, 4 * PRICE, 5 * PRICE);
        uint256 nextPeriod = (block.timestamp / WINDOW + 1) * WINDOW;
        vm.warp(nextPeriod + WINDOW - 1);
        assertStake(5 * PRICE, 4 * PRICE, 5 * PRICE);
        give(node, PRICE);
        vm.prank(node);
        ledger.stake(PRICE);
        assertStake(6 * PRICE, 4 * PRICE, 5 * PRICE);
        vm.warp(nextPeriod + WINDOW);
        assertStake(6 * PRICE, 0, 5 * PRICE);
    }

    function test_locks_of_two_periods_add_up() public {
        register(node, 10 * PRICE);
        work(0, node, 4);
        work(1, node, 5);
        work(2, node, 2);
        close(0);
        pay(0, node);
        vm.warp((block.timestamp / WINDOW + 1) * WINDOW);
        close(1);
        close(2);
        pay(1, node);
        assertStake(10 * PRICE, 9 * PRICE, 0);
        vm.assertEq(pay(2, node), 0);
        vm.warp(block.timestamp + WINDOW - 1);
        vm.assertEq(pay(2, node), 0);
        vm.warp(block.timestamp + 1);
        assertStake(10 * PRICE, 5 * PRICE, 0);
        vm.assertEq(pay(2, node), 2 * PRICE);
        assertStake(10 * PRICE, 5 * PRICE, 0);
    }

    function test_periods_wrap_at_16_bits() public {
        vm.warp(uint256(WINDOW) * 65_536 * 8 - 1);
        register(node, 10 * PRICE);
        work(0, node, 4);
        close(0);
        pay(0, node);
        vm.warp(block.timestamp + 1);
        assertStake(10 * PRICE, 4 * PRICE, 0);
        vm.warp(block.timestamp + WINDOW);
        assertStake(10 * PRICE, 0, 0);
    }
}
