"""Measurements of nodes, and forecasts made of them. Pure: no clock, no IO, no dice.

Readings are made of observations one at a time; everything else is read off a reading.

=================  =================================================================================
`reading`          `Observation` and `NodeReading`, the values;
                   ``update_estimate(estimate, value, at_ms, *, weight) -> Estimate`` and
                   ``update_rate`` (harmonic); ``laplace_quantile(mean, deviation, share)``;
                   ``median_reading(readings) -> NodeReading``: for what is not known of a node
`observations`     ``add_observation(reading, observation) -> NodeReading``
`line`             ``loss_share(reading) -> float | None``; ``mean_burst(reading) -> float``;
                   ``goodput_of(reading, direction, connections) -> Estimate``, in bit/s;
                   ``loss_of_goodput(bits_per_s, rtt_us, connections=1) -> float``
`work_forecast`    ``finish_forecast(reading, work, typical=UNKNOWN) -> FinishForecast | None``;
                   ``transfer_forecast(reading, direction, size_bytes, *, connections, typical) ->
                   ForecastTime``; `RoundWork` is asked, `FinishForecast` has ``parts``,
                   ``mean_ms``, ``deviation_ms``, ``quantile_ms(share)`` and
                   ``chance_by(limit_ms)``
`inline`           ``inline_choice(reading, request) -> InlineChoice``: whether a blob travels
                   inside its assignment
`transfer_forecast` and `tcp` say how long bytes take over a path.
=================  =================================================================================

A bandwidth in a reading is what a transfer moves at once slow start is over: a time made of it by
hand leaves slow start out, which `forecast` adds. One outlier moves little; a changed level is
believed with the second observation of it, or the third where noise is heavy.

Every spread is a mean absolute deviation d. Quantiles are those of a Laplace distribution, whose
tails are as heavy as networks' are: the 90th percentile lies 1.6 d above the mean, the 99th 3.9 d.
"""
