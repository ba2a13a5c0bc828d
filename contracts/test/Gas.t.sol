// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {World} from "./harness/World.sol";

interface INaive {
    struct Contribution {
        address node;
        uint64 sequence;
        uint32 round;
        bytes32 shard;
        bytes32 model;
        bytes32 update;
        uint64 samples;
        uint64 computeMs;
        uint16 qualityBps;
    }

    function submitContribution(bytes32 job, uint32 epoch, Contribution calldata contribution) external;
}

/// @dev What transactions cost, kept in `snapshots/`, where any difference fails. Run with `--isolate`, so that each call is a
/// transaction of its own: 21,000, call data and cold storage included. Nodes have been in the job for an epoch and their
/// wallets hold something.
contract GasTest is World {
    uint256 private constant NODES = 10;
    uint256 private constant GAS_A_RECEIPT = 60;
    address[] private _nodes;

    function setUp() public override {
        super.setUp();
        give(OWNER, 1e18);
        vm.prank(OWNER);
        ledger.fund(job, 1e18);
        for (uint256 i = 0; i < NODES; ++i) {
            address account = vm.addr(0xB000 + i);
            _nodes.push(account);
            register(account, 1e15);
            token.mint(account, 1);
        }
        submit(0, 1_000);
        pay(0);
    }

    /// @dev One batch of `receipts` for each node, of 320 samples each.
    function submit(uint32 epoch, uint32 receipts) private {
        bytes32[] memory made = new bytes32[](NODES);
        for (uint256 i = 0; i < NODES; ++i) {
            ITrainingLedger.Account memory now_ = ledger.getAccount(job, _nodes[i]);
            made[i] = entry(_nodes[i], now_.counted + receipts, now_.score + receipts * 2_912_345);
        }
        uint32 seq = ledger.getJob(job).nextSeq;
        bytes32 root = keccak256("root");
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, root, made);
    }

    function pay(uint32 epoch) private {
        vm.prank(coordinator);
        ledger.distributePayments(job, epoch, _nodes);
    }

    function test_gas_of_10000_receipts_of_10_nodes() public {
        submit(1, 1_000);
        uint256 gas = vm.snapshotGasLastCall("ledger", "batch: first of an epoch, 10 nodes");
        pay(1);
        gas += vm.snapshotGasLastCall("ledger", "close an epoch and pay 10 nodes against stake");
        for (uint256 i = 0; i < NODES; ++i) {
            assert(stateOf(1, _nodes[i]) == ITrainingLedger.ShareState.PAID);
        }
        vm.assertLe(gas, GAS_A_RECEIPT * 10_000, "recorded, closed and paid");
    }

    function test_gas_of_later_batches_and_payments() public {
        submit(1, 500);
        submit(1, 500);
        vm.snapshotGasLastCall("ledger", "batch: later of an epoch, 10 nodes");
        close(1);
        vm.snapshotGasLastCall("ledger", "close an epoch");
        vm.warp(block.timestamp + WINDOW);
        ledger.distributePayments(job, 1, _nodes);
        vm.snapshotGasLastCall("ledger", "pay 10 nodes after the window");
    }

    function test_gas_of_single_acts() public {
        open("another", ESCROW);
        vm.snapshotGasLastCall("ledger", "open a job");
        register(node, 5_000);
        vm.snapshotGasLastCall("ledger", "register a node with stake");
        force(receipt(node, 0, POINT), NODE_KEY, 1);
        vm.snapshotGasLastCall("ledger", "force a receipt in: first of a node");
        force(receipt(node, 1, 2 * POINT), NODE_KEY, 1);
        vm.snapshotGasLastCall("ledger", "force a receipt in: second of a node");
        close(1);
        void(1, node, 100);
        vm.snapshotGasLastCall("ledger", "void a share");
    }

    function test_gas_of_the_naive_ledger() public {
        INaive naive = INaive(deployed("NaiveLedger", ""));
        INaive.Contribution memory made =
            INaive.Contribution(node, 0, 1, keccak256("s"), keccak256("m"), keccak256("u"), 3_200, 500, 9_000);
        naive.submitContribution(job, 0, made);
        made.sequence = 1;
        naive.submitContribution(job, 0, made);
        vm.snapshotGasLastCall("naive", "one contribution");
    }
}
