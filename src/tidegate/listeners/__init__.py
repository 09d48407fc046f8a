"""Listeners: one file a protocol. Bytes in, calls on the Connection Point out; and its deliveries back as bytes."""
