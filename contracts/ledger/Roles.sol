// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {ECDSA} from "@openzeppelin/contracts/utils/cryptography/ECDSA.sol";
import {EIP712} from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {ReentrancyGuardTransient} from "@openzeppelin/contracts/utils/ReentrancyGuardTransient.sol";
import {ITrainingLedger} from "../interfaces/ITrainingLedger.sol";

/// @notice See the getters of the same names in `ITrainingLedger`; `window` is `CHALLENGE_WINDOW`.
struct LedgerOptions {
    IERC20 token;
    uint32 window;
    uint32 unbonding;
    uint8 quorum;
    address treasury;
    address[] arbiters;
}

/// @title What is fixed at deployment, signatures, and money in and out.
abstract contract Roles is ITrainingLedger, EIP712, ReentrancyGuardTransient {
    using SafeERC20 for IERC20;
    using SafeCast for uint256;

    /// @dev Block times may be off by seconds, so no window is shorter than thirty.
    uint32 private constant SHORTEST_WINDOW = 30;

    IERC20 public immutable TOKEN;
    uint32 public immutable CHALLENGE_WINDOW;
    uint32 public immutable UNBONDING;
    uint8 public immutable QUORUM;
    address public immutable TREASURY;
    mapping(address account => bool) public isArbiter;
    mapping(address account => uint256) public creditOf;

    constructor(LedgerOptions memory options) EIP712("HyperGPU", "2") {
        if (
            options.window < SHORTEST_WINDOW || options.unbonding < options.window || options.treasury == address(0)
                || options.quorum == 0 || options.quorum > options.arbiters.length
                || address(options.token).code.length == 0
        ) revert BadOptions();
        TOKEN = options.token;
        CHALLENGE_WINDOW = options.window;
        UNBONDING = options.unbonding;
        QUORUM = options.quorum;
        TREASURY = options.treasury;
        for (uint256 i = 0; i < options.arbiters.length; ++i) {
            if (isArbiter[options.arbiters[i]]) revert BadOptions();
            isArbiter[options.arbiters[i]] = true;
        }
    }

    function withdrawCredit(address to) external nonReentrant returns (uint256 amount) {
        amount = creditOf[msg.sender];
        if (amount == 0) revert NothingToWithdraw();
        creditOf[msg.sender] = 0;
        emit CreditWithdrawn(msg.sender, to, amount);
        TOKEN.safeTransfer(to, amount);
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
        creditOf[to] += amount;
        emit Credited(to, amount);
    }

    function _requireSigned(address signer, bytes32 structHash, bytes calldata signature) internal view {
        (address key,,) = ECDSA.tryRecoverCalldata(_hashTypedDataV4(structHash), signature); // Zero for a bad signature.
        if (key != signer || key == address(0)) revert BadSignature(signer);
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

    function _requireReached(uint256 moment) internal view {
        if (block.timestamp < moment) revert TooEarly(moment);
    }

    /// @dev Time in `duration` seconds, as it is stored.
    function _after(uint256 duration) internal view returns (uint40) {
        return (block.timestamp + duration).toUint40();
    }
}
