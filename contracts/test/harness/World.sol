// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {ITrainingLedger} from "../../interfaces/ITrainingLedger.sol";
import {LedgerOptions} from "../../ledger/Roles.sol";
import {Cheats} from "./Vm.sol";

interface IMintable is IERC20 {
    function mint(address to, uint256 amount) external;
}

/// @dev A ledger with one job, two nodes and three arbiters, two of whom decide. Work is counted in points: one point is
/// a score of 1,000,000 and costs one price.
abstract contract World is Cheats {
    uint32 internal constant WINDOW = 1 hours;
    uint32 internal constant UNBONDING = 3 hours;
    uint32 internal constant NOTICE = UNBONDING + WINDOW;
    uint96 internal constant ESCROW = 1_000_000;
    uint128 internal constant PRICE = 700;
    uint64 internal constant POINT = 1_000_000;
    bytes32 internal constant SALT = "job";
    address internal constant TREASURY = address(0x7EA5);
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
        found(deployed("TestToken", ""));
    }

    /// @dev Deploy a ledger over a token, and open the job on it.
    function found(address token_) internal {
        token = IMintable(token_);
        ledger = ITrainingLedger(deployed("TrainingLedger", abi.encode(options())));
        job = open(SALT, ESCROW);
    }

    function open(bytes32 salt, uint96 escrow) internal returns (bytes32) {
        give(OWNER, escrow);
        vm.prank(OWNER);
        return ledger.openJob(salt, terms(), escrow);
    }

    function options() internal view returns (LedgerOptions memory) {
        address[] memory arbiters = new address[](3);
        for (uint256 i = 0; i < 3; ++i) {
            arbiters[i] = vm.addr(arbiterKeys[i]);
        }
        return LedgerOptions(token, WINDOW, UNBONDING, 2, TREASURY, arbiters);
    }

    function terms() internal view returns (ITrainingLedger.JobTerms memory) {
        return ITrainingLedger.JobTerms(coordinator, "model", "dataset", PRICE, 9);
    }

    function meta() internal pure returns (ITrainingLedger.NodeMeta memory) {
        return ITrainingLedger.NodeMeta("capabilities", "cuda", 8_192);
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
        ledger.registerNode(meta(), amount);
    }

    function entry(address account, uint32 counted, uint64 score) internal pure returns (bytes32) {
        return bytes32(abi.encodePacked(account, counted, score));
    }

    function batch(uint32 epoch, bytes32[] memory entries) internal {
        uint32 seq = ledger.getJob(job).nextSeq;
        vm.prank(coordinator);
        ledger.submitAggregate(job, epoch, seq, "root", entries);
    }

    /// @dev Record a batch that brings a node to `counted` receipts and `score`.
    function record(uint32 epoch, address account, uint32 counted, uint64 score) internal {
        bytes32[] memory one = new bytes32[](1);
        one[0] = entry(account, counted, score);
        batch(epoch, one);
    }

    /// @dev Record a batch with one receipt more, and so many points more.
    function work(uint32 epoch, address account, uint64 points) internal {
        ITrainingLedger.Account memory now_ = ledger.getAccount(job, account);
        record(epoch, account, now_.counted + 1, now_.score + points * POINT);
    }

    function close(uint32 epoch) internal {
        vm.prank(coordinator);
        ledger.closeEpoch(job, epoch);
    }

    function pay(uint32 epoch, address account) internal returns (uint256) {
        return ledger.distributePayments(job, epoch, only(account));
    }

    function only(address account) internal pure returns (address[] memory one) {
        one = new address[](1);
        one[0] = account;
    }

    function pair(address one, address another) internal pure returns (address[] memory two) {
        two = new address[](2);
        (two[0], two[1]) = (one, another);
    }

    function digestOf(bytes32 structHash) internal view returns (bytes32) {
        bytes32 kind = keccak256("EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)");
        bytes32 domain =
            keccak256(abi.encode(kind, keccak256("HyperGPU"), keccak256("2"), block.chainid, address(ledger)));
        return keccak256(abi.encodePacked(hex"1901", domain, structHash));
    }

    /// @dev A receipt that brings a node to `sequence + 1` receipts and `score`.
    function receipt(address account, uint64 sequence, uint64 score)
        internal
        view
        returns (ITrainingLedger.Receipt memory)
    {
        bytes32 contribution = keccak256(abi.encode("contribution", account, sequence));
        return ITrainingLedger.Receipt(job, 0, 7, account, sequence, contribution, 1_000, 9_000, "evaluator", score);
    }

    function countersigned(ITrainingLedger.Receipt memory made) internal view returns (bytes memory) {
        bytes32 kind = keccak256(
            "Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,bytes32 contribution,"
            "uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
        );
        return signature(COORDINATOR_KEY, digestOf(keccak256(abi.encode(kind, made))));
    }

    function force(ITrainingLedger.Receipt memory made, uint256 key, uint32 epoch) internal {
        bytes memory own = signature(key, digestOf(made.contribution));
        bytes memory counter = countersigned(made);
        ledger.submitContribution(made, own, counter, epoch);
    }

    function verdict(uint32 epoch, address account, uint128 penalty)
        internal
        view
        returns (ITrainingLedger.Verdict memory)
    {
        return ITrainingLedger.Verdict(job, epoch, account, penalty, "why");
    }

    /// @dev The signatures of the first `count` arbiters, ascending.
    function quorum(ITrainingLedger.Verdict memory made, uint256 count)
        internal
        view
        returns (bytes[] memory signatures)
    {
        bytes32 kind = keccak256("Verdict(bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence)");
        signatures = new bytes[](count);
        for (uint256 i = 0; i < count; ++i) {
            signatures[i] = signature(arbiterKeys[i], digestOf(keccak256(abi.encode(kind, made))));
        }
    }

    function void(uint32 epoch, address account, uint128 penalty) internal {
        ITrainingLedger.Verdict memory made = verdict(epoch, account, penalty);
        ledger.voidContribution(made, quorum(made, 2));
    }

    function stateOf(uint32 epoch, address account) internal view returns (ITrainingLedger.ShareState) {
        return ledger.getContribution(job, epoch, account).state;
    }
}
