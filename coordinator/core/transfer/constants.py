"""Every number that the transfer model was given or fitted, in one place, so that it can be
calibrated again against real packets.
"""

INITIAL_WINDOW_PACKETS = 10
"""RFC 6928."""
PACKET_HEADER_BYTES = 52
"""IPv4 20, TCP 20, timestamps 12."""
STREAM_OVERHEAD = 0.001
"""HTTP/2 frames, messages and TLS records: measured 3.7 % over payload where TCP/IP takes 3.6 %."""
BUFFER_SHARE = 0.74
"""Payload in a full socket buffer; the rest is bookkeeping. One connection with Linux's 4 MiB of
``tcp_wmem`` was measured at 200 to 250 Mbit/s over 100 ms.
"""
STREAM_WINDOW_PACKETS = 130
"""What a transfer may begin with however large TCP's window is: an HTTP/2 stream opens with 64 KiB
and its receiver grants more as messages come. Fitted to rounds of 1 MB over 150 ms, 1.7 s.
"""
SLOW_START_GROWTH = 1.8
"""Per round, of Reno and CUBIC: less than double, since the receiver's window opens step by step.
Fitted to 4 MiB over 100 ms, 1.0 s.
"""
RTO_FLOOR_US = 200_000
"""Linux: a retransmission timeout is the smoothed RTT and at least this."""
HANDSHAKE_RTTS = 2
"""TCP and TLS 1.3, before the first byte of a cold connection."""
SMALL_WINDOW_PACKETS = 4
"""With fewer in flight a loss raises too few duplicate acknowledgements: it waits for the timer."""

CUBIC_BETA = 0.7
"""RFC 9438: what a loss leaves of the window."""
CUBIC_SCALE = 0.4
"""RFC 9438: C, in packets per second cubed."""
CUBIC_FRIENDLY_GROWTH = 3 * (1 - CUBIC_BETA) / (1 + CUBIC_BETA)
"""RFC 9438: packets per round where CUBIC does no worse than Reno."""
RENO_BETA = 0.5
HYSTART_SHARE = 1 / 8
"""CUBIC leaves slow start once queueing has raised the RTT by this share (Linux: HyStart)."""

BBR_STARTUP_GROWTH = 2.0
"""Per round in startup; its pacing gain of 2.89 is made for doubling (Cardwell et al. 2016)."""
BBR_LOSSY_GROWTH = 1.4
"""Per round in startup while packets are being recovered; fitted to 4 MiB at 1 %, 1.3 to 1.5 s."""
BBR_WINDOW_GAIN = 2.0
BBR_IDLE_SHARE = 0.005
BBR_IDLE_SHARE_PER_S = 0.4
"""What probing for the lowest RTT costs, and more of it the longer the RTT: fitted to 100 MiB at
20 Mbit/s, 43.8 s without delay and 46.1 s over 100 ms.
"""
BBR_IDLE_SHARE_MOST = 0.1
BBR_LOSS_LIMIT = 0.2
"""BBR ignores loss up to about this share (Cardwell et al. 2016); beyond it the rate collapses."""

ROUNDS_MOST = 100
"""Rounds drawn one by one; what is left after them moves at the steady rate."""

MATHIS = 1.29
"""Mean window times the square root of the loss rate: 1.22 in Mathis et al. 1997; fitted to the
drawn rounds.
"""
TIMER_SHARE = 0.5
"""How many of the losses in a small window wait for the timer; fitted to the drawn rounds."""
SPREAD_A_LOSS = 0.6
"""Spread of a long transfer's time, times the root of its losses; fitted to the drawn rounds."""
