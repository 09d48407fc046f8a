"""Listeners: one module for each protocol. A listener turns a client's bytes into calls on a session, and the session's
events and deliveries back into bytes."""
