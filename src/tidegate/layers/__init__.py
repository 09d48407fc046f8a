"""The layers a notification passes: Connection Point, Access Point, Matcher, Exit Point, and a Connection Point again.

Each layer is a synchronous state machine: `on_<input>(source, frame, now_s) -> outputs`. It reads no clock, no socket
and no random source. A host (`hosts`, `cluster`, or a simulation of the tests) carries the outputs to their receivers.
"""
