// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {Disputes} from "./ledger/Disputes.sol";
import {LedgerOptions, Roles} from "./ledger/Roles.sol";

/// @title The ledger of training jobs. `ITrainingLedger` and what it extends are the manual.
contract TrainingLedger is Disputes {
    constructor(LedgerOptions memory options) Roles(options) {}
}
