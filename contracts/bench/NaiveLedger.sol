// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @title How most of it is done elsewhere: one transaction a contribution and all of it in storage. The benchmark's reference.
contract NaiveLedger {
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

    struct Totals {
        uint256 contributions;
        uint256 score;
    }

    mapping(bytes32 digest => bool) public isRecorded;
    mapping(bytes32 job => Contribution[]) private _contributions;
    mapping(address node => Totals) public lifetimeOf;
    mapping(bytes32 job => mapping(uint32 epoch => mapping(address node => Totals))) public totalsOf;

    event Recorded(bytes32 indexed job, uint32 indexed epoch, address indexed node, bytes32 digest, uint256 score);

    error AlreadyRecorded(bytes32 digest);

    /// @notice Record one contribution.
    function submitContribution(bytes32 job, uint32 epoch, Contribution calldata contribution) external {
        bytes32 digest = keccak256(abi.encode(job, epoch, contribution));
        if (isRecorded[digest]) revert AlreadyRecorded(digest);
        isRecorded[digest] = true;
        _contributions[job].push(contribution);
        uint256 score = uint256(contribution.samples) * contribution.qualityBps;
        Totals storage ofEpoch = totalsOf[job][epoch][contribution.node];
        ofEpoch.contributions += 1;
        ofEpoch.score += score;
        Totals storage lifetime = lifetimeOf[contribution.node];
        lifetime.contributions += 1;
        lifetime.score += score;
        emit Recorded(job, epoch, contribution.node, digest, score);
    }
}
