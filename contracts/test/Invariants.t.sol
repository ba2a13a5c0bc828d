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

    struct Books {
        uint256 free;
        uint256 reserved;
        uint256 stakes;
        uint256 credit;
        uint256 bonds;
    }

    function setUp() public {
        handler = new Handler();
        handler.start();
        (ledger, token) = handler.books();
        bytes4[30] memory drawn = [
            handler.aggregate.selector, handler.packed.selector, handler.forced.selector, handler.closed.selector,
            handler.paid.selector, handler.swept.selector, handler.redeemed.selector, handler.released.selector,
            handler.voided.selector, handler.barred.selector, handler.staked.selector, handler.unstaked.selector,
            handler.withdrawn.selector, handler.credited.selector, handler.funding.selector, handler.refusal.selector,
            handler.passed.selector, handler.pausing.selector, handler.ended.selector, handler.retired.selector,
            handler.raised.selector, handler.bonded.selector, handler.equivocated.selector,
            handler.trespassed.selector,
            // What the rest builds on comes more often.
            handler.aggregate.selector, handler.closed.selector, handler.paid.selector, handler.staked.selector,
            handler.passed.selector, handler.ended.selector
        ];
        draws(address(handler), abi.encode(drawn));
    }

    function invariant_the_books_balance() public view {
        Books memory books;
        uint256 running;
        (books.bonds, running,) = ledger.bondOf(vm.addr(0xC0));
        vm.assertEq(books.bonds, handler.bond(), "a bond is what was posted, until it is lost or leaves");
        for (uint256 i = 0; i < handler.JOBS(); ++i) {
            bytes32 job = handler.jobs(i);
            uint256 free = ledger.getJob(job).free;
            uint256 reserved = reservedBy(job);
            if (!handler.isRetired(job)) --running;
            books.free += free;
            books.reserved += reserved;
            vm.assertEq(
                handler.funded(job),
                free + reserved + paidBy(job) + handler.reclaimed(job),
                "what was put in is free, reserved, paid or taken back"
            );
        }
        vm.assertEq(running, 0, "a bond is held by the jobs that its coordinator agreed to");
        for (uint256 i = 0; i < handler.NODES(); ++i) {
            address node = handler.nodes(i);
            (uint256 staked, uint256 locked, uint256 unbonding,) = ledger.stakeOf(node);
            vm.assertLe(locked, staked, "locks are covered");
            uint256 credit = ledger.creditOf(node);
            books.stakes += staked + unbonding;
            books.credit += credit;
            uint256 paid;
            for (uint256 j = 0; j < handler.JOBS(); ++j) {
                paid += ledger.getAccount(handler.jobs(j), node).paid;
            }
            vm.assertEq(
                token.balanceOf(node) + credit + staked + unbonding + handler.penalties(node),
                handler.minted(node) + paid,
                "a node has what it brought and what it was paid"
            );
        }
        books.credit += ledger.creditOf(address(0x7EA5));
        vm.assertEq(
            token.balanceOf(address(ledger)),
            books.free + books.reserved + books.stakes + books.credit + books.bonds,
            "every unit is somebody's"
        );
    }

    function paidBy(bytes32 job) private view returns (uint256 paid) {
        for (uint256 i = 0; i < handler.NODES(); ++i) {
            paid += ledger.getAccount(job, handler.nodes(i)).paid;
        }
    }

    /// @dev What of a job's closed epochs is not settled, and what vouchers hold. On the way, each epoch's scores and each
    /// node's receipts must add up, and no epoch may owe more than its pool.
    function reservedBy(bytes32 job) private view returns (uint256 reserved) {
        uint256[3] memory receipts;
        for (uint32 epoch = 0; epoch < handler.EPOCHS(); ++epoch) {
            ITrainingLedger.Epoch memory held = ledger.getEpoch(job, epoch);
            uint256 score;
            uint256 rewards;
            uint256 settled;
            for (uint256 i = 0; i < 3; ++i) {
                ITrainingLedger.Contribution memory share = ledger.getContribution(job, epoch, handler.nodes(i));
                receipts[i] += share.receipts;
                score += share.score;
                rewards += share.reward;
                bool isSettled = share.state == ITrainingLedger.ShareState.PAID
                    || share.state == ITrainingLedger.ShareState.VOID;
                if (isSettled) settled += share.reward;
                vm.assertLe(share.paid, share.reward, "a share is not overpaid");
            }
            vm.assertEq(score, held.totalScore, "scores add up");
            vm.assertLe(rewards, held.pool, "shares fit their pool");
            reserved += (held.swept ? rewards : held.pool) - settled;
        }
        for (uint256 i = 0; i < 3; ++i) {
            ITrainingLedger.Account memory account = ledger.getAccount(job, handler.nodes(i));
            reserved += account.pending;
            vm.assertEq(account.counted, receipts[i], "every receipt is in one epoch");
            vm.assertEq(account.counted, handler.recorded(job, handler.nodes(i)), "every receipt is counted once");
        }
    }
}
