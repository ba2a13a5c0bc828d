// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IMerkleLedger} from "../../interfaces/IMerkleLedger.sol";
import {TypedData} from "../../libraries/TypedData.sol";
import {Draws} from "./Draws.sol";
import {IMintable} from "./World.sol";

/// @dev Everything that can happen to settlement by roots, drawn at random: each has a leaf a node, and some promise more than
/// their total.
contract MerkleHandler is Draws {
    struct Posted {
        bytes32 root;
        uint96[3] cumulatives;
        uint256 activeAt;
    }

    IMerkleLedger public merkle;
    mapping(bytes32 job => Posted[]) private _posted;
    /// @dev What roots reserved, less what came back and what was claimed.
    mapping(bytes32 job => uint256) public unclaimed;
    /// @dev The highest leaf that was claimed with.
    mapping(bytes32 job => mapping(address node => uint256)) public shown;
    mapping(bytes32 job => bool) public isOverdrawn;

    function start() external {
        found("MerkleLedger");
        merkle = IMerkleLedger(address(ledger)); // `ledger` is for what both ledgers have.
    }

    function books() external view returns (IMerkleLedger, IMintable) {
        return (merkle, token);
    }

    function leaves(uint96[3] memory cumulatives) private view returns (bytes32[3] memory made) {
        for (uint256 i = 0; i < NODES; ++i) {
            made[i] = leafOf(merkle, nodes[i], cumulatives[i]);
        }
    }

    function parent(bytes32 one, bytes32 another) private pure returns (bytes32) {
        return one < another ? keccak256(abi.encode(one, another)) : keccak256(abi.encode(another, one));
    }

    /// @dev Each leaf rises by up to 2,000 over the root before; one root in four states less than it promises.
    function posted(uint256 seed, uint256 more) external within(seed) {
        Posted[] storage all = _posted[job];
        uint96 last = all.length == 0 ? 0 : merkle.getRoot(job, uint32(all.length - 1)).total;
        Posted memory made;
        if (all.length != 0) made.cumulatives = all[all.length - 1].cumulatives;
        uint96 total = last;
        more = spread(more);
        for (uint256 i = 0; i < NODES; ++i) {
            uint96 rise = uint96((more >> (32 * i)) % 2_000);
            made.cumulatives[i] += rise;
            total += rise;
        }
        bool isShort = dice >> 254 == 0 && total != last;
        if (isShort) total -= uint96(1 + (more >> 128) % (total - last));
        if (isPaused() || isOver() || total - last > merkle.getJob(job).spendable) return;
        bytes32[3] memory three = leaves(made.cumulatives);
        made.root = parent(parent(three[0], three[1]), three[2]);
        made.activeAt = block.timestamp + WINDOW;
        uint256 free = merkle.getJob(job).free;
        uint32 seq = merkle.getJob(job).nextSeq;
        vm.prank(coordinator);
        merkle.postRoot(job, seq, made.root, total);
        unclaimed[job] += free - merkle.getJob(job).free;
        isOverdrawn[job] = isOverdrawn[job] || isShort;
        all.push(made);
    }

    function disabled(uint256 seed) external within(seed) {
        Posted[] storage all = _posted[job];
        if (all.length == 0) return;
        // Near the end, where those lie that are not active yet.
        uint256 back = (dice >> 16) % 3;
        uint256 index = all.length > back ? all.length - 1 - back : 0;
        if (block.timestamp >= all[index].activeAt) return;
        uint96 total = merkle.getRoot(job, uint32(index)).total;
        bytes32 verdict = TypedData.hashRoot(job, uint32(index), all[index].root, total, "why");
        bytes32 digest = keccak256(abi.encodePacked(hex"1901", domain(address(merkle)), verdict));
        bytes[] memory signatures = new bytes[](2);
        for (uint256 i = 0; i < 2; ++i) {
            signatures[i] = signature(arbiterKeys[i], digest);
        }
        uint256 free = merkle.getJob(job).free;
        merkle.disableRoot(job, uint32(index), all[index].root, "why", signatures);
        unclaimed[job] -= merkle.getJob(job).free - free;
        while (all.length > index) all.pop();
    }

    /// @dev An active root of the job, old or new; false where there is none.
    function drawn() private view returns (bool isThere, uint32 index, Posted memory from) {
        Posted[] storage all = _posted[job];
        if (all.length == 0) return (false, 0, from);
        index = uint32((dice >> 16) % all.length);
        from = all[index];
        isThere = block.timestamp >= from.activeAt;
    }

    /// @dev Whether the reserve covers what the leaf of a node says; it always does where no root was short.
    function isCovered(uint256 wanted) private view returns (bool) {
        assert(isOverdrawn[job] || wanted <= unclaimed[job]);
        return wanted <= unclaimed[job];
    }

    function due(uint256 who, uint96 cumulative) private view returns (uint256) {
        uint256 had = merkle.claimedOf(job, nodes[who]);
        return cumulative > had ? cumulative - had : 0;
    }

    function show(uint256 who, uint96 cumulative) private {
        if (cumulative > shown[job][nodes[who]]) shown[job][nodes[who]] = cumulative;
    }

    function claimed(uint256 seed) external within(seed) {
        (bool isThere, uint32 index, Posted memory from) = drawn();
        uint256 who = (dice >> 8) % NODES;
        uint96 cumulative = from.cumulatives[who];
        if (!isThere || !isCovered(due(who, cumulative))) return;
        bytes32[3] memory three = leaves(from.cumulatives);
        bytes32[] memory proof = new bytes32[](who == 2 ? 1 : 2);
        if (who == 2) proof[0] = parent(three[0], three[1]);
        else (proof[0], proof[1]) = (three[1 - who], three[2]);
        unclaimed[job] -= merkle.claim(job, index, from.root, node, cumulative, proof);
        show(who, cumulative);
    }

    function claimedByAll(uint256 seed) external within(seed) {
        (bool isThere, uint32 index, Posted memory from) = drawn();
        uint256 sum;
        address[] memory all = new address[](NODES);
        uint96[] memory cumulatives = new uint96[](NODES);
        for (uint256 i = 0; i < NODES; ++i) {
            (all[i], cumulatives[i]) = (nodes[i], from.cumulatives[i]);
            sum += due(i, cumulatives[i]);
        }
        if (!isThere || !isCovered(sum)) return;
        bool[] memory flags = new bool[](2);
        (flags[0], flags[1]) = (true, true);
        bytes32[] memory none = new bytes32[](0);
        unclaimed[job] -= merkle.claimMany(job, index, from.root, all, cumulatives, none, flags);
        for (uint256 i = 0; i < NODES; ++i) {
            show(i, cumulatives[i]);
        }
    }

}
