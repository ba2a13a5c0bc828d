// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

/// @dev The cheat codes that these tests use: forge-std is not on npm in a version that fits.
interface Vm {
    function addr(uint256 key) external pure returns (address);
    function assertEq(uint256 left, uint256 right) external pure;
    function assertEq(address left, address right) external pure;
    function assertEq(bytes32 left, bytes32 right) external pure;
    function assertEq(uint256 left, uint256 right, string calldata message) external pure;
    function assertLe(uint256 left, uint256 right, string calldata message) external pure;
    function chainId(uint256 id) external;
    function envOr(string calldata name, string calldata otherwise) external view returns (string memory);
    function expectEmit(address emitter) external;
    function expectRevert() external;
    function expectRevert(bytes4 selector) external;
    function expectRevert(bytes calldata reason) external;
    function expectPartialRevert(bytes4 selector) external;
    function parseJsonBytes(string calldata json, string calldata key) external pure returns (bytes memory);
    function prank(address sender) external;
    function readFile(string calldata path) external view returns (string memory);
    function sign(uint256 key, bytes32 digest) external pure returns (uint8 v, bytes32 r, bytes32 s);
    function snapshotGasLastCall(string calldata group, string calldata name) external returns (uint256);
    function warp(uint256 timestamp) external;
}

/// @dev What every test stands on: cheat codes, and the contracts as they were compiled and committed. Running against those
/// and not against fresh ones saves their compilation and shows that they are the right ones.
abstract contract Cheats {
    Vm internal constant vm = Vm(address(uint160(uint256(keccak256("hevm cheat code")))));

    /// @dev Deploy a contract from its artifact; the folder can be another one, with mutants in it.
    function deployed(string memory name, bytes memory arguments) internal returns (address made) {
        made = create(name, arguments);
        require(made != address(0), "not deployed");
    }

    /// @dev Zero where the constructor reverted.
    function create(string memory name, bytes memory arguments) internal returns (address made) {
        string memory folder = vm.envOr("HYPERGPU_ARTIFACTS", "artifacts");
        string memory json = vm.readFile(string.concat(folder, "/", name, ".json"));
        bytes memory code = bytes.concat(vm.parseJsonBytes(json, ".bytecode"), arguments);
        assembly {
            made := create(0, add(code, 32), mload(code))
        }
    }

    function signature(uint256 key, bytes32 digest) internal pure returns (bytes memory) {
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(key, digest);
        return abi.encodePacked(r, s, v);
    }
}

/// @dev Draws random calls of a handler: forge asks the two functions for whom and what to call.
abstract contract Campaign is Cheats {
    struct Selectors {
        address addr;
        bytes4[] selectors;
    }

    address private _handler;
    bytes4[] private _drawn;

    function targetContracts() public view returns (address[] memory targets) {
        targets = new address[](1);
        targets[0] = _handler;
    }

    /// @dev A handler is a test itself and has more functions than it wants drawn.
    function targetSelectors() public view returns (Selectors[] memory targets) {
        targets = new Selectors[](1);
        targets[0] = Selectors(_handler, _drawn);
    }

    /// @param selectors An array of a fixed length, encoded: one word each.
    function draws(address handler, bytes memory selectors) internal {
        _handler = handler;
        for (uint256 end = 32; end <= selectors.length; end += 32) {
            bytes4 selector;
            assembly {
                selector := mload(add(selectors, end))
            }
            _drawn.push(selector);
        }
    }
}
