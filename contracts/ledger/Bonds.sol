// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {Roles} from "./Roles.sol";

/// @title Money in and out, and what coordinators put up.
abstract contract Bonds is Roles {
    using SafeERC20 for *;
    using SafeCast for uint256;

    struct Bond {
        uint96 amount;
        uint40 releaseAt;
        uint32 jobs;
    }

    mapping(address account => uint256) private _credit;
    mapping(address coordinator => Bond) private _bonds;
    mapping(address coordinator => mapping(address owner => bool)) public isAllowedOwner;

    function allowOwner(address owner, bool isAllowed) external {
        isAllowedOwner[msg.sender][owner] = isAllowed;
        emit OwnerAllowed(msg.sender, owner, isAllowed);
    }

    function postBond(uint256 amount) external nonReentrant whenNotPaused {
        Bond storage bond = _bonds[msg.sender];
        bond.amount += amount.toUint96();
        emit BondPosted(msg.sender, amount, bond.amount);
        _pull(amount);
    }

    function unbond() external {
        Bond storage bond = _bonds[msg.sender];
        if (bond.jobs != 0) revert JobsRunning(bond.jobs);
        bond.releaseAt = _after(UNBONDING);
        emit UnbondRequested(msg.sender, bond.releaseAt);
    }

    function withdrawBond() external nonReentrant returns (uint256 amount) {
        Bond storage bond = _bonds[msg.sender];
        if (bond.releaseAt == 0) revert NothingToWithdraw();
        _requireReached(bond.releaseAt);
        amount = bond.amount;
        delete _bonds[msg.sender]; // No job counts on it: opening one clears `releaseAt`.
        emit BondWithdrawn(msg.sender, amount);
        _push(msg.sender, amount);
    }

    function withdraw(address to) external nonReentrant returns (uint256 amount) {
        amount = _credit[msg.sender];
        if (amount == 0) revert NothingToWithdraw();
        _credit[msg.sender] = 0;
        emit Withdrawn(msg.sender, to, amount);
        TOKEN.safeTransfer(to, amount);
    }

    function creditOf(address account) external view returns (uint256) {
        return _creditOf(account);
    }

    function bondOf(address coordinator) external view returns (uint256 bond, uint256 jobs, uint256 releaseAt) {
        Bond storage posted = _bonds[coordinator];
        return (posted.amount, posted.jobs, posted.releaseAt);
    }

    function _creditOf(address account) internal view returns (uint256) {
        return _credit[account];
    }

    /// @dev Count a job of the caller's on a coordinator's bond.
    function _engageBond(address coordinator) internal {
        if (msg.sender != coordinator && !isAllowedOwner[coordinator][msg.sender]) revert OwnerNotAllowed(msg.sender);
        Bond storage bond = _bonds[coordinator];
        if (bond.amount < MINIMUM_BOND) revert BondMissing(MINIMUM_BOND, bond.amount);
        bond.releaseAt = 0;
        bond.jobs += 1;
    }

    function _disengageBond(address coordinator) internal {
        _bonds[coordinator].jobs -= 1;
    }

    /// @dev Empty a coordinator's bond, unbonding or not, and return what was in it.
    function _seizeBond(address coordinator) internal returns (uint256 amount) {
        Bond storage bond = _bonds[coordinator];
        amount = bond.amount;
        bond.amount = 0;
    }

    /// @dev Take exactly `amount` from the caller. A token that takes a fee or lies is refused.
    function _pull(uint256 amount) internal {
        uint256 before = TOKEN.balanceOf(address(this));
        TOKEN.safeTransferFrom(msg.sender, address(this), amount);
        uint256 received = TOKEN.balanceOf(address(this)) - before;
        if (received != amount) revert TransferShort(amount, received);
    }

    /// @dev Pay, or keep as credit what the token refuses to transfer: one payee must not stop the others.
    function _push(address to, uint256 amount) internal {
        if (amount == 0 || TOKEN.trySafeTransfer(to, amount)) return;
        _credit[to] += amount;
        emit Credited(to, amount);
    }

    function _after(uint256 duration) internal view returns (uint40) {
        return (block.timestamp + duration).toUint40();
    }

    function _requireReached(uint256 moment) internal view {
        if (block.timestamp < moment) revert TooEarly(moment);
    }
}
