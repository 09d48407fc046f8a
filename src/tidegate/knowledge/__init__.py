"""The knowledge base: shared facts as a graph of RDF triples, and persistent queries on it.

    SSAP · HTTP ─► request pool ─► graph (pyoxigraph) ─► delta ─► persistent queries ─► indications

A change of the graph is atomic and returns its delta: the triples that were actually added and removed. Indications,
notifications and cache invalidation are all derived from deltas, never from the request that asked for a change.
"""

from typing import Final

# The name of the knowledge base's directory inside the broker's data directory.
DIRECTORY: Final = "knowledge"
