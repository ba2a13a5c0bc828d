// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {Draws} from "./Draws.sol";
import {WrongToken} from "./Tokens.sol";
import {IMintable} from "./World.sol";

/// @dev Everything that can happen to a ledger, drawn at random, six epochs a job.
contract Handler is Draws {
    uint32 public constant EPOCHS = 6;

    mapping(bytes32 job => mapping(address node => uint256)) public recorded;
    mapping(address node => uint256) public minted;
    mapping(address node => uint256) public penalties;
    mapping(bytes32 job => bool) public isRetired;
    uint256 public bond = BOND;

    function start() external {
        found("TrainingLedger");
        for (uint256 i = 0; i < NODES; ++i) {
            vm.prank(nodes[i]);
            ledger.registerNode("", 0);
            vm.prank(nodes[i]);
            token.approve(address(ledger), type(uint256).max);
        }
    }

    function books() external view returns (ITrainingLedger, IMintable) {
        return (ledger, token);
    }

    function epochAt() private view returns (uint32) {
        // forge-lint: disable-next-line(unsafe-typecast)
        return uint32((dice >> 16) % EPOCHS);
    }

    function isOpen(uint32 epoch) private view returns (bool) {
        return ledger.getEpoch(job, epoch).closedAt == 0;
    }

    function aggregate(uint256 seed, uint256 more) external within(seed) {
        uint32 epoch = epochAt();
        if (!isOpen(epoch) || isPaused() || isOver()) return;
        uint48 first = ledger.getAccount(job, node).counted;
        bool isLate = dice >> 252 == 0;
        more = spread(more);
        uint32 receipts = uint32(1 + more % 50);
        uint64 samples = uint64((more >> 8) % 100_000);
        uint80 score = uint80((more >> 32) % (uint256(samples) * 10_000 + 1));
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, "", totals(node, isLate ? first + 1 : first, receipts, samples, score));
        if (!isLate) recorded[job][node] += receipts;
    }

    function packed(uint256 seed, uint256 more) external within(seed) {
        uint32 epoch = epochAt();
        if (!isOpen(epoch) || isPaused() || isOver()) return;
        uint48 counted = ledger.getAccount(job, node).counted;
        more = spread(more);
        uint48 first = counted > 2 ? counted - uint48(more % 3) : counted;
        uint16 receipts = uint16(1 + (more >> 8) % 4);
        bytes memory made = abi.encodePacked(node, first, receipts);
        for (uint256 i = 0; i < receipts; ++i) {
            uint256 die = spread(more + i);
            made = bytes.concat(
                made, abi.encodePacked(uint32(i), uint32(die % 10_000), uint16((die >> 64) % 10_001), bytes6(0))
            );
        }
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitContributions(job, epoch, seq, "", made);
        if (first + receipts > counted) recorded[job][node] += first + receipts - counted;
    }

    function forced(uint256 seed, uint64 samples) external within(seed) {
        uint32 epoch = epochAt();
        if (!isOpen(epoch) || isOver()) return;
        ITrainingLedger.Receipt memory made = receipt(node, uint64(recorded[job][node]));
        // A late one where it can be: the epoch before is closed.
        made.epoch = epoch != 0 && !isOpen(epoch - 1) ? epoch - 1 : epoch;
        made.samples = samples % 100_000;
        force(made, nodeKeys[(dice >> 8) % NODES], epoch);
        ++recorded[job][node];
    }

    function closed(uint256 seed) external within(seed) {
        uint32 epoch = epochAt();
        if (!isOpen(epoch)) return;
        uint256 worth = uint256(ledger.getEpoch(job, epoch).totalScore) * PRICE / 1e6;
        uint256 free = ledger.getJob(job).free;
        if (!isOver() && (worth < free ? worth : free) > ledger.getJob(job).spendable) return;
        uint32 openedAt = ledger.getEpoch(job, epoch).openedAt;
        bool isAnyones = openedAt != 0 && (isOver() || block.timestamp >= openedAt + UNBONDING);
        vm.prank(isAnyones ? STRANGER : coordinator);
        ledger.closeEpoch(job, epoch);
    }

    function paid(uint256 seed) external within(seed) {
        uint32 epoch = epochAt();
        uint32 closedAt = ledger.getEpoch(job, epoch).closedAt;
        if (closedAt == 0 || (isPaused() && block.timestamp < closedAt + WINDOW)) return;
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (node, nodes[dice % NODES], node);
        ledger.distributePayments(job, epoch, list);
    }

    function swept(uint256 seed) external within(seed) {
        uint32 epoch = epochAt();
        if (isOpen(epoch) || ledger.getEpoch(job, epoch).swept) return;
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (nodes[0], nodes[1], nodes[2]);
        if (list[0] > list[1]) (list[0], list[1]) = (list[1], list[0]);
        if (list[1] > list[2]) (list[1], list[2]) = (list[2], list[1]);
        if (list[0] > list[1]) (list[0], list[1]) = (list[1], list[0]);
        assert(ledger.sweepDust(job, epoch, list) < NODES);
    }

    function redeemed(uint256 seed, uint128 amount) external within(seed) {
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        uint256 had = uint256(account.paid) + account.pending + account.voided;
        if (account.isBarred || account.pending != 0 || ledger.getJob(job).spendable == 0) return;
        redeem(node, uint128(had + 1 + amount % 5_000));
    }

    function released(uint256 seed) external within(seed) {
        ITrainingLedger.Account memory account = ledger.getAccount(job, node);
        if (account.pending == 0 || block.timestamp < account.releaseAt) return;
        ledger.releaseVoucher(job, node);
    }

    function isVoidable(uint32 epoch) private view returns (bool) {
        uint32 closedAt = ledger.getEpoch(job, epoch).closedAt;
        ITrainingLedger.ShareState state = ledger.getContribution(job, epoch, node).state;
        bool isTaken = state == ITrainingLedger.ShareState.DUE || state == ITrainingLedger.ShareState.PAID;
        return isTaken && closedAt != 0 && block.timestamp < closedAt + WINDOW;
    }

    function voided(uint256 seed, uint16 penalty) external within(seed) {
        uint32 epoch = epochAt();
        for (uint256 tries = 0; !isVoidable(epoch); ++tries) {
            if (tries == EPOCHS) return;
            epoch = (epoch + 1) % EPOCHS;
        }
        uint256 before = token.balanceOf(TREASURY) + ledger.creditOf(TREASURY);
        void(epoch, node, penalty);
        penalties[node] += token.balanceOf(TREASURY) + ledger.creditOf(TREASURY) - before;
    }

    function barred(uint256 seed) external within(seed) {
        if (dice >> 252 == 0) bar(node);
    }

    function staked(uint256 seed, uint16 amount) external within(seed) {
        if (isPaused() || WrongToken(address(token)).victim() == node) return;
        token.mint(node, amount);
        minted[node] += amount;
        vm.prank(node);
        ledger.stake(amount);
    }

    function unstaked(uint256 seed, uint16 amount) external within(seed) {
        (uint256 held, uint256 locked,,) = ledger.stakeOf(node);
        vm.prank(node);
        ledger.unstake(amount % (held - locked + 1));
    }

    function withdrawn(uint256 seed) external within(seed) {
        (,, uint256 unbonding, uint256 releaseAt) = ledger.stakeOf(node);
        if (unbonding == 0 || block.timestamp < releaseAt) return;
        vm.prank(node);
        ledger.withdrawStake();
    }

    function retired(uint256 seed) external within(seed) {
        uint40 endsAt = ledger.getJob(job).endsAt;
        if (endsAt == 0 || block.timestamp < endsAt || isRetired[job]) return;
        ledger.retireJob(job);
        isRetired[job] = true;
    }

    function raised(uint256 seed, uint32 more) external within(seed) {
        uint96 limit = ledger.getJob(job).terms.spendLimit;
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, limit + 1 + more);
    }

    /// @dev The coordinator adds to its bond, or takes it back once nothing runs on it.
    function bonded(uint16 amount) external {
        (, uint256 running, uint256 releaseAt) = ledger.bondOf(coordinator);
        if (running == 0) {
            if (releaseAt != 0 && block.timestamp < releaseAt) return;
            if (releaseAt != 0) bond = 0;
            vm.prank(coordinator);
            if (releaseAt == 0) ledger.unbond();
            else ledger.withdrawBond();
        } else if (!isPaused()) {
            give(coordinator, amount);
            vm.prank(coordinator);
            ledger.postBond(amount);
            bond += amount;
        }
    }

    /// @dev A stranger names the coordinator, which must hold none of its bond.
    function trespassed(bytes32 salt) external {
        vm.prank(STRANGER);
        try ledger.openJob(salt, terms(), 0) {
            assert(false);
        } catch {}
    }

    function equivocated(uint256 seed) external within(seed) {
        if (bond == 0) return;
        ITrainingLedger.Receipt memory one = receipt(node, 0);
        ITrainingLedger.Receipt memory another = receipt(node, 0);
        another.samples = one.samples + 1;
        (bytes memory first, bytes memory second) = (countersigned(one), countersigned(another));
        uint256 had = token.balanceOf(STRANGER);
        vm.prank(STRANGER);
        assert(ledger.proveEquivocation(one, first, another, second) == bond);
        assert(token.balanceOf(STRANGER) == had + bond / 10);
        bond = 0;
    }
}
