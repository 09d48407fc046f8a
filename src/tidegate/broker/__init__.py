"""One broker: `assembly` builds it from its parts, and `process` runs it in a process of its own.

`knowledge` connects the knowledge base to the layers. `mirror` copies notifications into the graph and triples out.
"""
