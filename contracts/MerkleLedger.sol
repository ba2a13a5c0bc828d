// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";
import {IMerkleLedger} from "./interfaces/IMerkleLedger.sol";
import {TypedData} from "./libraries/TypedData.sol";
import {JobEscrow} from "./ledger/JobEscrow.sol";
import {LedgerOptions, Roles} from "./ledger/Roles.sol";

/// @title Settlement by cumulative claims. `IMerkleLedger` is the manual.
contract MerkleLedger is JobEscrow, IMerkleLedger {
    mapping(bytes32 job => Root[]) private _roots;
    mapping(bytes32 job => mapping(address node => uint96)) private _claimed;
    /// @dev What a job has reserved for claims and not paid. A root whose leaves add up to more than its total can empty its
    /// own job's and no other's.
    mapping(bytes32 job => uint96) private _unclaimed;

    constructor(LedgerOptions memory options) Roles(options) {}

    function postRoot(bytes32 job, uint32 seq, bytes32 root, uint96 total)
        external
        whenNotPaused
        returns (uint32 index)
    {
        _takeSequence(job, seq);
        Root[] storage roots = _roots[job];
        // forge-lint: disable-next-line(unsafe-typecast)
        index = uint32(roots.length); // No longer than `seq`, which has 32 bits.
        uint96 last = _lastTotal(roots);
        if (total < last) revert TotalFell(last, total);
        uint40 activeAt = _after(CHALLENGE_WINDOW);
        roots.push(Root({root: root, total: total, activeAt: activeAt}));
        _unclaimed[job] += total - last;
        _reserve(job, total - last);
        emit RootPosted(job, index, seq, root, total, activeAt);
    }

    function disableRoot(bytes32 job, uint32 index, bytes32 root, bytes32 evidence, bytes[] calldata signatures)
        external
    {
        Root memory bad = _standing(job, index, root);
        _requireQuorum(TypedData.hashRoot(job, index, root, bad.total, evidence), signatures);
        if (block.timestamp >= bad.activeAt) revert RootIsActive(bad.activeAt);
        Root[] storage roots = _roots[job];
        uint96 before = _lastTotal(roots);
        while (roots.length > index) roots.pop();
        uint96 returned = before - _lastTotal(roots);
        uint96 left = _unclaimed[job];
        if (returned > left) returned = left; // An active root has paid out of what these had reserved.
        _unclaimed[job] = left - returned;
        _release(job, returned);
        emit RootDisabled(job, index, root, returned, evidence);
    }

    function claim(bytes32 job, uint32 index, bytes32 root, address node, uint96 cumulative, bytes32[] calldata proof)
        external
        nonReentrant
        returns (uint256 amount)
    {
        _requireReached(_standing(job, index, root).activeAt);
        if (!MerkleProof.verifyCalldata(proof, root, _leaf(job, node, cumulative))) revert BadProof();
        return _pay(job, node, cumulative);
    }

    function claimMany(
        bytes32 job,
        uint32 index,
        bytes32 root,
        address[] calldata nodes,
        uint96[] calldata cumulatives,
        bytes32[] calldata proof,
        bool[] calldata proofFlags
    ) external nonReentrant returns (uint256 total) {
        if (nodes.length != cumulatives.length) revert LengthsDiffer();
        _requireReached(_standing(job, index, root).activeAt);
        bytes32[] memory leaves = new bytes32[](nodes.length);
        for (uint256 i = 0; i < nodes.length; ++i) {
            leaves[i] = _leaf(job, nodes[i], cumulatives[i]);
        }
        if (!MerkleProof.multiProofVerifyCalldata(proof, proofFlags, root, leaves)) revert BadProof();
        for (uint256 i = 0; i < nodes.length; ++i) {
            total += _pay(job, nodes[i], cumulatives[i]);
        }
    }

    function rootCount(bytes32 job) external view returns (uint256) {
        return _roots[job].length;
    }

    function getRoot(bytes32 job, uint32 index) external view returns (Root memory) {
        if (index >= _roots[job].length) revert UnknownRoot(index);
        return _roots[job][index];
    }

    function claimedOf(bytes32 job, address node) external view returns (uint256) {
        return _claimed[job][node];
    }

    function _pay(bytes32 job, address node, uint96 cumulative) private returns (uint256) {
        uint96 claimed = _claimed[job][node];
        if (cumulative <= claimed) return 0;
        uint96 amount = cumulative - claimed;
        uint96 left = _unclaimed[job];
        if (amount > left) revert RootOverdrawn(left, amount);
        _unclaimed[job] = left - amount;
        _claimed[job][node] = cumulative;
        emit Claimed(job, node, amount, cumulative);
        _push(node, amount);
        return amount;
    }

    function _standing(bytes32 job, uint32 index, bytes32 root) private view returns (Root memory standing) {
        if (index >= _roots[job].length) revert UnknownRoot(index);
        standing = _roots[job][index];
        if (standing.root != root) revert UnknownRoot(index);
    }

    function _lastTotal(Root[] storage roots) private view returns (uint96) {
        return roots.length == 0 ? 0 : roots[roots.length - 1].total;
    }

    function _leaf(bytes32 job, address node, uint96 cumulative) private view returns (bytes32) {
        return keccak256(bytes.concat(keccak256(abi.encode(block.chainid, address(this), job, node, cumulative))));
    }
}
