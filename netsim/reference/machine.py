"""QEMU under a virtual clock: each instruction takes one nanosecond and waiting takes none.

So the guest's clock owes nothing to ours, and the same guest says the same bits on any machine,
however busy it is.
"""

import subprocess
from pathlib import Path

from netsim.refusal import RefusedError

QEMU = "qemu-system-x86_64"
LIMIT_S = 1800
# QEMU's main loop moves the clock on while the guest waits, and may look whether it waits just
# before its last instructions are counted: on a busy machine the clock then differs by some of
# them. While QEMU records, the two exclude each other. The recording itself is of no use to us.
CLOCK = "shift=0,sleep=off,align=off,rr=record,rrfile=/dev/null"
MEMORY_MIB = 1024
# The local timer is calibrated by reading the clock in a loop, which takes long; it has another.
# No random address and no random number of the processor's: they would differ from run to run.
KERNEL_WORDS = (
    "console=ttyS0 quiet loglevel=0 rdinit=/init panic=-1 nokaslr norandmaps mitigations=off"
    " nolapic_timer random.trust_cpu=off random.trust_bootloader=off"
)


def command(kernel: Path, initrd: Path, console: Path) -> list[str]:
    """Return QEMU's command line."""
    return [
        QEMU,
        *("-accel", "tcg,thread=single"),
        *("-icount", CLOCK),
        *("-rtc", "base=2026-01-01T00:00:00,clock=vm"),
        # QEMU hands the kernel a seed at boot, which its random numbers start from.
        *("-seed", "1"),
        *("-cpu", "qemu64,-rdrand,-rdseed", "-smp", "1", "-m", str(MEMORY_MIB)),
        *("-kernel", str(kernel), "-initrd", str(initrd), "-append", KERNEL_WORDS),
        *("-nodefaults", "-nic", "none", "-display", "none", "-monitor", "none"),
        *("-serial", f"file:{console}", "-no-reboot"),
    ]


def run(kernel: Path, initrd: Path, console: Path) -> str:
    """Boot the guest, wait for its end and return what it printed.

    Raises:
        RefusedError: QEMU failed or took longer than half an hour.
    """
    argv = command(kernel, initrd, console)
    try:
        ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RefusedError(
            f"the guest did not end within {LIMIT_S} s", f"read {console}, or ask for fewer cells"
        ) from error
    if ended.returncode:
        raise RefusedError(
            f"{QEMU} failed: {ended.stderr.strip()}", "install qemu-system-x86 7 or later"
        )
    return console.read_text(encoding="utf-8", errors="replace")
