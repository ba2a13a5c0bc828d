"""What a mixture of experts says of itself, so that its nodes may hold some of its experts only."""

import msgspec

EXPERTS_MAX = 256
"""Most experts of a mixture."""


class MixtureError(ValueError):
    """Numbers of experts that cannot be. The text says what is wrong and what would be right."""


class Mixture(msgspec.Struct, frozen=True):
    """How many experts a mixture has, and how many of them a node holds."""

    experts: int
    held: int
    """How many of them a node holds; 0, or all there are: nodes hold whole replicas."""
    per_token: int
    """Experts that a token is sent to."""

    @property
    def is_partial(self) -> bool:
        """Whether nodes hold some of the experts only."""
        return 0 < self.held < self.experts

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            MixtureError: It cannot.
        """
        if not 1 <= self.experts <= EXPERTS_MAX:
            raise MixtureError(f"a mixture has 1 to {EXPERTS_MAX} experts, not {self.experts}")
        least, most = self.per_token, self.held or self.experts
        if not 1 <= least <= most <= self.experts:
            raise MixtureError(
                f"a token is sent to {least} experts, a node holds {self.held} of {self.experts}:"
                " the first must be 1 or more and at most the second, or the second 0 for all"
            )
