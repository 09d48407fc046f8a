"""HTTP: `server` has the routes, and each endpoint has a module; `connection` and `websocket` implement the protocols.

Endpoints share `body`, `routing`, `push`, `peer` and the `json_…` modules; `openapi` describes the endpoints.
"""
