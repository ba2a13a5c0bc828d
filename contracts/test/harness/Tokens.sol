// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";

/// @dev A token that behaves until it is told not to.
contract WrongToken is ERC20 {
    enum Wrong {
        NOTHING,
        REFUSES,
        RETURNS_FALSE,
        TAKES_A_FEE,
        CALLS_BACK
    }

    Wrong public wrong;
    address public victim;
    address private _target;
    bytes private _call;
    bool public hasCalled;
    bytes4 public answer;

    constructor() ERC20("Wrong", "W") {}

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function turn(Wrong how, address whom) external {
        (wrong, victim) = (how, whom);
    }

    /// @dev Call `target` back in the next transfer.
    function callBack(address target, bytes calldata what) external {
        (wrong, _target, _call, hasCalled) = (Wrong.CALLS_BACK, target, what, false);
    }

    function transfer(address to, uint256 amount) public override returns (bool) {
        if (to == victim && wrong == Wrong.RETURNS_FALSE) return false;
        return super.transfer(to, amount);
    }

    function _update(address from, address to, uint256 amount) internal override {
        if (to == victim && wrong == Wrong.REFUSES) revert("refused");
        super._update(from, to, amount);
        if (wrong == Wrong.TAKES_A_FEE && to != address(0)) _levy(to, amount / 100);
        if (wrong == Wrong.CALLS_BACK && !hasCalled) {
            hasCalled = true;
            (, bytes memory reason) = _target.call(_call);
            answer = bytes4(reason);
        }
    }

    function _levy(address from, uint256 amount) private {
        wrong = Wrong.NOTHING;
        super._update(from, address(0), amount);
        wrong = Wrong.TAKES_A_FEE;
    }
}
