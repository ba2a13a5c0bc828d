// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Campaign} from "./harness/Vm.sol";
import {Handler} from "./harness/Handler.sol";
import {IMintable} from "./harness/World.sol";

/// @dev What holds after any calls in any order. One function, so that one campaign serves all of it.
contract InvariantsTest is Campaign {
    Handler private handler;
    ITrainingLedger private ledger;
    IMintable private token;

    function setUp() public {
        handler = new Handler();
        handler.start();
        (ledger, token) = handler.books();
        bytes4[21] memory drawn = [
            handler.train.selector, handler.aggregate.selector, handler.forceNewest.selector, handler.closeOne.selector,
            handler.distribute.selector, handler.voidOne.selector, handler.addStake.selector, handler.unstake.selector,
            handler.withdraw.selector, handler.refuse.selector, handler.fund.selector, handler.end.selector,
            handler.pass.selector,
            // What the rest builds on comes more often.
            handler.train.selector, handler.train.selector, handler.aggregate.selector, handler.closeOne.selector,
            handler.distribute.selector, handler.distribute.selector, handler.addStake.selector, handler.pass.selector
        ];
        draws(address(handler), abi.encode(drawn));
    }

    function invariant_the_books_balance() public view {
        uint256 sum = 1_000_000; // The escrow of a third job, in which nothing happens.
        for (uint256 i = 0; i < handler.JOBS(); ++i) {
            bytes32 job = handler.jobs(i);
            vm.assertEq(ledger.getJob(job).free, handler.free(job), "free is what the model says");
            sum += handler.free(job);
            for (uint256 j = 0; j < handler.NODES(); ++j) {
                sum += dueIn(job, handler.nodes(j));
            }
        }
        for (uint256 i = 0; i < handler.NODES(); ++i) {
            address node = handler.nodes(i);
            (uint256 staked, uint256 locked, uint256 unbonding,) = ledger.stakeOf(node);
            vm.assertLe(locked, staked, "locks are covered");
            uint256 held = staked + unbonding + ledger.creditOf(node);
            vm.assertEq(held + token.balanceOf(node), handler.owned(node), "a node has what it brought and was paid");
            sum += held;
        }
        uint256 penalties = ledger.creditOf(ledger.TREASURY()) + token.balanceOf(ledger.TREASURY());
        vm.assertEq(penalties, handler.penalties(), "the treasury has the penalties");
        vm.assertEq(token.balanceOf(address(0x0E)), handler.reclaimed(), "the owner has what was free at the end");
        vm.assertEq(token.balanceOf(address(ledger)), sum, "every unit is somebody's");
    }

    /// @dev A node's shares that are due in a job. On the way, its account and shares must be those of the model, and no unit
    /// may be allotted beyond what its work is worth.
    function dueIn(bytes32 job, address node) private view returns (uint256 due) {
        Handler.Model memory known = handler.model(job, node);
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        vm.assertEq(account.counted, known.counted, "receipts are those of the model");
        vm.assertEq(account.score, known.score, "the score is that of the model");
        vm.assertEq(account.earned, known.earned, "the earnings are those of the model");
        vm.assertLe(known.score, known.workScore, "nothing is recorded that was not done");
        vm.assertLe(account.earned, uint256(account.score) * 700 / 1e6, "earned is never above worth");
        uint256 allotted;
        for (uint32 epoch = 0; epoch < handler.EPOCHS(); ++epoch) {
            ITrainingLedger.Share memory share = ledger.getContribution(job, epoch, node);
            ITrainingLedger.Share memory expected = handler.share(job, epoch, node);
            vm.assertEq(share.amount, expected.amount, "a share's amount is that of the model");
            vm.assertEq(uint256(share.state), uint256(expected.state), "a share's state is that of the model");
            allotted += share.amount;
            if (share.state == ITrainingLedger.ShareState.DUE) due += share.amount;
        }
        vm.assertEq(allotted, account.earned, "every unit earned is in one share");
    }
}
