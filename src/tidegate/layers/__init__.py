"""The layers a notification passes: Connection Point, Access Point, Matcher, Exit Point, and a Connection Point again.

Each layer is a synchronous state machine: `on_<input>(source, frame, now_s) -> outputs`. It reads no clock, no socket
and no random source; a host (embedded here, simulated in the tests) carries the outputs to where they are addressed.
"""

from tidegate.layers.kernel_cache import use_kernel_cache

use_kernel_cache()
