"""Code that all compiled kernels share.

`cache` decides how kernels are compiled and where the machine code is stored. `intrinsic_kernel` and `bytes_kernel`
load and store words. `msgpack_kernel` reads MessagePack. `scan_kernel` checks notifications with it; the index, the
outboxes and the pages of Spark read or write MessagePack with it too.
"""
