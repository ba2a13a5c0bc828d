// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IBonds} from "../interfaces/IBonds.sol";
import {IOptions} from "../interfaces/IOptions.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";
import {LedgerOptions} from "../ledger/Roles.sol";
import {IStandards, World} from "./harness/World.sol";

/// @dev Deployment, jobs, escrow, bonds, pause.
contract JobsTest is World {
    function tries(LedgerOptions memory chosen) private returns (address) {
        bytes memory code = vm.parseJsonBytes(
            vm.readFile(string.concat(vm.envOr("HYPERGPU_ARTIFACTS", "artifacts"), "/TrainingLedger.json")), ".bytecode"
        );
        return create(bytes.concat(code, abi.encode(chosen)));
    }

    function test_options_that_protect_nobody_are_refused() public {
        assert(tries(options()) != address(0));
        LedgerOptions memory chosen = options();
        chosen.window = 29;
        vm.assertEq(tries(chosen), address(0));
        chosen.window = 30;
        assert(tries(chosen) != address(0));
        chosen.unbonding = 29;
        vm.assertEq(tries(chosen), address(0));
        chosen.unbonding = 30;
        assert(tries(chosen) != address(0));
        chosen = options();
        chosen.treasury = address(0);
        vm.assertEq(tries(chosen), address(0));
        chosen = options();
        chosen.quorum = 0;
        vm.assertEq(tries(chosen), address(0));
        chosen.quorum = 3;
        assert(tries(chosen) != address(0));
        chosen.quorum = 4;
        vm.assertEq(tries(chosen), address(0));
        chosen = options();
        chosen.arbiters[2] = chosen.arbiters[0];
        vm.assertEq(tries(chosen), address(0));
        chosen = options();
        chosen.token = token;
        assembly {
            mstore(chosen, 0xdead)
        }
        vm.assertEq(tries(chosen), address(0));
    }

    function test_options_can_be_read() public view {
        IOptions made = ledger;
        vm.assertEq(made.CHALLENGE_WINDOW(), WINDOW);
        vm.assertEq(made.UNBONDING(), UNBONDING);
        vm.assertEq(made.MINIMUM_BOND(), BOND);
        vm.assertEq(made.QUORUM(), 2);
        vm.assertEq(address(made.TOKEN()), address(token));
        vm.assertEq(made.TREASURY(), TREASURY);
        vm.assertEq(made.GUARDIAN(), GUARDIAN);
        vm.assertTrue(made.isArbiter(vm.addr(arbiterKeys[2])));
        vm.assertFalse(made.isArbiter(STRANGER));
        (bytes1 fields, string memory name, string memory version, uint256 chain, address contract_,,) =
            IStandards(address(ledger)).eip712Domain();
        assert(fields == 0x0f && chain == block.chainid && contract_ == address(ledger));
        vm.assertEq(keccak256(bytes(name)), keccak256("HyperGPU"));
        vm.assertEq(keccak256(bytes(version)), keccak256("1"));
    }

    function test_a_job_is_what_its_owner_said() public {
        vm.assertEq(job, keccak256(abi.encode(OWNER, SALT)));
        vm.assertEq(job, ledger.jobId(OWNER, SALT));
        ISettlement.Job memory held = ledger.getJob(job);
        vm.assertEq(keccak256(abi.encode(held.terms)), keccak256(abi.encode(terms())));
        vm.assertEq(held.owner, OWNER);
        vm.assertEq(held.free, ESCROW);
        vm.assertEq(held.spendable, LIMIT);
        vm.assertEq(held.nextSeq, 0);
        vm.assertEq(held.openedAt, block.timestamp);
        vm.assertEq(held.endsAt, 0);
        vm.assertEq(token.balanceOf(address(ledger)), ESCROW + BOND);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.UnknownJob.selector, bytes32("no")));
        ledger.getJob("no");
    }

    function test_a_job_opens_once() public {
        vm.expectRevert(ISettlement.JobExists.selector);
        vm.prank(OWNER);
        ledger.openJob(SALT, terms(), 0);
        bytes32 theirs = ledger.jobId(coordinator, SALT);
        vm.expectEmit(address(ledger));
        emit ISettlement.JobOpened(theirs, coordinator, coordinator, SALT);
        vm.expectEmit(address(ledger));
        emit ISettlement.JobFunded(theirs, coordinator, 0, 0);
        vm.prank(coordinator);
        vm.assertEq(ledger.openJob(SALT, terms(), 0), theirs);
    }

    function test_terms_out_of_range_are_refused() public {
        ISettlement.JobTerms memory wanted = terms();
        wanted.coordinator = address(0);
        vm.expectRevert(ISettlement.BadTerms.selector);
        ledger.openJob("a", wanted, 0);
        wanted = terms();
        wanted.guaranteedBps = 10_001;
        vm.expectRevert(ISettlement.BadTerms.selector);
        ledger.openJob("a", wanted, 0);
        wanted.guaranteedBps = 10_000;
        wanted.epochs = 0;
        vm.expectRevert(ISettlement.BadTerms.selector);
        ledger.openJob("a", wanted, 0);
        wanted.epochs = 1;
        vm.prank(coordinator);
        ledger.openJob("a", wanted, 0);
    }

    function test_a_coordinator_without_bond_gets_no_job() public {
        ISettlement.JobTerms memory wanted = terms();
        wanted.coordinator = STRANGER;
        vm.expectRevert(abi.encodeWithSelector(IBonds.BondMissing.selector, BOND, 0));
        vm.prank(STRANGER);
        ledger.openJob("a", wanted, 0);
        give(STRANGER, BOND);
        vm.prank(STRANGER);
        ledger.postBond(BOND - 1);
        vm.expectRevert(abi.encodeWithSelector(IBonds.BondMissing.selector, BOND, BOND - 1));
        vm.prank(STRANGER);
        ledger.openJob("a", wanted, 0);
        vm.expectEmit(address(ledger));
        emit IBonds.BondPosted(STRANGER, 1, BOND);
        vm.prank(STRANGER);
        ledger.postBond(1);
        vm.prank(STRANGER);
        ledger.openJob("a", wanted, 0);
        (uint256 bond, uint256 jobs, uint256 releaseAt) = ledger.bondOf(STRANGER);
        assert(bond == BOND && jobs == 1 && releaseAt == 0);
    }

    function test_nobody_engages_a_bond_whose_coordinator_has_not_allowed_it() public {
        bytes memory refused = abi.encodeWithSelector(IBonds.OwnerNotAllowed.selector, STRANGER);
        vm.expectRevert(refused);
        vm.prank(STRANGER);
        ledger.openJob("a", terms(), 0);
        // What others allow counts for them alone.
        vm.prank(OWNER);
        ledger.allowOwner(STRANGER, true);
        vm.assertTrue(ledger.isAllowedOwner(OWNER, STRANGER));
        vm.assertFalse(ledger.isAllowedOwner(coordinator, STRANGER));
        vm.expectRevert(refused);
        vm.prank(STRANGER);
        ledger.openJob("a", terms(), 0);
        vm.expectEmit(address(ledger));
        emit IBonds.OwnerAllowed(coordinator, STRANGER, true);
        vm.prank(coordinator);
        ledger.allowOwner(STRANGER, true);
        vm.assertTrue(ledger.isAllowedOwner(coordinator, STRANGER));
        vm.prank(STRANGER);
        ledger.openJob("a", terms(), 0);
        vm.expectEmit(address(ledger));
        emit IBonds.OwnerAllowed(coordinator, STRANGER, false);
        vm.prank(coordinator);
        ledger.allowOwner(STRANGER, false);
        vm.expectRevert(refused);
        vm.prank(STRANGER);
        ledger.openJob("b", terms(), 0);
        (, uint256 jobs,) = ledger.bondOf(coordinator);
        vm.assertEq(jobs, 2);
    }

    function test_a_stranger_cannot_keep_a_bond_from_leaving() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        ledger.retireJob(job);
        vm.prank(coordinator);
        ledger.unbond();
        vm.warp(block.timestamp + UNBONDING - 1);
        vm.expectRevert(abi.encodeWithSelector(IBonds.OwnerNotAllowed.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.openJob("trap", terms(), 0);
        vm.warp(block.timestamp + 1);
        vm.prank(coordinator);
        vm.assertEq(ledger.withdrawBond(), BOND);
    }

    function test_anyone_funds_a_job() public {
        give(STRANGER, 50);
        vm.expectEmit(address(ledger));
        emit ISettlement.JobFunded(job, STRANGER, 50, ESCROW + 50);
        vm.prank(STRANGER);
        ledger.fund(job, 50);
        vm.assertEq(ledger.getJob(job).free, ESCROW + 50);
        vm.expectPartialRevert(ISettlement.UnknownJob.selector);
        ledger.fund("no", 50);
    }

    function test_the_sequence_outlives_windows_and_deposits_and_what_is_spent_outlives_deposits() public {
        work(0, node, 100);
        close(0);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT - 100 * PRICE);
        give(STRANGER, 10);
        vm.prank(STRANGER);
        ledger.fund(job, 10);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT - 100 * PRICE);
        vm.assertEq(ledger.getJob(job).nextSeq, 1);
        vm.warp(block.timestamp + WINDOW);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT);
        work(1, node, 1);
        close(1);
        vm.assertEq(ledger.getJob(job).nextSeq, 2);
    }

    function test_escrow_beyond_96_bits_is_refused() public {
        vm.expectPartialRevert(bytes4(keccak256("SafeCastOverflowedUintDowncast(uint8,uint256)")));
        vm.prank(OWNER);
        ledger.openJob("a", terms(), 1 << 96);
        vm.expectPartialRevert(bytes4(keccak256("SafeCastOverflowedUintDowncast(uint8,uint256)")));
        ledger.fund(job, 1 << 96);
    }

    function test_only_the_owner_raises_the_limit_and_only_raises_it() public {
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotOwner.selector, coordinator));
        vm.prank(coordinator);
        ledger.raiseSpendLimit(job, LIMIT + 1);
        vm.expectRevert(ISettlement.LimitNotRaised.selector);
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, LIMIT);
        vm.expectEmit(address(ledger));
        emit ISettlement.SpendLimitRaised(job, LIMIT + 1);
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, LIMIT + 1);
        vm.assertEq(ledger.getJob(job).terms.spendLimit, LIMIT + 1);
        vm.assertEq(ledger.getJob(job).spendable, LIMIT + 1);
        vm.prank(OWNER);
        ledger.raiseSpendLimit(job, ESCROW * 2);
        vm.assertEq(ledger.getJob(job).spendable, ESCROW);
    }

    function test_an_owner_gets_free_escrow_back_after_nodes_had_their_time() public {
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotOwner.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.requestReclaim(job);
        vm.expectRevert(IBonds.JobNotEnded.selector);
        vm.prank(OWNER);
        ledger.reclaim(job);
        uint256 endsAt = block.timestamp + NOTICE;
        vm.expectEmit(address(ledger));
        emit ISettlement.ReclaimRequested(job, endsAt);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.assertEq(ledger.getJob(job).endsAt, endsAt);
        vm.expectRevert(ISettlement.AlreadyRequested.selector);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(endsAt - WINDOW - 1);
        work(0, node, 1);
        vm.warp(endsAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, endsAt));
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.warp(endsAt);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.NotOwner.selector, STRANGER));
        vm.prank(STRANGER);
        ledger.reclaim(job);
        vm.expectEmit(address(ledger));
        emit ISettlement.JobReclaimed(job, OWNER, ESCROW);
        vm.prank(OWNER);
        ledger.reclaim(job);
        vm.assertEq(token.balanceOf(OWNER), ESCROW);
        vm.assertEq(ledger.getJob(job).free, 0);
    }

    function test_nothing_new_is_recorded_in_an_ended_job() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        uint256 endsAt = block.timestamp + UNBONDING;
        vm.warp(endsAt);
        bytes memory ended = abi.encodeWithSelector(ISettlement.JobEnded.selector, endsAt);
        vm.expectRevert(ended);
        vm.prank(coordinator);
        ledger.submitAggregate(job, 0, 0, "", totals(node, 0, 1, 1, 1));
        vm.expectRevert(ended);
        ledger.fund(job, 1);
        ITrainingLedger.Receipt memory made = receipt(node, 0);
        vm.expectRevert(ended);
        ledger.submitContribution(made, "", "", 0);
    }

    function test_a_bond_leaves_when_no_job_needs_it() public {
        vm.expectRevert(abi.encodeWithSelector(IBonds.JobsRunning.selector, 1));
        vm.prank(coordinator);
        ledger.unbond();
        vm.expectRevert(IBonds.JobNotEnded.selector);
        ledger.retireJob(job);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE - 1);
        vm.expectPartialRevert(ISettlement.TooEarly.selector);
        ledger.retireJob(job);
        vm.warp(block.timestamp + 1);
        ledger.retireJob(job);
        vm.expectRevert(IBonds.AlreadyRetired.selector);
        ledger.retireJob(job);

        vm.expectRevert(ISettlement.NothingToWithdraw.selector);
        vm.prank(coordinator);
        ledger.withdrawBond();
        uint256 releaseAt = block.timestamp + UNBONDING;
        vm.expectEmit(address(ledger));
        emit IBonds.UnbondRequested(coordinator, releaseAt);
        vm.prank(coordinator);
        ledger.unbond();
        (,, uint256 said) = ledger.bondOf(coordinator);
        vm.assertEq(said, releaseAt);
        vm.warp(releaseAt - 1);
        vm.expectRevert(abi.encodeWithSelector(ISettlement.TooEarly.selector, releaseAt));
        vm.prank(coordinator);
        ledger.withdrawBond();
        vm.warp(releaseAt);
        vm.expectEmit(address(ledger));
        emit IBonds.BondWithdrawn(coordinator, BOND);
        vm.prank(coordinator);
        vm.assertEq(ledger.withdrawBond(), BOND);
        vm.assertEq(token.balanceOf(coordinator), BOND);
        (uint256 bond,,) = ledger.bondOf(coordinator);
        vm.assertEq(bond, 0);
    }

    function test_opening_a_job_ends_the_wait_of_its_bond() public {
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        ledger.retireJob(job);
        vm.prank(coordinator);
        ledger.unbond();
        vm.prank(OWNER);
        ledger.openJob("next", terms(), 0);
        vm.warp(block.timestamp + UNBONDING);
        vm.expectRevert(ISettlement.NothingToWithdraw.selector);
        vm.prank(coordinator);
        ledger.withdrawBond();
    }

    function test_only_the_guardian_pauses() public {
        vm.expectRevert(IBonds.NotGuardian.selector);
        ledger.pause();
        vm.prank(GUARDIAN);
        ledger.pause();
        vm.assertTrue(IStandards(address(ledger)).paused());
        vm.expectRevert(IBonds.NotGuardian.selector);
        ledger.unpause();
        vm.prank(GUARDIAN);
        ledger.unpause();
        vm.assertFalse(IStandards(address(ledger)).paused());
    }

    function test_a_pause_stops_new_work() public {
        vm.prank(GUARDIAN);
        ledger.pause();
        bytes4 paused = bytes4(keccak256("EnforcedPause()"));
        vm.expectRevert(paused);
        ledger.openJob("a", terms(), 0);
        vm.expectRevert(paused);
        ledger.fund(job, 1);
        vm.expectRevert(paused);
        ledger.registerNode("", 0);
        vm.expectRevert(paused);
        ledger.stake(1);
        vm.expectRevert(paused);
        ledger.postBond(1);
        vm.expectRevert(paused);
        ledger.submitContributions(job, 0, 0, "", "");
        vm.expectRevert(paused);
        ledger.submitAggregate(job, 0, 0, "", totals(node, 0, 1, 1, 1));
    }

    function test_a_pause_holds_nobodys_money() public {
        work(0, node, 10);
        close(0);
        register(other, 100);
        vm.prank(other);
        ledger.unstake(100);
        vm.prank(GUARDIAN);
        ledger.pause();
        force(receipt(node, 10), NODE_KEY, 1);
        vm.warp(block.timestamp + UNBONDING);
        vm.assertEq(pay(0, node), 10 * PRICE);
        vm.prank(other);
        ledger.withdrawStake();
        close(1);
        redeem(node, 100_000);
        vm.warp(block.timestamp + WINDOW);
        ledger.releaseVoucher(job, node);
        vm.prank(OWNER);
        ledger.requestReclaim(job);
        vm.warp(block.timestamp + NOTICE);
        vm.prank(OWNER);
        ledger.reclaim(job);
    }
}
