"""What a voucher paid a node ahead of its shares, and what short epochs left it without."""

from typing import NamedTuple


class NodeMoney(NamedTuple):
    """A node in a job, by the ledger."""

    had: int
    """Paid, or claimed by a voucher and pending."""
    earned: int
    """Shares that are paid."""
    voided: int = 0
    due: int = 0
    """Shares of closed epochs that are not paid."""
    rest: int = 0
    """What its receipts in closed epochs are worth beyond its shares: their pools were short."""

    @property
    def ahead(self) -> int:
        """What vouchers paid beyond every share of a closed epoch."""
        return max(0, self.had - self.earned - self.due)

    @property
    def coming(self) -> int:
        """What its shares will make good once they are paid: free to its job again."""
        return min(max(0, self.had - self.earned), self.due)

    @property
    def lacking(self) -> int:
        """Of the rest, what no voucher has paid."""
        return max(0, self.rest - self.ahead)

    def outstanding(self, worth: int) -> int:
        """What went ahead of work that is done: the escrow owes that no more.

        Beyond it lies only what an update was guaranteed and has not earned.

        Args:
            worth: Of all receipts of the node.
        """
        return min(self.ahead, max(0, worth - self.earned - self.voided - self.due))
