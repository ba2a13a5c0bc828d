// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IMerkleLedger} from "../interfaces/IMerkleLedger.sol";
import {MerkleHandler} from "./harness/MerkleHandler.sol";
import {Campaign} from "./harness/Vm.sol";
import {IMintable} from "./harness/World.sol";

/// @dev What holds of settlement by roots after any calls in any order.
contract MerkleInvariantsTest is Campaign {
    MerkleHandler private handler;
    IMerkleLedger private merkle;
    IMintable private token;

    function setUp() public {
        handler = new MerkleHandler();
        handler.start();
        (merkle, token) = handler.books();
        bytes4[12] memory drawn = [
            handler.posted.selector, handler.posted.selector, handler.disabled.selector, handler.claimed.selector,
            handler.claimedByAll.selector, handler.credited.selector, handler.funding.selector, handler.ended.selector,
            handler.refusal.selector, handler.passed.selector, handler.passed.selector, handler.pausing.selector
        ];
        draws(address(handler), abi.encode(drawn));
    }

    function invariant_the_books_balance() public view {
        (uint256 owed,,) = merkle.bondOf(vm.addr(0xC0));
        for (uint256 i = 0; i < handler.JOBS(); ++i) {
            bytes32 job = handler.jobs(i);
            uint256 free = merkle.getJob(job).free;
            uint256 claimed = claimedIn(job);
            owed += free + handler.unclaimed(job);
            vm.assertEq(
                handler.funded(job),
                free + handler.unclaimed(job) + claimed + handler.reclaimed(job),
                "what was put in is free, reserved, claimed or taken back"
            );
            uint256 roots = merkle.rootCount(job);
            if (handler.isOverdrawn(job)) continue;
            uint256 total = roots == 0 ? 0 : merkle.getRoot(job, uint32(roots - 1)).total;
            vm.assertEq(claimed + handler.unclaimed(job), total, "roots reserve what they promise");
        }
        for (uint256 i = 0; i < handler.NODES(); ++i) {
            address node = handler.nodes(i);
            uint256 credit = merkle.creditOf(node);
            owed += credit;
            uint256 claimed;
            for (uint256 j = 0; j < handler.JOBS(); ++j) {
                claimed += merkle.claimedOf(handler.jobs(j), node);
            }
            vm.assertEq(token.balanceOf(node) + credit, claimed, "a node has what it claimed, once");
        }
        vm.assertEq(token.balanceOf(address(merkle)), owed, "every unit is somebody's");
    }

    /// @dev What all nodes have claimed in a job: each what the highest leaf says that was shown for it.
    function claimedIn(bytes32 job) private view returns (uint256 sum) {
        for (uint256 i = 0; i < handler.NODES(); ++i) {
            uint256 one = merkle.claimedOf(job, handler.nodes(i));
            vm.assertEq(one, handler.shown(job, handler.nodes(i)), "claims are cumulative");
            sum += one;
        }
    }
}
