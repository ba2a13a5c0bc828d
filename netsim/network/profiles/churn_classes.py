"""Measured churn by name: SETI@home's volunteers, and cloud machines that are taken back.

Parameters of the volunteers after Javadi, Kondo, Vincent and Anderson, "Discovering statistical
models of availability in large distributed systems" (230,000 hosts; six clusters of alike ones and
all together). Most absences of the stable clusters last a minute or two, the rest half a day: an
exponential distribution is wrong at both ends.
"""

from collections.abc import Mapping

from netsim.network.profiles.churn import Churn, Phase, Span, SpanKind

_HOUR_S = 3600.0


def _gamma(shape: float, scale_h: float) -> Span:
    return Span(kind=SpanKind.GAMMA, shape=shape, scale_s=scale_h * _HOUR_S)


def _weibull(shape: float, scale_h: float) -> Span:
    return Span(kind=SpanKind.WEIBULL, shape=shape, scale_s=scale_h * _HOUR_S)


def _mixed(*phases: tuple[float, float]) -> Span:
    """From shares and rates an hour, as the study gives them."""
    kind = SpanKind.HYPEREXPONENTIAL
    return Span(kind=kind, phases=tuple(Phase(share, _HOUR_S / rate) for share, rate in phases))


def exponential(mean_s: float) -> Span:
    """Lengths without memory."""
    return Span(kind=SpanKind.EXPONENTIAL, scale_s=mean_s)


CHURN_CLASSES: Mapping[str, Churn] = {
    "c1": Churn(_gamma(0.289, 311.7), _mixed((0.141, 0.008), (0.683, 37.8), (0.176, 1.01))),
    "c2": Churn(_gamma(0.340, 152.2), _mixed((0.142, 0.013), (0.660, 30.6), (0.198, 0.777))),
    "c3": Churn(_weibull(0.431, 1.682), _mixed((0.398, 0.031), (0.305, 11.6), (0.298, 1.32))),
    "c4": Churn(_gamma(0.357, 371.6), _mixed((0.106, 0.009), (0.743, 45.2), (0.151, 0.961))),
    "c5": Churn(_gamma(0.342, 89.2), _mixed((0.179, 0.016), (0.566, 27.6), (0.255, 0.536))),
    "c6": Churn(_gamma(0.357, 43.7), _mixed((0.338, 0.029), (0.390, 30.1), (0.272, 1.07))),
    # Medians of the lognormal in hours are exp(mu). Its sigma is given as 2.444 in one place.
    "seti": Churn(
        _weibull(0.393, 2.964),
        Span(kind=SpanKind.LOGNORMAL, shape=2.444, scale_s=0.5565 * _HOUR_S),
    ),
    "spot": Churn(exponential(8 * _HOUR_S), exponential(300.0)),
    "stress": Churn(
        Span(kind=SpanKind.WEIBULL, shape=0.43, scale_s=600.0),
        exponential(120.0),
    ),
}
"""By the name that a world file gives."""
