"""The settings of a Spark session, by the place where it runs."""

from __future__ import annotations

import pytest

from tidegate.pipeline.session import is_on_one_machine, settings_for


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", True),
        ("local[*]", True),
        ("local[2,4]", True),
        ("spark://127.0.0.1:7077", True),
        ("spark://localhost:7077", True),
        ("spark://[::1]:7077", True),
        ("spark://head:7077", False),
        ("spark://10.0.0.7:7077", False),
        ("spark://127.0.0.1:7077,10.0.0.7:7077", False),
        ("local-cluster[2,1,1024]", False),
        ("yarn", False),
        ("k8s://https://127.0.0.1:6443", False),
    ],
)
def test_the_driver_listens_on_loopback_when_nobody_else_needs_it(master: str, expected: bool) -> None:
    assert is_on_one_machine(master) == expected
    settings = settings_for(master, is_shown=False)
    assert settings.get("spark.driver.host") == ("127.0.0.1" if expected else None)
    assert ("spark.sql.streaming.checkpointFileManagerClass" in settings) == expected


def test_the_pages_of_spark_are_served_when_asked_for() -> None:
    assert [settings_for("local", is_shown=shown)["spark.ui.enabled"] for shown in (False, True)] == ["false", "true"]
