"""Random SPARQL over a small vocabulary, so that updates and queries concern the same few triples."""

from __future__ import annotations

import random
from typing import Final

PROLOGUE: Final = "PREFIX : <http://example.org/> PREFIX n: <names/> "
SUBJECTS: Final = (":a", ":b", "n:c", "<Agent_X>")
PREDICATES: Final = (":p", ":q", "n:r")
OBJECTS: Final = (":a", ":b", "n:c", "'x'", "'y'", "'x'@en", "1", "01", "2.50", "true", "'\\u0041 \\n'")
VARIABLES: Final = ("?s", "?o", "?v")


class SparqlTexts:
    """Draws SPARQL texts. All choices come from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._bound = 0

    def one_of(self, *choices: str) -> str:
        return self.random.choice(choices)

    def data(self, most: int = 3) -> str:
        triples = (
            f"{self.one_of(*SUBJECTS)} {self.one_of(*PREDICATES)} {self.one_of(*OBJECTS)} ."
            for _ in range(self.random.randint(1, most))
        )
        return "{ " + " ".join(triples) + " }"

    def pattern(self) -> str:
        subject = self.one_of("?s", "?s", "?v", *SUBJECTS)
        predicate = self.one_of(*PREDICATES, *PREDICATES, "?w")
        return f"{subject} {predicate} {self.one_of('?o', '?o', '?v', *OBJECTS)} ."

    def patterns(self, most: int = 2) -> str:
        return " ".join(self.pattern() for _ in range(self.random.randint(1, most)))

    def group(self) -> str:
        parts = [self.patterns()]
        for _ in range(self.random.randint(0, 2)):
            self._bound += 1
            parts.append(
                self.one_of(
                    f"OPTIONAL {{ {self.patterns()} }}",
                    f"MINUS {{ {self.patterns(1)} }}",
                    f"{{ {self.patterns(1)} }} UNION {{ {self.patterns(1)} }}",
                    f"FILTER NOT EXISTS {{ {self.patterns(1)} }}",
                    f"FILTER(EXISTS {{ {self.patterns(1)} }} || ?o = 1)",
                    "FILTER(?o != :a && !REGEX(STR(?o), '{'))",
                    f"BIND(CONCAT(STR(?o), '}}') AS ?b{self._bound})",
                    "VALUES ?s { :a n:c }",
                    f"?s {self.one_of(':p/:q', '^:p', ':p+', ':p|n:r', '(:p/n:r)', ':p*', '!:p')} ?o .",
                    f"?s {self.one_of(*PREDICATES)} ?o ; {self.one_of(*PREDICATES)} ?v , {self.one_of(*OBJECTS)} .",
                    f"[ {self.one_of(*PREDICATES)} ?o ] {self.one_of(*PREDICATES)} ?v .",
                    f"{{ SELECT ?s (COUNT(?o) AS ?n{self._bound}) WHERE {{ {self.patterns(1)} }} GROUP BY ?s }}",
                )
            )
        return "{ " + " ".join(parts) + " }"

    def operation(self, may_fail: bool) -> str:
        template = "{ " + self.patterns() + " }"
        return self.one_of(
            f"INSERT DATA {self.data()}",
            f"DELETE DATA {self.data()}",
            f"DELETE WHERE {{ {self.patterns()} }}",
            f"DELETE {template} WHERE {self.group()}",
            f"INSERT {template} WHERE {self.group()}",
            f"DELETE {template} INSERT {{ {self.patterns()} }} WHERE {self.group()}",
            f"INSERT DATA {{ GRAPH :g {self.data()} }}",
            f"INSERT {{ GRAPH :g {template} }} WHERE {self.group()}",
            f"CLEAR {'' if may_fail else 'SILENT'} GRAPH {self.one_of(':g', ':h')}",
        )

    def update(self, may_fail: bool = True) -> str:
        """Returns an update, mostly of one operation. Inserts are frequent, or the graph would soon be empty."""
        operations = [self.operation(may_fail) for _ in range(self.random.choice((1, 1, 1, 2, 3)))]
        if self.random.random() < 0.3:
            operations.append(f"INSERT DATA {self.data(6)}")
        return PROLOGUE + " ; ".join(operations)

    def query(self) -> str:
        group = self.group()
        return PROLOGUE + self.one_of(
            f"SELECT * WHERE {group}",
            f"SELECT ?s ?o WHERE {group}",
            f"SELECT DISTINCT ?o WHERE {group}",
            f"SELECT (COUNT(*) AS ?n) (SUM(?o) AS ?t) WHERE {group}",
            f"SELECT ?s (COUNT(DISTINCT ?o) AS ?n) WHERE {group} GROUP BY ?s HAVING(COUNT(?o) > 1)",
            f"SELECT ?s WHERE {group} ORDER BY DESC(?o) ?s LIMIT 3",
            f"ASK {group}",
            f"CONSTRUCT {{ ?s :p ?o }} WHERE {group}",
        )
