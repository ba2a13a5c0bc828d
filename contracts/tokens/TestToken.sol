// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";

/// @title Play money for local chains: anybody may mint. Six decimals, as the well-known stablecoins have.
contract TestToken is ERC20 {
    constructor() ERC20("HyperGPU test token", "tHGPU") {}

    function mint(address to, uint256 amount) external {
        _mint(to, amount);
    }

    function decimals() public pure override returns (uint8) {
        return 6;
    }
}
