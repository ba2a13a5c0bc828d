// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IBonds} from "../interfaces/IBonds.sol";
import {IMerkleLedger} from "../interfaces/IMerkleLedger.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";
import {TypedData} from "../libraries/TypedData.sol";
import {World} from "./harness/World.sol";

/// @dev Settlement by cumulative roots.
contract MerkleTest is World {
    IMerkleLedger private merkle;

    function setUp() public override {
        super.setUp();
        merkle = merkleLedger();
    }

    function leaf(address account, uint96 cumulative) private view returns (bytes32) {
        return leafOf(merkle, account, cumulative);
    }

    function parent(bytes32 one, bytes32 another) private pure returns (bytes32) {
        return one < another ? keccak256(abi.encode(one, another)) : keccak256(abi.encode(another, one));
    }

    function post(uint32 seq, bytes32 root, uint96 total) private returns (uint32) {
        vm.prank(coordinator);
        return merkle.postRoot(job, seq, root, total);
    }

    function agreed(uint32 index, bytes32 root, uint96 total) private view returns (bytes[] memory signatures) {
        bytes32 verdict = TypedData.hashRoot(job, index, root, total, "why");
        bytes32 digest = keccak256(abi.encodePacked(hex"1901", domain(address(merkle)), verdict));
        signatures = new bytes[](2);
        for (uint256 i = 0; i < 2; ++i) {
            signatures[i] = signature(arbiterKeys[i], digest);
        }
    }

    function disable(uint32 index, bytes32 root) private {
        uint96 total = index < merkle.rootCount(job) ? merkle.getRoot(job, index).total : 0;
        merkle.disableRoot(job, index, root, "why", agreed(index, root, total));
    }

    /// @dev A root over two nodes, and each one's proof.
    function rooted(uint96 one, uint96 another)
        private
        view
        returns (bytes32 made, bytes32[] memory proof, bytes32[] memory otherProof)
    {
        proof = new bytes32[](1);
        otherProof = new bytes32[](1);
        (proof[0], otherProof[0]) = (leaf(other, another), leaf(node, one));
        made = parent(proof[0], otherProof[0]);
    }

    function test_a_root_reserves_what_it_adds() public {
        uint256 activeAt = block.timestamp + WINDOW;
        vm.expectEmit(address(merkle));
        emit IMerkleLedger.RootPosted(job, 0, 0, "one", 300, activeAt);
        vm.assertEq(post(0, "one", 300), 0);
        vm.assertEq(post(1, "two", 1_000), 1);
        vm.assertEq(merkle.getJob(job).free, ESCROW - 1_000);
        vm.assertEq(merkle.rootCount(job), 2);
        IMerkleLedger.Root memory held = merkle.getRoot(job, 1);
        assert(held.root == "two" && held.total == 1_000 && held.activeAt == activeAt);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.UnknownRoot.selector, 2));
        merkle.getRoot(job, 2);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.TotalFell.selector, 1_000, 999));
        post(2, "three", 999);
        vm.expectPartialRevert(ISettlement.SpendLimitExceeded.selector);
        post(2, "three", 1_001 + LIMIT);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.WrongSequence.selector, 2, 1));
        post(1, "three", 1_001);
        vm.expectPartialRevert(ISettlement.NotCoordinator.selector);
        merkle.postRoot(job, 2, "three", 1_001);
        vm.prank(GUARDIAN);
        merkle.pause();
        vm.expectRevert(bytes4(keccak256("EnforcedPause()")));
        post(2, "three", 1_001);
    }

    function test_nodes_claim_what_is_new_once_the_root_is_active() public {
        (bytes32 made, bytes32[] memory proof,) = rooted(300, 500);
        post(0, made, 800);
        uint256 activeAt = block.timestamp + WINDOW;
        vm.warp(activeAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, activeAt));
        merkle.claim(job, 0, made, node, 300, proof);
        vm.warp(activeAt);
        vm.expectRevert(IMerkleLedger.BadProof.selector);
        merkle.claim(job, 0, made, node, 301, proof);
        vm.expectRevert(IMerkleLedger.BadProof.selector);
        merkle.claim(job, 0, made, STRANGER, 300, proof);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.UnknownRoot.selector, 0));
        merkle.claim(job, 0, "other", node, 300, proof);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.UnknownRoot.selector, 1));
        merkle.claim(job, 1, made, node, 300, proof);
        vm.expectEmit(address(merkle));
        emit IMerkleLedger.Claimed(job, node, 300, 300);
        vm.assertEq(merkle.claim(job, 0, made, node, 300, proof), 300);
        vm.recordLogs();
        vm.assertEq(merkle.claim(job, 0, made, node, 300, proof), 0);
        vm.assertEq(vm.getRecordedLogs().length, 0);
        vm.assertEq(token.balanceOf(node), 300);
        vm.assertEq(merkle.claimedOf(job, node), 300);

        (bytes32 next, bytes32[] memory nextProof,) = rooted(450, 900);
        post(1, next, 1_350);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(merkle.claim(job, 1, next, node, 450, nextProof), 150);
        vm.assertEq(merkle.claim(job, 0, made, node, 300, proof), 0);
        vm.assertEq(token.balanceOf(node), 450);
    }

    function test_many_claim_with_one_proof() public {
        (bytes32 made,,) = rooted(300, 500);
        post(0, made, 800);
        vm.warp(block.timestamp + WINDOW);
        address[] memory nodes = new address[](2);
        uint96[] memory amounts = new uint96[](2);
        (nodes[0], nodes[1], amounts[0], amounts[1]) = (node, other, 300, 500);
        bool[] memory flags = new bool[](1);
        flags[0] = true;
        bytes32[] memory none = new bytes32[](0);
        vm.expectRevert(IMerkleLedger.LengthsDiffer.selector);
        merkle.claimMany(job, 0, made, nodes, new uint96[](1), none, flags);
        amounts[1] = 501;
        vm.expectRevert(IMerkleLedger.BadProof.selector);
        merkle.claimMany(job, 0, made, nodes, amounts, none, flags);
        amounts[1] = 500;
        vm.assertEq(merkle.claimMany(job, 0, made, nodes, amounts, none, flags), 800);
        vm.assertEq(merkle.claimMany(job, 0, made, nodes, amounts, none, flags), 0);
        vm.assertEq(token.balanceOf(other), 500);
        post(1, "next", 900);
        vm.expectPartialRevert(ISettlement.TooEarly.selector);
        merkle.claimMany(job, 1, "next", nodes, amounts, none, flags);
    }

    function test_a_quorum_disables_a_root_and_those_after_it_before_they_are_active() public {
        post(0, "zero", 100);
        vm.warp(block.timestamp + 10);
        post(1, "one", 300);
        post(2, "two", 700);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.UnknownRoot.selector, 1));
        this.disabled(1, "two");
        vm.expectEmit(address(merkle));
        emit IMerkleLedger.RootDisabled(job, 1, "one", 600, "why");
        disable(1, "one");
        vm.assertEq(merkle.rootCount(job), 1);
        vm.assertEq(merkle.getJob(job).free, ESCROW - 100);
        vm.assertEq(post(3, "again", 400), 1);
        vm.assertEq(merkle.getJob(job).free, ESCROW - 400);
        uint256 activeAt = merkle.getRoot(job, 0).activeAt;
        vm.warp(activeAt);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.RootIsActive.selector, activeAt));
        this.disabled(0, "zero");
        vm.warp(activeAt + 9);
        disable(1, "again");
        vm.assertEq(merkle.getJob(job).free, ESCROW - 100);
    }

    function disabled(uint32 index, bytes32 made) external {
        disable(index, made);
    }

    function test_a_verdict_on_a_root_says_nothing_of_another_total() public {
        bytes32 only_ = leaf(node, 100);
        post(0, only_, 200_000);
        bytes[] memory signatures = agreed(0, only_, 200_000);
        merkle.disableRoot(job, 0, only_, "why", signatures);
        post(1, only_, 100);
        vm.expectPartialRevert(IBonds.BadArbiter.selector);
        merkle.disableRoot(job, 0, only_, "why", signatures);
        merkle.disableRoot(job, 0, only_, "why", agreed(0, only_, 100));
        vm.assertEq(merkle.rootCount(job), 0);
    }

    function test_disabling_needs_the_quorum() public {
        post(0, "zero", 100);
        vm.expectRevert(abi.encodeWithSignature("NoQuorum(uint256,uint256)", 0, 2));
        merkle.disableRoot(job, 0, "zero", "why", new bytes[](0));
    }

    function test_what_may_be_claimed_follows_the_roots_that_stand() public {
        (bytes32 made, bytes32[] memory proof, bytes32[] memory otherProof) = rooted(300, 500);
        post(0, made, 400);
        vm.warp(block.timestamp + 10);
        post(1, "more", 450);
        disable(1, "more");
        post(2, "no more", 400);
        vm.warp(block.timestamp + WINDOW);
        merkle.claim(job, 0, made, node, 300, proof);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.RootOverdrawn.selector, 100, 500));
        merkle.claim(job, 0, made, other, 500, otherProof);
    }

    function test_an_overdrawn_root_keeps_nobody_from_disabling_a_later_one() public {
        bytes32 made = leaf(node, 500);
        bytes32[] memory none = new bytes32[](0);
        post(0, made, 100);
        vm.warp(block.timestamp + WINDOW);
        post(1, "two", 600);
        vm.assertEq(merkle.claim(job, 0, made, node, 500, none), 500);
        vm.expectEmit(address(merkle));
        emit IMerkleLedger.RootDisabled(job, 1, "two", 100, "why");
        disable(1, "two");
        vm.assertEq(merkle.getJob(job).free, ESCROW - 500);
        bytes32 next = leaf(other, 200);
        post(2, next, 300);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(merkle.claim(job, 1, next, other, 200, none), 200);
        vm.assertEq(merkle.getJob(job).free, ESCROW - 700);
        vm.assertEq(token.balanceOf(address(merkle)), BOND + ESCROW - 700);
    }

    function test_a_root_that_promises_more_than_its_total_empties_its_own_reserve_only() public {
        (bytes32 made, bytes32[] memory proof, bytes32[] memory otherProof) = rooted(300, 500);
        post(0, made, 400);
        vm.warp(block.timestamp + WINDOW);
        merkle.claim(job, 0, made, node, 300, proof);
        vm.expectRevert(abi.encodeWithSelector(IMerkleLedger.RootOverdrawn.selector, 100, 500));
        merkle.claim(job, 0, made, other, 500, otherProof);
        vm.assertEq(token.balanceOf(address(merkle)), BOND + ESCROW - 300);
    }
}
