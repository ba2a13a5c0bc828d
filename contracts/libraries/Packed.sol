// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {Shares} from "./Shares.sol";

/// @title The bytes of batches.
/// @dev The only assembly of the ledger. Callers check that what is read lies inside the call data, a head by where the
/// receipts after it would end.
library Packed {
    uint256 internal constant HEAD_BYTES = 28;
    uint256 internal constant RECEIPT_BYTES = 16;

    /// @notice One node's head: `address[20] firstSequence[6] receipts[2]`.
    function head(bytes calldata packed, uint256 offset)
        internal
        pure
        returns (address node, uint48 firstSequence, uint256 receipts)
    {
        uint256 word;
        assembly ("memory-safe") {
            word := calldataload(add(packed.offset, offset))
        }
        node = address(uint160(word >> 96));
        firstSequence = uint48(word >> 48);
        receipts = uint16(word >> 32);
    }

    /// @notice Sums over the receipts `round[4] samples[4] qualityBps[2] contribution[6]` in [from, to).
    /// @dev At most 65,535 receipts of 32 and 14 bits: the sums do not overflow.
    function sums(bytes calldata packed, uint256 from, uint256 to) internal pure returns (uint64 samples, uint80 score) {
        uint256 highest;
        assembly ("memory-safe") {
            let end := add(packed.offset, to)
            for { let at := add(packed.offset, from) } lt(at, end) { at := add(at, RECEIPT_BYTES) } {
                let word := calldataload(at)
                let checked := and(shr(192, word), 0xffffffff)
                let qualityBps := and(shr(176, word), 0xffff)
                samples := add(samples, checked)
                score := add(score, mul(checked, qualityBps))
                if gt(qualityBps, highest) { highest := qualityBps }
            }
        }
        if (highest > Shares.FULL_QUALITY_BPS) revert ITrainingLedger.QualityOutOfRange(highest);
    }

    /// @notice keccak256 of the totals' words, five a node, as they lie in the call data.
    function hashOfWords(ITrainingLedger.NodeTotals[] calldata totals) internal pure returns (bytes32 digest) {
        uint256 size = totals.length * 160;
        assembly ("memory-safe") {
            let free := mload(0x40)
            calldatacopy(free, totals.offset, size)
            digest := keccak256(free, size)
        }
    }
}
