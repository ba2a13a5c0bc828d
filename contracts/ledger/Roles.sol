// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {SignatureChecker} from "@openzeppelin/contracts/utils/cryptography/SignatureChecker.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {Pausable} from "@openzeppelin/contracts/utils/Pausable.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {ISettlement} from "../interfaces/ISettlement.sol";

/// @param token The one token of the ledger: an allow list with one entry, since another token is another ledger.
/// @param window Seconds in which arbiters may void.
/// @param unbonding Seconds; at least `window`.
/// @param minimumBond What a coordinator must post.
/// @param quorum How many arbiters decide.
/// @param treasury Gets penalties and bonds.
/// @param guardian May pause new work, and nothing else.
struct LedgerOptions {
    IERC20 token;
    uint32 window;
    uint32 unbonding;
    uint96 minimumBond;
    uint8 quorum;
    address treasury;
    address guardian;
    address[] arbiters;
}

/// @title Who may do what, the typed-data domain, and the quorum of arbiters.
abstract contract Roles is ISettlement, EIP712, Pausable, ReentrancyGuardTransient {
    string private constant NAME = "HyperGPU";
    string private constant VERSION = "1";
    uint32 private constant SHORTEST_WINDOW = 30;

    /// @dev Block times may be off by seconds, so no window is shorter than thirty.
    IERC20 public immutable TOKEN;
    uint32 public immutable CHALLENGE_WINDOW;
    uint32 public immutable UNBONDING;
    uint96 public immutable MINIMUM_BOND;
    uint8 public immutable QUORUM;
    address public immutable TREASURY;
    address public immutable GUARDIAN;

    mapping(address account => bool) public isArbiter;

    constructor(LedgerOptions memory options) EIP712(NAME, VERSION) {
        if (
            options.window < SHORTEST_WINDOW || options.unbonding < options.window || options.treasury == address(0)
                || options.quorum == 0 || options.quorum > options.arbiters.length
                || address(options.token).code.length == 0
        ) revert BadOptions();
        TOKEN = options.token;
        CHALLENGE_WINDOW = options.window;
        UNBONDING = options.unbonding;
        MINIMUM_BOND = options.minimumBond;
        QUORUM = options.quorum;
        TREASURY = options.treasury;
        GUARDIAN = options.guardian;
        for (uint256 i = 0; i < options.arbiters.length; ++i) {
            if (isArbiter[options.arbiters[i]]) revert BadOptions();
            isArbiter[options.arbiters[i]] = true;
        }
    }

    /// @inheritdoc EIP712
    /// @dev The inherited one can also read long names from storage, which is 600 bytes of code for nothing here.
    function eip712Domain()
        public
        view
        override
        returns (bytes1, string memory, string memory, uint256, address, bytes32, uint256[] memory)
    {
        return (hex"0f", NAME, VERSION, block.chainid, address(this), 0, new uint256[](0));
    }

    function pause() external {
        if (msg.sender != GUARDIAN) revert NotGuardian();
        _pause();
    }

    function unpause() external {
        if (msg.sender != GUARDIAN) revert NotGuardian();
        _unpause();
    }

    /// @dev The key first, whatever code its account has by now: a key that delegates (EIP-7702) takes nothing back.
    function _requireSigned(address signer, bytes32 structHash, bytes calldata signature) internal view {
        bytes32 digest = _hashTypedDataV4(structHash);
        (address key,,) = ECDSA.tryRecoverCalldata(digest, signature); // Zero for a bad signature.
        if (key == signer && key != address(0)) return;
        if (!SignatureChecker.isValidERC1271SignatureNowCalldata(signer, digest, signature)) revert BadSignature(signer);
    }

    /// @dev Ascending signers cannot be counted twice.
    function _requireQuorum(bytes32 structHash, bytes[] calldata signatures) internal view {
        if (signatures.length < QUORUM) revert NoQuorum(signatures.length, QUORUM);
        bytes32 digest = _hashTypedDataV4(structHash);
        address last = address(0);
        for (uint256 i = 0; i < signatures.length; ++i) {
            (address signer,,) = ECDSA.tryRecoverCalldata(digest, signatures[i]); // Zero for a bad signature.
            if (!isArbiter[signer] || signer <= last) revert BadArbiter(signer);
            last = signer;
        }
    }
}
