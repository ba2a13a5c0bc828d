"""The register of nodes, and their stake."""

from hypergpu.ids import Address
from hypergpu.ledger.settlement.escrow import Escrow
from hypergpu.ledger.settlement.state import STAKE_MAX, Stake, atomic, require


class Stakes(Escrow):
    """Stake buys pay inside the challenge window: each such payment locks as much of it."""

    def stake_of(self, node: Address) -> Stake:
        """A node's stake as it stands now."""
        stake = self.state.stakes.setdefault(node, Stake())
        stake.move_to(self.period % 2**16)
        return stake

    @atomic
    def register_node(self, caller: Address, amount: int) -> int:
        """Register the caller, with optional stake."""
        require(not self.state.is_paused, "EnforcedPause")
        stake = self.stake_of(caller)
        require(not stake.id, "AlreadyRegistered")
        self.state.registered += 1
        stake.id = self.state.registered
        self._add_stake(caller, amount)
        return stake.id

    @atomic
    def stake(self, caller: Address, amount: int) -> None:
        """Add to the caller's stake."""
        require(not self.state.is_paused, "EnforcedPause")
        require(self.stake_of(caller).id, "NotRegistered")
        self._add_stake(caller, amount)

    @atomic
    def unstake(self, caller: Address, amount: int) -> None:
        """Start unbonding stake that nothing locks."""
        stake = self.stake_of(caller)
        require(amount <= stake.free, "StakeLocked")
        stake.staked -= amount
        stake.unbonding += amount
        stake.release_at_s = self.now_s + self.options.unbonding_s

    @atomic
    def withdraw_stake(self, caller: Address) -> int:
        """Pay out what has unbonded."""
        stake = self.stake_of(caller)
        amount = stake.unbonding
        require(amount, "NothingToWithdraw")
        require(self.now_s >= stake.release_at_s, "TooEarly")
        stake.unbonding = 0
        self._push(caller, amount)
        return amount

    def _add_stake(self, caller: Address, amount: int) -> None:
        stake = self.stake_of(caller)
        stake.staked += amount
        require(stake.staked <= STAKE_MAX, "SafeCastOverflowedUintDowncast")
        self._pull(caller, amount)

    def _is_locked(self, node: Address, amount: int) -> bool:
        """Lock ``amount``; false, and nothing locked, where too little is free."""
        stake = self.stake_of(node)
        if amount > stake.free:
            return False
        stake.recent += amount
        return True

    def _seize_locked(self, node: Address, amount: int, paid_in: int) -> None:
        stake = self.stake_of(node)
        if paid_in == stake.period:
            stake.recent -= amount
        else:
            stake.older -= amount
        stake.staked -= amount

    def _seize_free(self, node: Address, most: int) -> int:
        """Take from what nothing locks: free stake first, then what is unbonding."""
        stake = self.stake_of(node)
        from_stake = min(most, stake.free)
        stake.staked -= from_stake
        from_unbonding = min(most - from_stake, stake.unbonding)
        stake.unbonding -= from_unbonding
        return from_stake + from_unbonding
