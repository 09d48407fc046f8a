"""The knowledge base: facts that everyone shares, as a graph of triples, and questions that stay open.

    SSAP · HTTP ─► request pool ─► graph (pyoxigraph) ─► delta ─► persistent queries ─► indications

A change of the graph is atomic and answers with its delta, the triples that were really added and removed; everything
that follows (indications, notifications on the path, caches) is made of deltas, never of what somebody meant to change.
"""

from typing import Final

# Of a broker's data directory.
DIRECTORY: Final = "knowledge"
