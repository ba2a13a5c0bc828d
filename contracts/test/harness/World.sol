// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {IDisputes} from "../../interfaces/IDisputes.sol";
import {IMerkleLedger} from "../../interfaces/IMerkleLedger.sol";
import {ISettlement} from "../../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {TypedData} from "../../libraries/TypedData.sol";
import {LedgerOptions} from "../../ledger/Roles.sol";
import {Cheats} from "./Vm.sol";

interface IMintable is IERC20 {
    function mint(address to, uint256 amount) external;
}

/// @dev What comes with OpenZeppelin's contracts.
interface IStandards {
    function eip712Domain()
        external
        view
        returns (bytes1, string memory, string memory, uint256, address, bytes32, uint256[] memory);
    function paused() external view returns (bool);
}

/// @dev A ledger with one job, two nodes and three arbiters, two of whom decide.
abstract contract World is Cheats {
    using TypedData for ITrainingLedger.Receipt;
    using TypedData for ITrainingLedger.Voucher;
    using TypedData for IDisputes.Verdict;
    using TypedData for IDisputes.VoucherVerdict;

    uint32 internal constant WINDOW = 1 hours;
    uint32 internal constant UNBONDING = 3 hours;
    uint32 internal constant NOTICE = UNBONDING + WINDOW;
    uint96 internal constant BOND = 5_000;
    uint96 internal constant ESCROW = 1_000_000;
    uint128 internal constant PRICE = 700;
    uint96 internal constant LIMIT = 400_000;
    bytes32 internal constant SALT = "job";
    address internal constant TREASURY = address(0x7EA5);
    address internal constant GUARDIAN = address(0x6A2D);
    address internal constant OWNER = address(0x0E);
    address internal constant STRANGER = address(0x57A);
    uint256 internal constant COORDINATOR_KEY = 0xC0;
    uint256 internal constant NODE_KEY = 0xA1;
    uint256 internal constant OTHER_KEY = 0xA2;

    address internal coordinator = vm.addr(COORDINATOR_KEY);
    address internal node = vm.addr(NODE_KEY);
    address internal other = vm.addr(OTHER_KEY);
    uint256[3] internal arbiterKeys = [uint256(0xE1), 0xE2, 0xE3];
    IMintable internal token;
    ITrainingLedger internal ledger;
    bytes32 internal job;

    function setUp() public virtual {
        vm.warp(1_000_000_000);
        for (uint256 i = 0; i < 3; ++i) {
            for (uint256 j = i + 1; j < 3; ++j) {
                if (vm.addr(arbiterKeys[j]) < vm.addr(arbiterKeys[i])) {
                    (arbiterKeys[i], arbiterKeys[j]) = (arbiterKeys[j], arbiterKeys[i]);
                }
            }
        }
        token = IMintable(deployed("TestToken", ""));
        ledger = ITrainingLedger(deployed("TrainingLedger", abi.encode(options())));
        give(coordinator, BOND);
        vm.prank(coordinator);
        ledger.postBond(BOND);
        vm.prank(coordinator);
        ledger.allowOwner(OWNER, true);
        give(OWNER, ESCROW);
        vm.prank(OWNER);
        job = ledger.openJob(SALT, terms(), ESCROW);
    }

    /// @dev The other ledger, with the same job in it.
    function merkleLedger() internal returns (IMerkleLedger merkle) {
        merkle = IMerkleLedger(deployed("MerkleLedger", abi.encode(options())));
        token.mint(coordinator, BOND);
        vm.prank(coordinator);
        token.approve(address(merkle), BOND);
        vm.prank(coordinator);
        merkle.postBond(BOND);
        vm.prank(coordinator);
        merkle.allowOwner(OWNER, true);
        token.mint(OWNER, ESCROW);
        vm.prank(OWNER);
        token.approve(address(merkle), ESCROW);
        vm.prank(OWNER);
        merkle.openJob(SALT, terms(), ESCROW);
    }

    function leafOf(IMerkleLedger merkle, address account, uint96 cumulative) internal view returns (bytes32) {
        return keccak256(
            bytes.concat(keccak256(abi.encode(block.chainid, address(merkle), job, account, cumulative)))
        );
    }

    function options() internal view returns (LedgerOptions memory) {
        address[] memory arbiters = new address[](3);
        for (uint256 i = 0; i < 3; ++i) {
            arbiters[i] = vm.addr(arbiterKeys[i]);
        }
        return LedgerOptions({
            token: token,
            window: WINDOW,
            unbonding: UNBONDING,
            minimumBond: BOND,
            quorum: 2,
            treasury: TREASURY,
            guardian: GUARDIAN,
            arbiters: arbiters
        });
    }

    function terms() internal view returns (ISettlement.JobTerms memory) {
        return ISettlement.JobTerms({
            coordinator: coordinator,
            model: "model",
            dataset: "dataset",
            epochs: 9,
            unitPrice: PRICE,
            guaranteedBps: 1_000,
            spendLimit: LIMIT
        });
    }

    /// @dev Mint to an account, approved for the ledger.
    function give(address account, uint256 amount) internal {
        token.mint(account, amount);
        vm.prank(account);
        token.approve(address(ledger), type(uint256).max);
    }

    function register(address account, uint256 amount) internal {
        give(account, amount);
        vm.prank(account);
        ledger.registerNode("meta", amount);
    }

    function totals(address account, uint48 first, uint32 receipts, uint64 samples, uint80 score)
        internal
        pure
        returns (ITrainingLedger.NodeTotals[] memory one)
    {
        one = new ITrainingLedger.NodeTotals[](1);
        one[0] = ITrainingLedger.NodeTotals(account, first, receipts, samples, score);
    }

    /// @dev Record a batch for one node, from where it stands; `score` in units that cost one price each.
    function work(uint32 epoch, address account, uint256 score) internal {
        uint48 first = ledger.getAccount(job, account).counted;
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        // forge-lint: disable-next-line(unsafe-typecast)
        ledger.submitAggregate(job, epoch, seq, "root", totals(account, first, 10, uint64(score * 100), uint80(score * 1e6)));
    }

    function close(uint32 epoch) internal returns (uint256) {
        vm.prank(coordinator);
        return ledger.closeEpoch(job, epoch);
    }

    function pay(uint32 epoch, address account) internal returns (uint256) {
        return ledger.distributePayments(job, epoch, only(account));
    }

    function only(address account) internal pure returns (address[] memory one) {
        one = new address[](1);
        one[0] = account;
    }

    function only(uint256 amount) internal pure returns (uint256[] memory one) {
        one = new uint256[](1);
        one[0] = amount;
    }

    function pair(address one, address another) internal pure returns (address[] memory two) {
        two = new address[](2);
        (two[0], two[1]) = one < another ? (one, another) : (another, one);
    }

    function digestOf(bytes32 structHash) internal view returns (bytes32) {
        return keccak256(abi.encodePacked(hex"1901", domain(address(ledger)), structHash));
    }

    function domain(address contract_) internal view returns (bytes32) {
        bytes32 kind =
            keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
        return keccak256(abi.encode(kind, keccak256("HyperGPU"), keccak256("1"), block.chainid, contract_));
    }

    function receipt(address account, uint64 sequence) internal view returns (ITrainingLedger.Receipt memory) {
        return ITrainingLedger.Receipt({
            job: job,
            epoch: 0,
            round: 7,
            node: account,
            sequence: sequence,
            contribution: keccak256(abi.encode("contribution", account, sequence)),
            samples: 1_000,
            qualityBps: 9_000,
            evaluator: "evaluator"
        });
    }

    function countersigned(ITrainingLedger.Receipt memory made) internal view returns (bytes memory) {
        return signature(COORDINATOR_KEY, digestOf(this.hashOf(made)));
    }

    function force(ITrainingLedger.Receipt memory made, uint256 key, uint32 epoch) internal {
        bytes memory own = signature(key, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        ledger.submitContribution(made, own, counter, epoch);
    }

    function voucher(address account, uint128 amount) internal view returns (ITrainingLedger.Voucher memory) {
        return ITrainingLedger.Voucher({job: job, node: account, sequence: 1, amount: amount});
    }

    function redeem(address account, uint128 amount) internal returns (uint256) {
        ITrainingLedger.Voucher memory made = voucher(account, amount);
        bytes memory counter = signature(COORDINATOR_KEY, digestOf(this.hashOf(made)));
        vm.prank(account);
        return ledger.redeemVoucher(made, counter);
    }

    function verdict(uint32 epoch, address account, uint128 penalty)
        internal
        view
        returns (IDisputes.Verdict memory)
    {
        return IDisputes.Verdict({job: job, epoch: epoch, node: account, penalty: penalty, evidence: "why"});
    }

    /// @dev The signatures of the first `count` arbiters, ascending.
    function quorum(bytes32 structHash, uint256 count) internal view returns (bytes[] memory signatures) {
        signatures = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            signatures[i] = signature(arbiterKeys[i], digestOf(structHash));
        }
    }

    function void(uint32 epoch, address account, uint128 penalty) internal {
        IDisputes.Verdict memory made = verdict(epoch, account, penalty);
        ledger.voidContribution(made, quorum(this.hashOf(made), 2));
    }

    function bar(address account) internal {
        IDisputes.VoucherVerdict memory made = IDisputes.VoucherVerdict({job: job, node: account, evidence: "why"});
        ledger.voidVoucher(made, quorum(this.hashOf(made), 2));
    }

    // The library takes call data, so structs in memory go through a call.

    function hashOf(ITrainingLedger.Receipt calldata made) external pure returns (bytes32) {
        return made.hash();
    }

    function hashOf(ITrainingLedger.Voucher calldata made) external pure returns (bytes32) {
        return made.hash();
    }

    function hashOf(IDisputes.Verdict calldata made) external pure returns (bytes32) {
        return made.hash();
    }

    function hashOf(IDisputes.VoucherVerdict calldata made) external pure returns (bytes32) {
        return made.hash();
    }
}
