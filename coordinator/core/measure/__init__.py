"""Measurements of nodes, and forecasts made of them. Pure: no clock, no IO, no dice.

Readings are made of observations one at a time; everything else is read off a reading.

=================  =================================================================================
`reading`          `Observation` and `NodeReading`, the values.
`observing`        ``observed(reading, observation) -> NodeReading``;
                   ``availability(reading, now_ms) -> float``
`estimators`       ``followed(estimate, value, at_ms, *, weight) -> Estimate`` and
                   ``followed_rate`` (harmonic); ``laplace_quantile(mean, deviation, share)``;
                   ``age_ms(estimate, now_ms) -> Milliseconds | None``
`line`             ``loss_share(reading) -> float | None``; ``mean_burst(reading) -> float``;
                   ``goodput_of(reading, direction, connections) -> Estimate``, in bit/s;
                   ``loss_of_goodput(bits_per_s, rtt_us, connections=1) -> float``
`forecast`         ``finish_forecast(reading, work, typical=UNKNOWN) -> Forecast | None``;
                   ``transfer_forecast(reading, direction, size_bytes, *, connections, typical) ->
                   Span``; `Work` is what is asked, `Forecast` has ``mean_ms``, ``deviation_ms``,
                   ``parts``, ``assumed``, ``quantile_ms(share)`` and ``chance_by(limit_ms)``
`fleet`            ``typical(readings) -> NodeReading``: medians, for what is not known of a node
=================  =================================================================================

A bandwidth in a reading is what a transfer moves at once slow start is over: a time made of it by
hand leaves slow start out, which `forecast` adds. One outlier moves little; a changed level is
believed with the second observation of it, or the third where noise is heavy.

Every spread is a mean absolute deviation d. Quantiles are those of a Laplace distribution, whose
tails are as heavy as networks' are: the 90th percentile lies 1.6 d above the mean, the 99th 3.9 d.
"""
