// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ISettlement} from "../interfaces/ISettlement.sol";
import {IStaking} from "../interfaces/IStaking.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Stake, StakeLocks} from "../libraries/StakeLocks.sol";
import {World} from "./harness/World.sol";

/// @dev The register of nodes, stake, and what payments lock of it.
contract StakesTest is World {
    function staked(address account) private view returns (uint256 held, uint256 locked) {
        (held, locked,,) = ledger.stakeOf(account);
    }

    function test_nodes_get_dense_ids() public {
        vm.expectEmit(address(ledger));
        emit IStaking.NodeRegistered(node, 1, "one");
        vm.prank(node);
        vm.assertEq(ledger.registerNode("one", 0), 1);
        vm.prank(other);
        vm.assertEq(ledger.registerNode("two", 0), 2);
        vm.assertEq(ledger.nodeCount(), 2);
        ITrainingLedger.NodeMetrics memory metrics = ledger.getNodeMetrics(other, new bytes32[](0));
        vm.assertEq(metrics.id, 2);
        vm.assertEq(metrics.meta, "two");
        vm.expectRevert(IStaking.AlreadyRegistered.selector);
        vm.prank(node);
        ledger.registerNode("again", 0);
    }

    function test_stake_comes_with_registration_or_after_it() public {
        vm.expectRevert(IStaking.NotRegistered.selector);
        vm.prank(node);
        ledger.stake(1);
        register(node, 100);
        give(node, 20);
        vm.expectEmit(address(ledger));
        emit IStaking.Staked(node, 20, 120);
        vm.prank(node);
        ledger.stake(20);
        (uint256 held, uint256 locked) = staked(node);
        assert(held == 120 && locked == 0);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW + BOND + 120);
    }

    function test_stake_beyond_80_bits_is_refused() public {
        give(node, 1 << 80);
        vm.expectPartialRevert(bytes4(keccak256("SafeCastOverflowedUintDowncast(uint8,uint256)")));
        vm.prank(node);
        ledger.registerNode("", 1 << 80);
        vm.prank(node);
        ledger.registerNode("", (1 << 80) - 1);
    }

    function test_stake_leaves_after_unbonding() public {
        register(node, 100);
        vm.expectRevert(abi.encodeWithSelector(IStaking.StakeLocked.selector, 100, 101));
        vm.prank(node);
        ledger.unstake(101);
        vm.expectRevert(ISettlement.NothingToWithdraw.selector);
        vm.prank(node);
        ledger.withdrawStake();
        vm.expectEmit(address(ledger));
        emit IStaking.UnstakeRequested(node, 60, block.timestamp + UNBONDING);
        vm.prank(node);
        ledger.unstake(60);
        (uint256 held,, uint256 unbonding, uint256 releaseAt) = ledger.stakeOf(node);
        assert(held == 40 && unbonding == 60 && releaseAt == block.timestamp + UNBONDING);
        vm.warp(releaseAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, releaseAt));
        vm.prank(node);
        ledger.withdrawStake();
        vm.prank(node);
        ledger.unstake(15);
        vm.warp(releaseAt);
        vm.expectPartialRevert(ISettlement.TooEarly.selector);
        vm.prank(node);
        ledger.withdrawStake();
        vm.warp(releaseAt - 1 + UNBONDING);
        vm.expectEmit(address(ledger));
        emit IStaking.StakeWithdrawn(node, 75);
        vm.prank(node);
        vm.assertEq(ledger.withdrawStake(), 75);
        vm.assertEq(token.balanceOf(node), 75);
        (held,, unbonding,) = ledger.stakeOf(node);
        assert(held == 25 && unbonding == 0);
    }

    function test_free_stake_pays_at_once_and_is_locked() public {
        register(node, 10 * PRICE);
        work(0, node, 7);
        close(0);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.SharesPaid(job, 0, false, only(node), only(7 * PRICE));
        vm.assertEq(pay(0, node), 7 * PRICE);
        vm.assertEq(token.balanceOf(node), 7 * PRICE);
        (uint256 held, uint256 locked) = staked(node);
        assert(held == 10 * PRICE && locked == 7 * PRICE);
        vm.expectRevert(abi.encodeWithSelector(IStaking.StakeLocked.selector, 3 * PRICE, 3 * PRICE + 1));
        vm.prank(node);
        ledger.unstake(3 * PRICE + 1);
        vm.assertEq(ledger.getNodeMetrics(node, new bytes32[](0)).locked, 7 * PRICE);
        vm.assertEq(ledger.getNodeMetrics(node, new bytes32[](0)).staked, 10 * PRICE);
    }

    function test_payments_share_the_stake_and_wait_when_it_is_used_up() public {
        register(node, 10 * PRICE);
        for (uint32 epoch = 0; epoch < 3; ++epoch) {
            work(epoch, node, 5);
            close(epoch);
        }
        vm.assertEq(pay(0, node), 5 * PRICE);
        vm.assertEq(pay(1, node), 5 * PRICE);
        vm.assertEq(pay(2, node), 0);
        (, uint256 locked) = staked(node);
        vm.assertEq(locked, 10 * PRICE);
    }

    function test_locks_last_one_to_two_windows() public {
        register(node, 10 * PRICE);
        uint256 period = (block.timestamp / WINDOW + 1) * WINDOW;
        vm.warp(period + WINDOW - 1);
        work(0, node, 4);
        close(0);
        pay(0, node);
        vm.warp(period + WINDOW);
        (, uint256 locked) = staked(node);
        vm.assertEq(locked, 4 * PRICE);
        work(1, node, 3);
        close(1);
        pay(1, node);
        (, locked) = staked(node);
        vm.assertEq(locked, 7 * PRICE);
        vm.warp(period + 2 * WINDOW);
        (, locked) = staked(node);
        vm.assertEq(locked, 3 * PRICE);
        vm.warp(period + 3 * WINDOW);
        (, locked) = staked(node);
        vm.assertEq(locked, 0);
    }

    function test_the_unpaid_wait_for_the_window_and_lock_nothing() public {
        register(node, 10 * PRICE);
        work(0, node, 11);
        close(0);
        vm.assertEq(pay(0, node), 0);
        vm.warp(block.timestamp + WINDOW - 1);
        vm.assertEq(pay(0, node), 0);
        vm.warp(block.timestamp + 1);
        vm.expectEmit(address(ledger));
        emit ITrainingLedger.SharesPaid(job, 0, true, only(node), only(11 * PRICE));
        vm.assertEq(pay(0, node), 11 * PRICE);
        (, uint256 locked) = staked(node);
        vm.assertEq(locked, 0);
    }

    /// forge-config: default.fuzz.runs = 200
    function test_locks_never_exceed_the_stake(uint80 amount, uint16 period, uint256[12] memory dice) public pure {
        Stake held = StakeLocks.packed(amount, 0, 0, period);
        for (uint256 i = 0; i < dice.length; ++i) {
            uint256 steps = dice[i] % 3;
            unchecked {
                period += uint16(steps);
            }
            uint256 before = held.locked();
            held = held.inPeriod(period);
            vm.assertTrue(held.locked() <= before && held.period() == period);
            if (steps == 0) vm.assertEq(held.locked(), before);
            uint256 wanted = (dice[i] >> 8) % (held.free() + 1);
            uint80 recent = held.recent();
            held = held.lock(wanted);
            vm.assertEq(held.recent(), recent + wanted);
            vm.assertTrue(held.locked() <= held.staked());
            if (dice[i] % 5 == 0 && wanted != 0) {
                held = held.seize(uint80(wanted), period);
                vm.assertEq(held.recent(), recent);
            }
            vm.assertEq(held.free() + held.locked(), held.staked());
        }
    }

    function test_a_lock_of_the_period_before_is_seized_there() public pure {
        Stake held = StakeLocks.packed(100, 0, 0, type(uint16).max);
        held = held.lock(30);
        held = held.inPeriod(0);
        held = held.lock(20);
        assert(held.older() == 30 && held.recent() == 20 && held.period() == 0);
        held = held.seize(10, type(uint16).max);
        assert(held.older() == 20 && held.recent() == 20 && held.staked() == 90);
        held = held.inPeriod(2);
        assert(held.older() == 0 && held.recent() == 0);
    }
}
