// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IMerkleLedger} from "../interfaces/IMerkleLedger.sol";
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
    uint256 private constant GAS_BY_SUMS = 70;
    uint256 private constant GAS_IN_CALL_DATA = 1_100;
    address[] private _nodes;

    function setUp() public override {
        super.setUp();
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, type(uint96).max);
        for (uint256 i = 0; i < NODES; ++i) {
            address account = vm.addr(0xB000 + i);
            _nodes.push(account);
            register(account, 900_000);
            token.mint(account, 1);
        }
        epochOf(0, 100);
    }

    function batch(uint32 receipts) private view returns (ITrainingLedger.NodeTotals[] memory made) {
        made = new ITrainingLedger.NodeTotals[](NODES);
        for (uint256 i = 0; i < NODES; ++i) {
            uint48 first = ledger.getAccount(job, _nodes[i]).counted;
            made[i] = ITrainingLedger.NodeTotals(_nodes[i], first, receipts, uint64(receipts) * 32, uint80(receipts) * 280_000);
        }
    }

    function submit(uint32 epoch, uint32 receipts) private {
        ITrainingLedger.NodeTotals[] memory made = batch(receipts);
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, keccak256("root"), made);
    }

    function packed(uint256 receipts) private view returns (bytes memory made) {
        for (uint256 i = 0; i < NODES; ++i) {
            uint48 first = ledger.getAccount(job, _nodes[i]).counted;
            made = bytes.concat(made, abi.encodePacked(_nodes[i], first, uint16(receipts)));
            for (uint256 j = 0; j < receipts; ++j) {
                bytes6 digest = bytes6(keccak256(abi.encode(i, j)));
                made = bytes.concat(made, abi.encodePacked(uint32(1_000 + j), uint32(3_200 + j), uint16(8_750 + j), digest));
            }
        }
    }

    function submitPacked(uint32 epoch, uint256 receipts) private {
        bytes memory made = packed(receipts);
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitContributions(job, epoch, seq, keccak256("root"), made);
    }

    function epochOf(uint32 epoch, uint32 receipts) private {
        submit(epoch, receipts);
        close(epoch);
        ledger.distributePayments(job, epoch, _nodes);
    }

    function test_gas_of_10000_receipts_of_10_nodes_by_their_sums() public {
        uint256 gas = recordedBySums(1);
        vm.assertLe(gas + closedAndPaid(1), GAS_BY_SUMS * 10_000, "recorded and paid after the window");
    }

    function test_gas_of_the_same_paid_against_stake() public {
        uint256 gas = recordedBySums(1);
        gas += closed(1);
        ledger.distributePayments(job, 1, _nodes);
        gas += vm.snapshotGasLastCall("ledger", "pay 10 nodes against stake");
        for (uint256 i = 0; i < NODES; ++i) {
            assert(ledger.getContribution(job, 1, _nodes[i]).state == ITrainingLedger.ShareState.PAID);
        }
        vm.assertLe(gas, GAS_BY_SUMS * 10_000, "recorded and paid against stake");
    }

    function test_gas_of_1000_receipts_of_10_nodes_in_the_call_data() public {
        submitPacked(1, 100);
        uint256 gas = vm.snapshotGasLastCall("ledger", "packed: 1,000 receipts, 10 nodes");
        vm.assertLe(gas + closedAndPaid(1), GAS_IN_CALL_DATA * 1_000, "recorded and paid");
    }

    function recordedBySums(uint32 epoch) private returns (uint256) {
        submit(epoch, 1_000);
        return vm.snapshotGasLastCall("ledger", "aggregate: first batch of an epoch, 10 nodes");
    }

    function closed(uint32 epoch) private returns (uint256) {
        close(epoch);
        return vm.snapshotGasLastCall("ledger", "close an epoch");
    }

    function closedAndPaid(uint32 epoch) private returns (uint256 gas) {
        gas = closed(epoch);
        vm.warp(block.timestamp + WINDOW);
        ledger.distributePayments(job, epoch, _nodes);
        gas += vm.snapshotGasLastCall("ledger", "pay 10 nodes after the window");
    }

    function test_gas_of_a_second_batch() public {
        submit(1, 1_000);
        submit(1, 1_000);
        vm.snapshotGasLastCall("ledger", "aggregate: later batch of an epoch, 10 nodes");
    }

    function test_gas_of_what_is_done_once() public {
        give(OWNER, ESCROW);
        vm.prank(OWNER);
        ledger.openJob("another", terms(), ESCROW);
        vm.snapshotGasLastCall("ledger", "open a job");
        give(other, PRICE);
        vm.prank(other);
        ledger.registerNode("meta", PRICE);
        vm.snapshotGasLastCall("ledger", "register a node with stake");
        force(receipt(node, 0), NODE_KEY, 1);
        vm.snapshotGasLastCall("ledger", "force a receipt in, the node's first");
        force(receipt(node, 1), NODE_KEY, 1);
        vm.snapshotGasLastCall("ledger", "force a receipt in, its second");
        redeem(node, 1_000);
        vm.snapshotGasLastCall("ledger", "redeem a voucher");
        close(1);
        void(1, node, 0);
        vm.snapshotGasLastCall("ledger", "void a share");
        ledger.sweepDust(job, 1, only(node));
        vm.snapshotGasLastCall("ledger", "sweep the dust of one node");
    }

    function test_gas_of_merkle_roots() public {
        IMerkleLedger merkle = merkleLedger();
        vm.prank(coordinator);
        merkle.postRoot(job, 0, "zero", 10);
        bytes32 leaf = leafOf(merkle, _nodes[0], 300);
        vm.prank(coordinator);
        merkle.postRoot(job, 1, leaf, 310);
        vm.snapshotGasLastCall("merkle", "post a root");
        vm.warp(block.timestamp + WINDOW);
        merkle.claim(job, 1, leaf, _nodes[0], 300, new bytes32[](0));
        vm.snapshotGasLastCall("merkle", "claim for the first time, no proof");
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
