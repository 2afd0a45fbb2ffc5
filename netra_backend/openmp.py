"""How long OpenMP's workers spin for the next operation before they sleep; to be set before torch is imported.

Waking a sleeping worker costs tens of microseconds, several hundred times a step. Spinning without end
collapses when another process wants the core (39 -> 346 ms a token seen), so it is bounded: 10,000 turns are
about half a millisecond, longer than the gap between two operations of a step and far shorter than a time slice.
"""

from __future__ import annotations

SPIN_COUNT = "10000"
"""For the environment variable GOMP_SPINCOUNT."""
