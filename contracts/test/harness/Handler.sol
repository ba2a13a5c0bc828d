// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {WrongToken} from "./Tokens.sol";
import {IMintable, World} from "./World.sol";

/// @dev Everything that can happen to a ledger, drawn at random and never reverting: two jobs, three nodes and six epochs, under
/// a token that refuses one of them now and then. Beside the ledger it keeps a model of what must come of each call.
contract Handler is World {
    uint256 public constant JOBS = 2;
    uint256 public constant NODES = 3;
    uint32 public constant EPOCHS = 6;
    /// @dev An escrow that the nodes' work soon exceeds.
    uint96 private constant SHORT = 20_000;

    /// @dev What the model knows of a node in a job. `work` is what the node did by its own count, whatever was recorded.
    struct Model {
        uint32 counted;
        uint64 score;
        uint256 earned;
        uint32 workCounted;
        uint64 workScore;
    }

    bytes32[2] public jobs;
    address[3] public nodes;
    uint256[3] private _keys = [NODE_KEY, OTHER_KEY, 0xA3];
    mapping(bytes32 job => mapping(address node => Model)) private _models;
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => ITrainingLedger.Share))) private _shares;
    mapping(bytes32 job => uint256) public free;
    /// @dev What a node brought and was paid, less what was taken from it: in its wallet, its stake or its credit.
    mapping(address node => uint256) public owned;
    uint256 public penalties;
    uint256 public reclaimed;
    uint256 private _dice;

    function start() external {
        setUp();
        found(address(new WrongToken()));
        jobs = [open("first", SHORT), open("second", SHORT)];
        for (uint256 i = 0; i < NODES; ++i) {
            nodes[i] = vm.addr(_keys[i]);
            register(nodes[i], 0);
        }
        for (uint256 i = 0; i < JOBS; ++i) {
            free[jobs[i]] = SHORT;
        }
    }

    function books() external view returns (ITrainingLedger, IMintable) {
        return (ledger, token);
    }

    function model(bytes32 job_, address node_) external view returns (Model memory) {
        return _models[job_][node_];
    }

    function share(bytes32 job_, uint32 epoch, address node_) external view returns (ITrainingLedger.Share memory) {
        return _shares[job_][epoch][node_];
    }

    /// @dev Forge draws small numbers more often than others: as dice they are spread out.
    modifier within(uint256 seed) {
        _dice = uint256(keccak256(abi.encode(seed)));
        job = jobs[_dice % JOBS];
        node = nodes[(_dice >> 8) % NODES];
        _;
    }

    function drawnEpoch() private view returns (uint32) {
        return uint32((_dice >> 16) % EPOCHS);
    }

    function isOpen(uint32 epoch) private view returns (bool) {
        return ledger.getEpoch(job, epoch).closedAt == 0;
    }

    /// @dev The epoch that takes what is recorded for another one; `EPOCHS` where none of those drawn is open.
    function firstOpen(uint32 epoch) private view returns (uint32) {
        while (epoch < EPOCHS && !isOpen(epoch)) ++epoch;
        return epoch;
    }

    function isOver() private view returns (bool) {
        uint40 endsAt = ledger.getJob(job).endsAt;
        return endsAt != 0 && block.timestamp >= endsAt - WINDOW;
    }

    /// @dev The node does work, of which neither batch nor receipt need tell at once.
    function train(uint256 seed) external within(seed) {
        Model storage known = _models[job][node];
        known.workCounted += 1;
        known.workScore += uint64((_dice >> 24) % (12 * POINT));
    }

    /// @dev What recording totals must do, told without the ledger.
    function expect(uint32 epoch, address node_, uint32 counted, uint64 score) private {
        Model storage known = _models[job][node_];
        if (counted > known.counted) known.counted = counted;
        if (score > known.score) known.score = score;
        uint256 owed = uint256(PRICE) * known.score / POINT - known.earned;
        if (owed > free[job]) owed = free[job];
        if (owed == 0) return;
        known.earned += owed;
        free[job] -= owed;
        ITrainingLedger.Share storage held = _shares[job][epoch][node_];
        held.amount += uint96(owed);
        held.state = ITrainingLedger.ShareState.DUE;
    }

    /// @dev A batch of all nodes, of totals that are older, mixed, short or true.
    function aggregate(uint256 seed) external within(seed) {
        uint32 epoch = drawnEpoch();
        uint32 taker = firstOpen(epoch);
        if (isOver() || taker == EPOCHS) return;
        bytes32[] memory entries = new bytes32[](NODES);
        for (uint256 i = 0; i < NODES; ++i) {
            Model memory known = _models[job][nodes[i]];
            uint256 die = _dice >> (32 + i * 16);
            uint32 counted = known.workCounted - (die & 3 == 0 ? known.workCounted / 2 : 0);
            uint64 score = known.workScore - (die & 12 == 0 ? known.workScore / 2 : 0);
            entries[i] = entry(nodes[i], counted, score);
            expect(taker, nodes[i], counted, score);
        }
        batch(epoch, entries);
    }

    /// @dev The newest receipt of a node, forced in: with it everything is recorded.
    function forceNewest(uint256 seed) external within(seed) {
        uint32 epoch = drawnEpoch();
        uint32 taker = firstOpen(epoch);
        Model memory known = _models[job][node];
        uint256 owed = uint256(PRICE) * known.workScore / POINT - known.earned;
        bool isNew = known.workCounted > known.counted || known.workScore > known.score || (owed != 0 && free[job] != 0);
        if (isOver() || taker == EPOCHS || !isNew || known.workCounted == 0) return;
        ITrainingLedger.Receipt memory made = receipt(node, known.workCounted - 1, known.workScore);
        // A late one where it can be: the epoch before is closed.
        made.epoch = epoch != 0 && !isOpen(epoch - 1) ? epoch - 1 : epoch;
        uint256 had = free[job];
        expect(taker, node, known.workCounted, known.workScore);
        assert(had - free[job] == (owed < had ? owed : had));
        force(made, _keys[(_dice >> 8) % NODES], epoch);
    }

    function closeOne(uint256 seed) external within(seed) {
        uint32 epoch = drawnEpoch();
        uint40 openedAt = ledger.getEpoch(job, epoch).openedAt;
        if (!isOpen(epoch)) return;
        bool isAnyones = openedAt != 0 && (isOver() || block.timestamp >= openedAt + UNBONDING);
        vm.prank(isAnyones ? STRANGER : coordinator);
        ledger.closeEpoch(job, epoch);
    }

    function distribute(uint256 seed) external within(seed) {
        uint32 epoch = drawnEpoch();
        bool wasOpen = isOpen(epoch);
        if (wasOpen && _dice >> 254 != 0) return;
        address[] memory list = new address[](3);
        (list[0], list[1], list[2]) = (node, nodes[_dice % NODES], node);
        uint256 due;
        bool isFinal = !wasOpen && block.timestamp >= ledger.getEpoch(job, epoch).closedAt + WINDOW;
        for (uint256 i = 0; i < 2; ++i) {
            if (i == 1 && list[1] == list[0]) continue;
            ITrainingLedger.Share storage held = _shares[job][epoch][list[i]];
            (uint256 staked, uint256 locked,,) = ledger.stakeOf(list[i]);
            bool isPayable = isFinal || held.amount <= staked - locked;
            if (held.state != ITrainingLedger.ShareState.DUE || !isPayable) continue;
            held.state = ITrainingLedger.ShareState.PAID;
            owned[list[i]] += held.amount;
            due += held.amount;
        }
        vm.prank(wasOpen ? coordinator : STRANGER);
        assert(ledger.distributePayments(job, epoch, list) == due);
    }

    function isVoidable(uint32 epoch) private view returns (bool) {
        uint40 closedAt = ledger.getEpoch(job, epoch).closedAt;
        ITrainingLedger.ShareState state = _shares[job][epoch][node].state;
        bool isThere = state == ITrainingLedger.ShareState.DUE || state == ITrainingLedger.ShareState.PAID;
        return isThere && closedAt != 0 && block.timestamp < closedAt + WINDOW;
    }

    function voidOne(uint256 seed, uint16 penalty) external within(seed) {
        uint32 epoch = drawnEpoch();
        for (uint256 tries = 0; !isVoidable(epoch); ++tries) {
            if (tries == EPOCHS) return;
            epoch = (epoch + 1) % EPOCHS;
        }
        ITrainingLedger.Share storage held = _shares[job][epoch][node];
        (uint256 staked, uint256 locked, uint256 unbonding,) = ledger.stakeOf(node);
        uint256 most = staked - locked + unbonding;
        uint256 taken = penalty < most ? penalty : most;
        if (held.state == ITrainingLedger.ShareState.PAID) owned[node] -= held.amount;
        held.state = ITrainingLedger.ShareState.VOID;
        free[job] += held.amount;
        owned[node] -= taken;
        penalties += taken;
        void(epoch, node, penalty);
    }

    function addStake(uint256 seed, uint16 amount) external within(seed) {
        if (WrongToken(address(token)).victim() == node) return;
        give(node, amount);
        owned[node] += amount;
        vm.prank(node);
        ledger.stake(amount);
    }

    function unstake(uint256 seed, uint16 amount) external within(seed) {
        (uint256 staked, uint256 locked,,) = ledger.stakeOf(node);
        vm.prank(node);
        ledger.unstake(amount % (staked - locked + 1));
    }

    function withdraw(uint256 seed) external within(seed) {
        (,, uint256 unbonding, uint256 releaseAt) = ledger.stakeOf(node);
        if (unbonding != 0 && block.timestamp >= releaseAt) {
            vm.prank(node);
            ledger.withdrawStake();
        }
        if (ledger.creditOf(node) == 0 || WrongToken(address(token)).victim() == node) return;
        vm.prank(node);
        ledger.withdrawCredit(node);
    }

    function refuse(uint256 seed) external within(seed) {
        bool isOff = _dice >> 255 == 0;
        WrongToken.Wrong how = _dice >> 254 & 1 == 0 ? WrongToken.Wrong.REFUSES : WrongToken.Wrong.RETURNS_FALSE;
        WrongToken(address(token)).turn(isOff ? WrongToken.Wrong.NOTHING : how, isOff ? address(0) : node);
    }

    function fund(uint256 seed, uint16 amount) external within(seed) {
        if (isOver()) return;
        give(STRANGER, amount);
        vm.prank(STRANGER);
        ledger.fund(job, amount);
        free[job] += amount;
    }

    /// @dev Announce a job's end, and take back what is free once it has come, again and again.
    function end(uint256 seed) external within(seed) {
        uint40 endsAt = ledger.getJob(job).endsAt;
        if (endsAt == 0 ? _dice >> 253 != 0 : block.timestamp < endsAt) return;
        vm.prank(OWNER);
        if (endsAt == 0) return ledger.requestReclaim(job);
        ledger.reclaim(job);
        reclaimed += free[job];
        free[job] = 0;
    }

    function pass(uint256 seed) external within(seed) {
        uint256 most = _dice % 4 == 0 ? NOTICE : _dice % 4 == 1 ? WINDOW : WINDOW / 4;
        vm.warp(block.timestamp + (_dice >> 16) % most);
    }
}
