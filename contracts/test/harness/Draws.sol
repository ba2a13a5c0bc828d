// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {WrongToken} from "./Tokens.sol";
import {IMintable, IStandards, World} from "./World.sol";

/// @dev What can happen to either ledger, drawn at random, never reverting: two jobs and three nodes, under a token that refuses
/// one of them now and then. It keeps its own count of what it did, which the invariants compare with the ledger's.
abstract contract Draws is World {
    uint256 public constant JOBS = 2;
    uint256 public constant NODES = 3;

    bytes32[2] public jobs;
    address[3] public nodes;
    uint256[3] internal nodeKeys = [NODE_KEY, OTHER_KEY, 0xA3];
    mapping(bytes32 job => uint256) public funded;
    mapping(bytes32 job => uint256) public reclaimed;
    uint256 internal dice;

    /// @dev Found the jobs on a ledger of a token that obeys the dice.
    function found(string memory name) internal {
        setUp();
        token = IMintable(address(new WrongToken()));
        ledger = ITrainingLedger(deployed(name, abi.encode(options())));
        give(coordinator, BOND);
        vm.prank(coordinator);
        ledger.postBond(BOND);
        vm.prank(coordinator);
        ledger.allowOwner(OWNER, true);
        for (uint256 i = 0; i < NODES; ++i) {
            nodes[i] = vm.addr(nodeKeys[i]);
        }
        for (uint256 i = 0; i < JOBS; ++i) {
            give(OWNER, ESCROW);
            vm.prank(OWNER);
            jobs[i] = ledger.openJob(bytes32(i), terms(), ESCROW);
            funded[jobs[i]] = ESCROW;
        }
    }

    /// @dev Forge draws small numbers more often than others: as dice they are spread out.
    function spread(uint256 seed) internal pure returns (uint256) {
        return uint256(keccak256(abi.encode(seed)));
    }

    modifier within(uint256 seed) {
        dice = spread(seed);
        job = jobs[dice % JOBS];
        node = nodes[(dice >> 8) % NODES];
        _;
    }

    function isPaused() internal view returns (bool) {
        return IStandards(address(ledger)).paused();
    }

    /// @dev Whether the job takes nothing new any more.
    function isOver() internal view returns (bool) {
        uint40 endsAt = ledger.getJob(job).endsAt;
        return endsAt != 0 && block.timestamp >= endsAt - WINDOW;
    }

    function passed(uint256 seed) external within(seed) {
        uint256 most = dice % 4 == 0 ? NOTICE : dice % 4 == 1 ? WINDOW : WINDOW / 4;
        vm.warp(block.timestamp + (dice >> 16) % most);
    }

    function refusal(uint256 seed) external within(seed) {
        bool isOff = dice >> 255 == 0;
        WrongToken(address(token)).turn(
            isOff ? WrongToken.Wrong.NOTHING : WrongToken.Wrong.REFUSES, isOff ? address(0) : node
        );
    }

    function credited(uint256 seed) external within(seed) {
        for (uint256 i = 0; i < NODES; ++i) {
            if (ledger.creditOf(nodes[i]) == 0 || WrongToken(address(token)).victim() == nodes[i]) continue;
            vm.prank(nodes[i]);
            ledger.withdraw(nodes[i]);
        }
    }

    function funding(uint256 seed, uint32 amount) external within(seed) {
        if (isPaused() || isOver()) return;
        give(STRANGER, amount);
        vm.prank(STRANGER);
        ledger.fund(job, amount);
        funded[job] += amount;
    }

    /// @dev Announce a job's end, and take back what is free once it has come, again and again.
    function ended(uint256 seed) external within(seed) {
        uint40 endsAt = ledger.getJob(job).endsAt;
        if (endsAt == 0 ? dice >> 254 != 0 : block.timestamp < endsAt) return;
        uint256 had = token.balanceOf(OWNER);
        vm.prank(OWNER);
        if (endsAt == 0) ledger.requestReclaim(job);
        else ledger.reclaim(job);
        reclaimed[job] += token.balanceOf(OWNER) - had;
    }

    function pausing(uint256 seed) external within(seed) {
        bool isOn = isPaused();
        if (!isOn && dice >> 253 != 0) return;
        vm.prank(GUARDIAN);
        if (isOn) ledger.unpause();
        else ledger.pause();
    }
}
