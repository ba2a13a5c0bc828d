// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IDisputes} from "../../interfaces/IDisputes.sol";
import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {WrongToken} from "./Tokens.sol";
import {IMintable, IOptions, World} from "./World.sol";

/// @dev Everything that can happen to a ledger, drawn at random, never reverting: two jobs, three nodes, six epochs at a time.
/// It keeps its own count of what it did, which the invariants compare with the ledger's.
contract Handler is World {
    uint256 public constant JOBS = 2;
    uint256 public constant NODES = 3;
    uint32 public constant EPOCHS = 6;

    bytes32[2] public jobs;
    address[3] public nodes;
    uint256[3] private _keys = [NODE_KEY, OTHER_KEY, 0xA3];
    mapping(bytes32 job => mapping(address node => uint256)) public recorded;
    mapping(bytes32 job => uint256) public dust;
    mapping(address node => uint256) public minted;
    mapping(address node => uint256) public penalties;
    mapping(bytes32 job => uint256) public funded;

    function start() external {
        setUp();
        token = IMintable(address(new WrongToken()));
        ledger = ITrainingLedger(deployed("TrainingLedger", abi.encode(options())));
        give(coordinator, BOND);
        vm.prank(coordinator);
        ledger.postBond(BOND);
        for (uint256 i = 0; i < NODES; ++i) {
            nodes[i] = vm.addr(_keys[i]);
            vm.prank(nodes[i]);
            ledger.registerNode("", 0);
            vm.prank(nodes[i]);
            token.approve(address(ledger), type(uint256).max);
        }
        for (uint256 i = 0; i < JOBS; ++i) {
            give(OWNER, ESCROW);
            vm.prank(OWNER);
            jobs[i] = ledger.openJob(bytes32(i), terms(), ESCROW);
            funded[jobs[i]] = ESCROW;
        }
    }

    function books() external view returns (ITrainingLedger, IMintable) {
        return (ledger, token);
    }

    modifier within(uint256 dice) {
        job = jobs[dice % JOBS];
        node = nodes[(dice >> 8) % NODES];
        _;
    }

    function epochAt(uint256 dice) private pure returns (uint32) {
        // forge-lint: disable-next-line(unsafe-typecast)
        return uint32((dice >> 16) % EPOCHS);
    }

    function isOpen(uint32 epoch) private view returns (bool) {
        return ledger.getEpoch(job, epoch).closedAt == 0;
    }

    function isPaused() private view returns (bool) {
        return IOptions(address(ledger)).paused();
    }

    function aggregate(uint256 dice, uint256 more) external within(dice) {
        uint32 epoch = epochAt(dice);
        if (!isOpen(epoch) || isPaused()) return;
        uint48 first = ledger.getAccount(job, node).counted;
        bool isLate = dice >> 250 == 0;
        uint32 receipts = uint32(1 + more % 50);
        uint64 samples = uint64((more >> 8) % 100_000);
        uint80 score = uint80((more >> 32) % (uint256(samples) * 10_000 + 1));
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, "", totals(node, isLate ? first + 1 : first, receipts, samples, score));
        if (!isLate) recorded[job][node] += receipts;
    }

    function packed(uint256 dice, uint256 more) external within(dice) {
        uint32 epoch = epochAt(dice);
        if (!isOpen(epoch) || isPaused()) return;
        uint48 counted = ledger.getAccount(job, node).counted;
        uint48 first = counted > 2 ? counted - uint48(more % 3) : counted;
        uint16 receipts = uint16(1 + (more >> 8) % 4);
        bytes memory made = abi.encodePacked(node, first, receipts);
        for (uint256 i = 0; i < receipts; ++i) {
            uint256 die = uint256(keccak256(abi.encode(more, i)));
            made = bytes.concat(
                made, abi.encodePacked(uint32(i), uint32(die % 10_000), uint16((die >> 64) % 10_001), bytes6(0))
            );
        }
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitContributions(job, epoch, seq, "", made);
        if (first + receipts > counted) recorded[job][node] += first + receipts - counted;
    }

    function forced(uint256 dice, uint64 samples) external within(dice) {
        uint32 epoch = epochAt(dice);
        if (!isOpen(epoch)) return;
        ITrainingLedger.Receipt memory made = receipt(node, uint64(recorded[job][node]));
        made.epoch = epoch;
        made.samples = samples % 100_000;
        force(made, _keys[(dice >> 8) % NODES], epoch);
        ++recorded[job][node];
    }

    function closed(uint256 dice) external within(dice) {
        uint32 epoch = epochAt(dice);
        if (!isOpen(epoch)) return;
        uint256 worth = uint256(ledger.getEpoch(job, epoch).totalScore) * PRICE / 1e6;
        uint256 free = ledger.getJob(job).free;
        if ((worth < free ? worth : free) > ledger.getJob(job).spendable) return;
        close(epoch);
    }

    function paid(uint256 dice) external within(dice) {
        uint32 epoch = epochAt(dice);
        uint32 closedAt = ledger.getEpoch(job, epoch).closedAt;
        if (closedAt == 0 || (isPaused() && block.timestamp < closedAt + WINDOW)) return;
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (node, nodes[dice % NODES], node);
        ledger.distributePayments(job, epoch, list);
    }

    function swept(uint256 dice) external within(dice) {
        uint32 epoch = epochAt(dice);
        if (isOpen(epoch) || ledger.getEpoch(job, epoch).swept) return;
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (nodes[0], nodes[1], nodes[2]);
        if (list[0] > list[1]) (list[0], list[1]) = (list[1], list[0]);
        if (list[1] > list[2]) (list[1], list[2]) = (list[2], list[1]);
        if (list[0] > list[1]) (list[0], list[1]) = (list[1], list[0]);
        dust[job] += ledger.sweepDust(job, epoch, list);
    }

    function redeemed(uint256 dice, uint128 amount) external within(dice) {
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        uint256 had = uint256(account.paid) + account.pending + account.voided;
        if (account.isBarred || account.pending != 0 || ledger.getJob(job).spendable == 0) return;
        redeem(node, uint128(had + 1 + amount % 5_000));
    }

    function released(uint256 dice) external within(dice) {
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        if (account.pending == 0 || block.timestamp < account.releaseAt) return;
        ledger.releaseVoucher(job, node);
    }

    function voided(uint256 dice, uint16 penalty) external within(dice) {
        uint32 epoch = epochAt(dice);
        uint32 closedAt = ledger.getEpoch(job, epoch).closedAt;
        ITrainingLedger.ShareState state = ledger.getContribution(job, epoch, node).state;
        if (closedAt == 0 || block.timestamp >= closedAt + WINDOW) return;
        if (state != ITrainingLedger.ShareState.DUE && state != ITrainingLedger.ShareState.PAID) return;
        uint256 before = token.balanceOf(TREASURY) + ledger.creditOf(TREASURY);
        void(epoch, node, penalty);
        penalties[node] += token.balanceOf(TREASURY) + ledger.creditOf(TREASURY) - before;
    }

    function barred(uint256 dice) external within(dice) {
        if (dice >> 252 == 0) bar(node);
    }

    function staked(uint256 dice, uint16 amount) external within(dice) {
        if (isPaused() || WrongToken(address(token)).victim() == node) return;
        token.mint(node, amount);
        minted[node] += amount;
        vm.prank(node);
        ledger.stake(amount);
    }

    function unstaked(uint256 dice, uint16 amount) external within(dice) {
        (uint256 held, uint256 locked,,) = ledger.stakeOf(node);
        vm.prank(node);
        ledger.unstake(amount % (held - locked + 1));
    }

    function withdrawn(uint256 dice) external within(dice) {
        (,, uint256 unbonding, uint256 releaseAt) = ledger.stakeOf(node);
        if (unbonding == 0 || block.timestamp < releaseAt) return;
        vm.prank(node);
        ledger.withdrawStake();
    }

    function credited(uint256 dice) external within(dice) {
        if (ledger.creditOf(node) == 0 || WrongToken(address(token)).victim() == node) return;
        vm.prank(node);
        ledger.withdraw(node);
    }

    function funding(uint256 dice, uint32 amount) external within(dice) {
        if (isPaused()) return;
        give(STRANGER, amount);
        vm.prank(STRANGER);
        ledger.fund(job, amount);
        funded[job] += amount;
    }

    function refusal(uint256 dice) external within(dice) {
        bool isOver = dice >> 254 != 0;
        WrongToken(address(token)).turn(
            isOver ? WrongToken.Wrong.NOTHING : WrongToken.Wrong.REFUSES, isOver ? address(0) : node
        );
    }

    function passed(uint256 dice) external within(dice) {
        vm.warp(block.timestamp + (dice >> 16) % (dice % 4 == 0 ? 2 * WINDOW : WINDOW / 4));
    }

    function pausing(uint256 dice) external within(dice) {
        bool isOn = isPaused();
        if (!isOn && dice >> 253 != 0) return;
        vm.prank(GUARDIAN);
        if (isOn) ledger.unpause();
        else ledger.pause();
    }
}
