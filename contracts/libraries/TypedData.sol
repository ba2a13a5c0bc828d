// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {IDisputes} from "../interfaces/IDisputes.sol";

/// @title The EIP-712 hashStructs of everything that is signed off chain.
library TypedData {
    bytes32 internal constant RECEIPT = keccak256(
        "Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,bytes32 contribution,"
        "uint64 samples,uint16 qualityBps,bytes32 evaluator)"
    );
    bytes32 internal constant VOUCHER = keccak256("Voucher(bytes32 job,address node,uint64 sequence,uint128 amount)");
    bytes32 internal constant VERDICT =
        keccak256("Verdict(bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence)");
    bytes32 internal constant VOUCHER_VERDICT = keccak256("VoucherVerdict(bytes32 job,address node,bytes32 evidence)");
    bytes32 internal constant ROOT_VERDICT =
        keccak256("RootVerdict(bytes32 job,uint32 index,bytes32 root,uint96 total,bytes32 evidence)");

    // A struct of static fields encodes as its fields, so `abi.encode(type, struct)` is what EIP-712 asks to hash.

    function hash(ITrainingLedger.Receipt calldata receipt) internal pure returns (bytes32) {
        return keccak256(abi.encode(RECEIPT, receipt));
    }

    function hash(ITrainingLedger.Voucher calldata voucher) internal pure returns (bytes32) {
        return keccak256(abi.encode(VOUCHER, voucher));
    }

    function hash(IDisputes.Verdict calldata verdict) internal pure returns (bytes32) {
        return keccak256(abi.encode(VERDICT, verdict));
    }

    function hash(IDisputes.VoucherVerdict calldata verdict) internal pure returns (bytes32) {
        return keccak256(abi.encode(VOUCHER_VERDICT, verdict));
    }

    function hashRoot(bytes32 job, uint32 index, bytes32 root, uint96 total, bytes32 evidence)
        internal
        pure
        returns (bytes32)
    {
        return keccak256(abi.encode(ROOT_VERDICT, job, index, root, total, evidence));
    }
}
