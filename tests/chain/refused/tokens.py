"""The ledger's token, changed under the ground's feet, and a ledger that its guardian pauses."""

from contracts.compile import CONTRACTS, compiled
from coordinator.shell.chain.founding import LOCAL_BOND
from hypergpu.chain.abi import Abi
from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.typed import address_bytes
from tests.chain.ground import NODES, Ground
from tests.signed_receipts import COORDINATOR

REFUSES, TAKES_A_FEE = 1, 3
"""What a `WrongToken` does to its victim."""
_SOURCE = "test/harness/Tokens.sol"
PAUSED_SLOT = "0x" + f"{2:064x}"
_SLOTS = 40


class WrongToken:
    """The contract tests' token in place of the ledger's, with the balances that it had."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._address = "0x" + ground.settler.site.token().hex()
        self._honest = ground.ask("eth_getCode", self._address, "latest")
        text = (CONTRACTS / _SOURCE).read_text("utf-8")
        self._made = compiled({_SOURCE: text})["contracts"][_SOURCE]["WrongToken"]

    def wrongs(self, how: int, whom: bytes) -> None:
        """Misbehave from now on."""
        code = "0x" + self._made["evm"]["deployedBytecode"]["object"]
        self._ground.ask("anvil_setCode", self._address, code)
        call = Abi(self._made["abi"]).call("turn", how, whom)
        self.tell(call)

    def tell(self, call: bytes) -> None:
        """Have somebody call the token, in a block that holds nothing else of the settler's."""
        caller = NODES[0].node_id
        self._ground.ask("anvil_setBalance", caller, hex(10**18))
        self._ground.ask("anvil_impersonateAccount", caller)
        sent = {"from": caller, "to": self._address, "data": "0x" + call.hex()}
        self._ground.ask("eth_sendTransaction", sent | {"gasPrice": hex(10**12)})
        self._ground.mine()

    def behaves(self) -> None:
        """Be the honest one again."""
        self._ground.ask("anvil_setCode", self._address, self._honest)


def give(ground: Ground, amount: int) -> None:
    """Have somebody send the coordinator tokens."""
    call = ground.settler.site.calls.mint(Address(COORDINATOR.node_id), amount).call
    WrongToken(ground).tell(call)


def set_paused(ground: Ground, *, is_paused: bool) -> None:
    """Have the ledger's guardian pause it, or end the pause, in the newest block."""
    where = "0x" + ground.settler.site.contract.hex()
    ground.ask("anvil_setStorageAt", where, PAUSED_SLOT, "0x" + f"{int(is_paused):064x}")
    ground.mine()


def take_bond(ground: Ground) -> None:
    """Leave the coordinator without its bond on the ledger."""
    where = "0x" + ground.settler.site.contract.hex()
    owner = bytes(12) + address_bytes(COORDINATOR.node_id)
    for slot in range(_SLOTS):
        place = "0x" + keccak(owner + slot.to_bytes(32)).hex()
        held = int(str(ground.ask("eth_getStorageAt", where, place, "latest")), 16)
        if held & (2**96 - 1) == LOCAL_BOND:
            ground.ask("anvil_setStorageAt", where, place, f"0x{held - LOCAL_BOND:064x}")
            ground.mine()
            return
    raise AssertionError("no bond is there")
